// Upstreams: how full each bucket is, what the breaker says, GPUs' caches, and what it costs.

import * as actions from "./actions.js";
import { get } from "./api.js";
import { attr, bar, byId, each, el, name, text, visible } from "./dom.js";
import { age, big, count, rate, share, span, usd } from "./format.js";
import { button } from "./table.js";
import { BREAKER, BUCKETS, SIGNS } from "./words.js";

const FIGURES = [
  ["Running", (u) => count(u.in_flight) + (u.slots_limit ? ` of ${count(u.slots_limit)}` : "")],
  ["Requests", (u) => rate(u.requests_per_s)],
  ["Tokens", (u) => rate(u.tokens_per_s)],
  ["First token p50", (u) => span(u.first_token_p50_s)],
  ["Errors", (u) => rate(u.errors_per_s), (u) => u.errors_per_s > 0],
  ["429s", (u) => rate(u.paced_per_s), (u) => u.paced_per_s > 0],
  ["Cost", (u) => (typeof u.usd_per_hour === "number" ? `${usd(u.usd_per_hour)}/h` : usd(null))],
];

const HIGH = 0.95;

let burns = {}, version = null;

export function show(view) {
  learn(view.config?.version);
  each(byId("upstream-cards"), view.upstreams ?? [], (upstream) => upstream.name, make, fill);
}

/** From which share on a bucket's rest is for the best lane, as the config says; asked for when it has changed. */
async function learn(newest) {
  if (newest === version) return;
  version = newest;
  try {
    const { upstreams } = await get("config");
    burns = Object.fromEntries(Object.entries(upstreams ?? {}).map(([one, { burn }]) => [one, burn]));
  } catch {
    burns = {};
  }
}

function make(upstream) {
  const title = el("div", { className: "title" }, el("h3"), el("span", { className: "soft" }),
    el("span", { className: "pill" }));
  const state = el("p", { className: "state" });
  const figures = el("dl", { className: "figures" }, ...FIGURES.map(([head]) => el("div", {}, el("dt", {}, head), el("dd"))));
  const out = button("", () => (card.out ? actions.putBack(upstream.name) : actions.takeOut(upstream.name)));
  const reset = button("Reset", () => actions.reset(upstream.name), { "aria-label": `Reset the breaker of ${visible(upstream.name)}` });
  const trip = button("Trip", () => actions.trip(upstream.name), { "aria-label": `Trip the breaker of ${visible(upstream.name)}` });
  const card = el("article", { className: "card upstream" }, title, state, el("ul", { className: "meters" }), figures,
    el("div", { className: "row" }, trip, reset, out));
  return Object.assign(card, { parts: { title, state, figures, out } });
}

function fill(card, upstream) {
  const { title, state, figures, out } = card.parts;
  const [level, word, means] = BREAKER[upstream.state] ?? ["info", visible(upstream.state ?? "unknown"), ""];
  card.out = Boolean(upstream.out);
  name(title.children[0], upstream.name);
  text(title.children[1], visible(`${upstream.provider ?? ""}${upstream.owned ? ", owned" : ""}`));
  text(title.children[2], upstream.out ? "out" : word);
  attr(title.children[2], "data-level", upstream.out ? "odd" : level);
  text(state, upstream.out ? "taken out by an operator" : breaker(upstream, means));
  each(card.querySelector(".meters"), meters(upstream), (meter) => meter.id, (meter) => makeMeter(meter, upstream.name), fillMeter);
  FIGURES.forEach(([, value, bad], i) => {
    const cell = figures.children[i].lastChild;
    text(cell, value(upstream));
    attr(cell, "data-level", bad?.(upstream) ? "warning" : null);
  });
  text(out, card.out ? "Put back" : "Take out");
  attr(out, "aria-label", `${card.out ? "Put back" : "Take out"} ${visible(upstream.name)}`);
}

function breaker(upstream, means) {
  const sign = upstream.sign && upstream.state !== "closed" ? `: ${SIGNS[upstream.sign] ?? visible(upstream.sign)}` : "";
  const rests = upstream.rests_s > 0 ? `; tried again in ${age(upstream.rests_s)}` : "";
  return `${means}${sign}${rests}`;
}

