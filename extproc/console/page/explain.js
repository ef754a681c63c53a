// What happened to one request, as a timeline that can be read from top to bottom.

import { get, path } from "./api.js";
import { byId, el, visible } from "./dom.js";
import { steps } from "./story.js";

const dialog = byId("explain"), place = byId("explain-body");
const AGAIN_MS = 2000;
const OPEN = new Set(["arriving", "waiting", "running"]);

let asked = "", timer;

export function start() {
  byId("search").addEventListener("submit", (event) => {
    event.preventDefault();
    const id = byId("search-id").value.trim();
    if (id) explain(id);
  });
  byId("explain-close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  dialog.addEventListener("close", () => { if (linked()) history.replaceState(null, "", location.pathname + location.search); });
  addEventListener("hashchange", follow);
  follow();
}

/** Open what is known of a request; the address then leads to it, too. */
export async function explain(id) {
  asked = id;
  if (linked() !== id) history.replaceState(null, "", `#request=${encodeURIComponent(id)}`);
  head(id);
  fill(el("p", { className: "none" }, "Looking it up …"));
  if (!dialog.open) dialog.showModal();
  await look(id);
}

/** Ask for what is known of it, and again while it is not over. */
async function look(id) {
  clearTimeout(timer);
  try {
    const found = await get(path`requests/${id}`);
    if (asked !== id) return;
    head(found.id || id);
    const open = place.querySelector("details")?.open ?? false;
    fill(...steps(found));
    place.querySelector("details").open = open;
    if (OPEN.has(found.state)) timer = setTimeout(() => { if (dialog.open && asked === id) look(id); }, AGAIN_MS);
  } catch (error) {
    if (asked !== id) return;
    const words = error.status === 404
      ? "Not known. The newest requests are kept in memory; older ones are in the log, if they were refused or slow."
      : error.message;
    fill(el("p", { className: "error", role: "alert" }, visible(words)));
  }
}

function head(id) {
  byId("explain-head").replaceChildren("Request ", el("bdi", { className: "code" }, visible(id)));
}

function fill(...nodes) {
  place.replaceChildren(...nodes);
}

function follow() {
  const id = linked();
  if (id) explain(id);
}

function linked() {
  const found = /^#request=(.+)$/.exec(location.hash);
  if (!found) return "";
  try {
    return decodeURIComponent(found[1]);
  } catch {
    return "";
  }
}
