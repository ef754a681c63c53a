// The first screen: who waits, for what, which limit binds, why requests were refused, what would help.

import * as actions from "./actions.js";
import { attr, bar, byId, each, el, name, text, visible } from "./dom.js";
import { age, ago, big, clock, count, plural, rate, span, until, usd } from "./format.js";
import { BREAKER, LEVELS, REASONS, STATUS } from "./words.js";

const MOST_REASONS = 6, LATELY_S = 3600;

/** explain(id): shows what happened to a request. */
export function show(view, explain) {
  const [level, word] = STATUS[view.status] ?? ["info", view.status];
  const pill = byId("status");
  attr(pill, "data-level", level);
  text(pill, visible(word));
  text(byId("now-head"), headline(view));
  document.title = `${level === "ok" ? "" : `${word}: `}Tidegate`;
  sums(view);
  bindings(view);
  reasons(view, explain);
  notices(view);
  banners(view);
}

/** One sentence that answers most of it. */
function headline(view) {
  const waiting = sum(view.lanes, "requests"), refused = sum(view.refusals, "count_5m");
  const oldest = Math.max(0, ...(view.lanes ?? []).map((lane) => lane.oldest_s ?? 0));
  const parts = [waiting ? `${plural(waiting, "request waits", "requests wait")}, the oldest for ${age(oldest)}` : "Nobody waits"];
  parts.push(refused ? `${count(refused)} ${refused === 1 ? "was" : "were"} refused in 5 minutes` : "nothing was refused in 5 minutes");
  const resting = (view.upstreams ?? []).filter((upstream) => upstream.state === "open" || upstream.out);
  const sick = resting.map((upstream) => `${visible(upstream.name)} ${upstream.out ? "is out" : "rests"}`);
  if (sick.length > 1 && sick.length === view.upstreams.length) parts.push("every upstream rests or is out");
  else if (sick.length) parts.push(sick.length > 3 ? `${count(sick.length)} upstreams rest` : sick.join(", "));
  return `${parts.join("; ")}.`;
}

function sums(view) {
  const lanes = view.lanes ?? [], upstreams = view.upstreams ?? [];
  const figures = [
    ["Waiting", count(sum(lanes, "requests")), `${big(sum(lanes, "tokens"))} tokens`],
    ["Let go", rate(sum(lanes, "admitted_per_s"))],
    ["Refused", rate(sum(lanes, "refused_per_s"))],
    ["Running", count(sum(upstreams, "in_flight"))],
    ["Tokens", rate(sum(upstreams, "tokens_per_s"))],
    ["Cost", upstreams.some((one) => typeof one.usd_per_hour === "number") ? `${usd(sum(upstreams, "usd_per_hour"))}/h` : usd(null)],
  ];
  each(byId("sums"), figures, ([head]) => head, ([head]) => {
    const made = el("div", {}, el("dt", {}, head), el("dd"));
    return made;
  }, (node, [, value, more]) => {
    text(node.lastChild, value);
    attr(node, "title", more);
  });
}

function bindings(view) {
  const found = view.binding ?? [];
  byId("no-bindings").hidden = found.length > 0;
  text(byId("no-bindings"), sum(view.lanes, "requests") ? "Who waits goes within a moment: no limit binds." : "Nobody waits.");
  each(byId("bindings"), found, (item) => JSON.stringify([item.lane, item.key]), () => el("li", {},
    el("span", { className: "lane-name" }), el("p", { className: "what" }),
    el("p", { className: "more" }), el("p", { className: "help" })), (node, item) => {
    const [lane, what, figures, help] = node.children;
    name(lane, item.lane ?? "all");
    text(what, visible(item.text));
    attr(what, "title", visible(item.key ?? ""));
    text(figures, `${count(item.waiting)} waiting${typeof item.next_s === "number" ? ` · next in ${age(item.next_s)}` : ""}`);
    figures.hidden = !item.waiting || /waiting/.test(item.text ?? "");
    text(help, visible(item.help ?? ""));
    help.hidden = !item.help;
  });
}

