// The newest actions from the audit log, whoever did them and wherever; asked for while they are shown.

import { get } from "./api.js";
import { byId, each, el, text, visible } from "./dom.js";
import { clock } from "./format.js";

const AGAIN_MS = 5000;

const box = byId("audit");
let timer;

export function start() {
  box.addEventListener("toggle", look);
  addEventListener("tidegate:proof", look);
}

async function look() {
  clearTimeout(timer);
  if (!box.open) return;
  try {
    const { actions } = await get("audit");
    text(byId("audit-said"), actions.length ? "" : "Nobody did anything yet.");
    each(byId("audit-list"), actions, (item) => item.id, make, () => {});
  } catch (error) {
    text(byId("audit-said"), error.message);
  }
  timer = setTimeout(look, AGAIN_MS);
}

function make(item) {
  const day = new Date(item.at * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "short" });
  const wanted = Object.entries(item.arguments ?? {}).map(([name, value]) => `${name} ${value}`).join(", ");
  const what = `${item.action.replaceAll("_", " ")}${wanted ? ` (${wanted})` : ""}`;
  const end = item.result === "done" ? "" : ` – ${item.result}${item.why ? `: ${item.why}` : ""}`;
  const why = item.reason ? `. Why: ${item.reason}` : "";
  return el("li", {}, el("time", { className: "n soft" }, `${day} ${clock(item.at)}`), el("span", {}, visible(`${item.who} from ${item.from}: ${what}${end}${why}`, 1000)));
}
