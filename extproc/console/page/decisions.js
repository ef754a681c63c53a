// The newest decisions; or, when a filter is set, those that the service finds by it.

import { get } from "./api.js";
import { attr, byId, el, name, text, visible } from "./dom.js";
import { ago, big, clock, plural, span } from "./format.js";
import { requestLink } from "./now.js";
import { row, rows } from "./table.js";
import { REASONS } from "./words.js";

const COLUMNS = [
  ["At", ""], ["Request", "head"], ["Tenant", ""], ["Lane", ""], ["Model", ""], ["Outcome", ""], ["Upstream", ""], ["Waited", "n"],
  ["Tokens", "n"],
];
const MOST = 50, AGAIN_MS = 3000;

const form = byId("filter");
let chosen = "", timer, explain = () => {};

export function start(explained) {
  explain = explained;
  options("reason", Object.keys(REASONS));
  form.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(search, 250); });
  form.addEventListener("reset", () => setTimeout(search));
  form.addEventListener("submit", (event) => { event.preventDefault(); search(); });
}

export function show(view) {
  options("lane", (view.lanes ?? []).map((lane) => lane.name));
  options("upstream", (view.upstreams ?? []).map((upstream) => upstream.name));
  if (!chosen) fill(view.recent ?? [], view.at);
}

/** Show the decisions on one tenant's requests. */
export function only(tenant) {
  form.reset();
  form.elements.tenant.value = tenant;
  byId("decisions").scrollIntoView();
  search();
}

async function search() {
  clearTimeout(timer);
  const wanted = new URLSearchParams([...new FormData(form)].filter(([, value]) => value !== ""));
  chosen = wanted.toString();
  if (!chosen) {
    text(byId("filter-said"), "");
    return;
  }
  wanted.set("limit", String(MOST));
  const asked = chosen;
  try {
    const found = await get(`requests?${wanted}`);
    if (asked !== chosen) return;
    const list = found.requests ?? [];
    fill(list, Date.now() / 1000);
    text(byId("filter-said"), list.length < MOST ? `${plural(list.length, "decision")} in memory` : `the newest ${MOST}`);
    timer = setTimeout(search, AGAIN_MS);
  } catch (error) {
    if (asked === chosen) text(byId("filter-said"), error.message);
  }
}

function fill(list, now) {
  rows(byId("recent-rows"), byId("no-recent"), list, (item) => item.ticket ?? `${item.id} ${item.at}`, make, (made, item) => {
    const [at, , tenant, lane, model, outcome, upstream, waited, tokens] = made.children;
    text(at, clock(item.at));
    attr(at, "title", ago(item.at, now));
    name(tenant.firstChild, item.tenant ?? "");
    name(lane.firstChild, item.lane ?? "");
    name(model.firstChild, item.model ?? "");
    attr(outcome, "data-level", level(item));
    text(outcome.lastChild, visible(item.reason || item.state || ""));
    name(upstream.firstChild, item.upstream ?? "");
    text(waited, span(item.waited_s));
    text(tokens, big(item.tokens));
  });
}

function make(item) {
  const made = row(COLUMNS);
  made.children[1].append(requestLink(item.id || item.ticket, explain, item.ticket));
  for (const i of [2, 3, 4, 6]) made.children[i].append(el("span", { className: "cut" }));
  made.children[5].append(el("span", { className: "mark" }), el("span"));
  return made;
}

function level(item) {
  if (item.reason) return "warning";
  return { waiting: "busy", arriving: "busy", refused: "warning", failed: "error", left: "quiet", unknown: "quiet" }[item.state] ?? "ok";
}

function options(field, names) {
  const select = form.elements[field];
  const wanted = ["", ...names];
  if (wanted.length === select.options.length && wanted.every((value, i) => select.options[i].value === value)) return;
  const before = select.value;
  select.replaceChildren(...wanted.map((value) => el("option", { value }, value ? visible(value) : "any")));
  select.value = wanted.includes(before) ? before : "";
}
