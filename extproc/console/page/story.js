// An explanation as the service gives it, as elements. What this page does not know yet is shown as it is.

import { el, visible } from "./dom.js";

export function steps(found) {
  const list = el("dl", { className: "facts" });
  for (const [key, value] of Object.entries(found ?? {})) list.append(el("dt", {}, key.replaceAll("_", " ")), el("dd", {}, plain(value)));
  return [list];
}

function plain(value) {
  return typeof value === "object" ? visible(JSON.stringify(value)) : visible(value);
}