function meters(upstream) {
  const found = (upstream.buckets ?? []).map((bucket) => ({ id: `bucket ${bucket.key}`, ...ofBucket(bucket, burns[upstream.name]) }));
  if (upstream.kv) found.push({ id: "kv", ...ofCache(upstream.kv) });
  return found;
}

/** A bucket's bar is what is used of it; what it owes is drawn over the whole, hatched. */
function ofBucket(bucket, burns) {
  const burn = bucket.kind === "requests" || typeof burns !== "number" ? null : burns;
  const used = bucket.capacity > 0 ? 1 - bucket.level / bucket.capacity : 0;
  const debt = bucket.level < 0;
  const notes = [];
  if (debt) notes.push(`owes ${big(-bucket.level)}, out of debt in ${age(bucket.per_second > 0 ? -bucket.level / bucket.per_second : null)}`);
  if (bucket.closed_s > 0) notes.push(`closed for ${age(bucket.closed_s)}`);
  if (burn !== null && used >= burn && !debt) notes.push("the rest is for the best lane");
  if (bucket.shadow) notes.push("only watched");
  return {
    head: headOf(bucket), kind: bucket.kind, model: modelOf(bucket.key), title: bucket.key, used, debt,
    level: debt || bucket.closed_s > 0 ? "error" : used >= (burn ?? HIGH) ? "warning" : "ok", burn,
    said: `${big(Math.max(0, bucket.level))} of ${big(bucket.capacity)} left, +${rate(bucket.per_second)}`,
    notes: notes.join("; "), share: used,
  };
}

/** upstream/primary/gpt-5/total: the tokens a minute of one model. */
function headOf({ key = "", kind = key }) {
  const model = modelOf(key);
  const words = BUCKETS[kind] ?? visible(kind);
  return model ? `${words}, ${visible(model)}` : words;
}

function modelOf(key = "") {
  const model = key.split("/").slice(2, -1).join("/");
  return model === "*" ? "" : model;
}

function ofCache(kv) {
  const stale = kv.stale_s > 10;
  const full = kv.saturation ?? kv.fill;
  const unknown = typeof full !== "number";
  return {
    head: "KV cache", title: "the fullest instance's", used: full ?? 0, debt: false, share: full,
    level: unknown || stale ? "warning" : full >= 0.8 ? "error" : full >= 0.7 ? "warning" : "ok",
    said: unknown ? "not read yet" : `${share(full)} full`,
    notes: stale ? `last read ${age(kv.stale_s)} ago` : "",
  };
}

function tick(node, at) {
  node.hidden = typeof at !== "number";
  if (!node.hidden) node.style.left = `${at * 100}%`;
}

function makeMeter(meter, upstream) {
  const change = meter.kind in BUCKETS ? button("Change", () => actions.changeBucket(upstream, meter.kind, meter.model), {
    className: "quiet", "aria-label": `Change the limit of ${visible(upstream)}: ${meter.head}`,
  }) : null;
  return el("li", {}, el("span", { className: "meter-head" }), el("span", { className: "meter-said n" }),
    el("span", { className: "track", role: "meter", "aria-valuemin": "0", "aria-valuemax": "100" }, el("span", { className: "fill" }),
      el("span", { className: "tick" })),
    el("span", { className: "meter-notes" }), change);
}

function fillMeter(node, meter) {
  const [head, said, track, notes] = node.children;
  attr(node, "data-level", meter.level);
  text(head, meter.head);
  attr(head, "title", visible(meter.title));
  text(said, meter.said);
  track.classList.toggle("debt", meter.debt);
  bar(track.firstChild, meter.used);
  tick(track.lastChild, meter.burn);
  attr(track, "aria-label", `${meter.head} used`);
  attr(track, "aria-valuenow", Math.round(Math.min(1, Math.max(0, meter.used)) * 100));
  attr(track, "aria-valuetext", `${meter.said}${meter.notes ? `; ${meter.notes}` : ""}`);
  const used = typeof meter.share === "number" && meter.head !== "KV cache" ? `${share(Math.max(0, meter.share))} used` : "";
  text(notes, [used, meter.notes].filter(Boolean).join(" · "));
}
