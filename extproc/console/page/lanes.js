// Lanes: what waits in each, for how long, and what it waits for.

import * as actions from "./actions.js";
import { attr, bar, byId, each, el, name, text, visible } from "./dom.js";
import { big, count, rate, span } from "./format.js";
import { button, row } from "./table.js";
import { BUCKETS } from "./words.js";

const KEYS = { ...BUCKETS, slots: "slots", kv: "KV cache", breaker: "breaker" };

const COLUMNS = [
  ["Lane", "head"], ["Waiting", ""], ["Tokens", "n"], ["Oldest", "n"], ["Forecast", "n"], ["Wait p50", "n"], ["p95", "n"],
  ["p99", "n"], ["Let go", "n"], ["Refused", "n"], ["Binds", "wide"], ["", "does"],
];

export function show(view) {
  each(byId("lane-rows"), view.lanes ?? [], (lane) => lane.name, make, fill);
}

function make(lane) {
  const made = row(COLUMNS), cells = made.children;
  cells[0].append(el("span", { className: "lane-name" }), el("span", { className: "tag warning" }, "paused"));
  cells[1].append(el("span", { className: "big n" }), el("span", { className: "soft" }),
    el("span", { className: "track" }, el("span", { className: "fill" })));
  cells[10].append(el("span", { className: "binds" }));
  cells[11].append(button("Pause", () => (made.paused ? actions.resume(lane.name) : actions.pause(lane.name))));
  return made;
}

function fill(made, lane) {
  const [head, waiting, tokens, oldest, forecast, p50, p95, p99, go, refused, binds, does] = made.children;
  made.paused = Boolean(lane.paused);
  name(head.firstChild, lane.name);
  head.lastChild.hidden = !lane.paused;
  text(waiting.children[0], count(lane.requests));
  text(waiting.children[1], lane.max_requests ? ` of ${count(lane.max_requests)}` : "");
  bar(waiting.children[2].firstChild, lane.max_requests ? lane.requests / lane.max_requests : 0);
  text(tokens, big(lane.tokens));
  text(oldest, lane.requests ? span(lane.oldest_s) : span(null));
  attr(oldest, "data-level", late(lane.oldest_s, lane.max_wait_s));
  attr(oldest, "title", lane.max_wait_s ? `waits ${span(lane.max_wait_s)} at most` : null);
  text(forecast, span(lane.predicted_s));
  attr(forecast, "data-level", late(lane.predicted_s, lane.max_wait_s));
  for (const [cell, key] of [[p50, "wait_p50_s"], [p95, "wait_p95_s"], [p99, "wait_p99_s"]]) text(cell, span(lane[key]));
  text(go, rate(lane.admitted_per_s));
  text(refused, rate(lane.refused_per_s));
  attr(refused, "data-level", lane.refused_per_s > 0 ? "warning" : null);
  text(binds.firstChild, keyWords(lane.binding));
  attr(binds.firstChild, "title", visible(lane.binding ?? ""));
  const button = does.firstChild;
  text(button, lane.paused ? "Resume" : "Pause");
  attr(button, "aria-label", `${lane.paused ? "Resume" : "Pause"} lane ${visible(lane.name)}`);
}

/** upstream/primary/gpt-5/total as "primary: tokens a minute"; other keys as they are. */
function keyWords(key) {
  const parts = String(key ?? "").split("/");
  if (parts[0] !== "upstream" || parts.length < 3) return visible(key ?? "");
  return `${visible(parts[1])}: ${(KEYS[parts.at(-1)] ?? visible(parts.at(-1))).toLowerCase()}`;
}

/** A wait near its end is marked. */
function late(seconds, most) {
  if (!most || !(seconds > 0)) return null;
  if (seconds >= most) return "error";
  return seconds >= 0.7 * most ? "warning" : null;
}