function reasons(view, explain) {
  // The last of an hour stay, so that somebody who comes later finds one to look at.
  const all = (view.refusals ?? []).filter((item) => item.count_5m > 0 || ((item.ids ?? []).length && view.at - item.last_at < LATELY_S));
  const found = [...all].sort((a, b) => b.count_5m - a.count_5m).slice(0, MOST_REASONS);
  const most = Math.max(1, ...found.map((item) => item.count_5m));
  byId("no-reasons").hidden = found.length > 0;
  each(byId("reasons"), found, (item) => item.reason, () => el("li", {},
    el("span", { className: "big n" }), el("div", {}, el("code"), " ", el("span", { className: "soft" }),
      el("span", { className: "track" }, el("span", { className: "fill" })),
      el("p", { className: "help" }), el("p", { className: "ids" }))), (node, item) => {
    const [figure, rest] = node.children;
    const [reason, last, track, help, ids] = rest.children;
    text(figure, count(item.count_5m));
    text(reason, visible(item.reason));
    text(last, view.at - item.last_at < 1 ? "just now" : `last ${ago(item.last_at, view.at)}`);
    bar(track.firstChild, item.count_5m / most);
    const [means, helps] = REASONS[item.reason] ?? ["", ""];
    text(help, means ? `${means}; ${helps}` : "");
    each(ids, (item.ids ?? []).slice(0, 3), (id) => id, (id) => requestLink(id, explain), () => {});
  });
}

/** A button that explains a request. ticket: names it alone, where its client used an id again, or none. */
export function requestLink(id, explain, ticket = id) {
  const made = el("button", { type: "button", className: "id", on: { click: () => explain(ticket) } });
  name(made, id);
  made.setAttribute("aria-label", `Explain request ${visible(id)}`);
  return made;
}

function notices(view) {
  const found = (view.notices ?? []).map((item, place) => ({ ...item, place }));
  byId("no-notices").hidden = found.length > 0;
  // By place, not by text: a text may count down.
  each(byId("notices"), found, (item) => item.place, () => el("li", {}, el("span", { className: "mark" }),
    el("div", {}, el("b"), " ", el("span"), " ", el("span", { className: "soft" }), el("a"))), (node, item) => {
    attr(node, "data-level", item.level);
    const [level, words, since, link] = node.lastChild.children;
    text(level, LEVELS[item.level] ?? visible(item.level));
    text(words, visible(item.text));
    text(since, item.since ? `for ${age(view.at - item.since)}` : "");
    runbook(link, item.runbook);
  });
}

/** A runbook is an address, or a section of the README, which this page can only name. */
function runbook(link, where) {
  const address = /^https?:\/\//.test(where ?? "");
  attr(link, "href", address ? where : null);
  attr(link, "rel", "noreferrer noopener");
  attr(link, "target", address ? "_blank" : null);
  text(link, where ? (address ? "Runbook" : `README: ${visible(where.replace(/^.*#/, "").replaceAll("-", " "))}`) : "");
}

/** Loud, above all else: what makes everything on the page different from usual. */
function banners(view) {
  const levers = view.levers ?? {}, found = [];
  if (levers.bypass) found.push(["odd", `Bypass ${until(levers.bypass.until)}: everybody is let go, nothing is limited.`, "End bypass", actions.noBypass]);
  else if (view.status === "bypassed") found.push(["odd", "Bypass: everybody is let go, nothing is limited.", "", null]);
  if (levers.draining || view.status === "draining") found.push(["odd", "Draining: nobody new gets in.", levers.draining ? "Stop draining" : "", actions.undrain]);
  if (view.status === "outage") found.push(["error", `Outage: ${outage(view)}`, "", null]);
  for (const [lane, state] of Object.entries(levers.lanes ?? {})) {
    if (state.paused) found.push(["warning", `Lane ${visible(lane)} is paused ${until(state.until)}.`, "Resume", () => actions.resume(lane)]);
  }
  each(byId("banners"), found, ([, words]) => words, ([level, words, doIt, action]) => el("div", { className: "banner", "data-level": level },
    el("span", { className: "mark" }), el("p", {}, words), doIt ? el("button", { type: "button", on: { click: action } }, doIt) : null), () => {});
}

function outage(view) {
  const worst = (view.notices ?? []).find((item) => item.level === "error");
  if (worst) return visible(worst.text);
  const open = (view.upstreams ?? []).filter((upstream) => upstream.state !== "closed" || upstream.out);
  return `${open.map((upstream) => `${visible(upstream.name)} is ${upstream.out ? "out" : BREAKER[upstream.state]?.[1] ?? visible(upstream.state)}`).join(", ")}.`;
}

export const sum = (items, key) => (items ?? []).reduce((whole, item) => whole + (item[key] ?? 0), 0);

/** The clock of the service when this was so. */
export const at = (view) => clock(view.at);
