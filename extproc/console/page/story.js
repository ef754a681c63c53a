// An explanation (see telemetry/explain.py) as a story: one step for each thing that happened, in order.

import { raise } from "./actions.js";
import { bar, el, visible } from "./dom.js";
import { big, clock, count, plural, span, usd } from "./format.js";
import { button } from "./table.js";

const STATES = {
  arriving: ["busy", "arriving"], waiting: ["busy", "waiting"], running: ["busy", "running"], served: ["ok", "served"],
  failed: ["error", "failed"], refused: ["warning", "refused"], evicted: ["warning", "evicted"], left: ["quiet", "its client left"], unknown: ["quiet", "unknown"],
};

const CUT_SHORT = new Set(["its client left", "a later copy of it took its place"]);

/** The elements that tell it. Parts that are absent do not apply, and are left out. */
export function steps(found) {
  const list = [
    arrived(found), part(found.size, (size) => step("Priced", size.words ?? `${count(size.total)} tokens`)),
    part(found.checks, checks), part(found.queue, queue), part(found.choice, choice), ...(found.attempts ?? []).map(attempt),
    part(found.refusal, (refused) => refusal(refused, found.caller)), part(found.settlement, settlement), part(found.notes, notes),
  ];
  const data = el("details", {}, el("summary", {}, "As data"), el("pre", { className: "code" }, JSON.stringify(found, null, 1).split("\n").map((line) => visible(line, 1000)).join("\n")));
  return [head(found), el("ol", { className: "story" }, ...list.filter(Boolean)), data];
}

function head(found) {
  const [level, word] = STATES[found.state] ?? ["quiet", visible(found.state ?? "")];
  const pill = el("span", { className: "pill", "data-level": level }, el("span", { className: "mark" }), found.reason ? `${word}: ${visible(found.reason)}` : word);
  const more = [
    typeof found.lasted_s === "number" ? span(found.lasted_s) : "",
    found.earlier_of_this_id ? `${plural(found.earlier_of_this_id, "earlier request")} had the same id` : "",
    found.events_not_kept ? `${plural(found.events_not_kept, "event")} not kept` : "",
  ].filter(Boolean).join(" · ");
  return el("p", { className: "story-head" }, pill, el("span", { className: "soft" }, more));
}

function arrived(found) {
  const { caller = {}, asked = {} } = found;
  const day = new Date(found.arrived * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "short" });
  return step("Arrived", `${day}, ${clock(found.arrived)}`, facts([
    ["Tenant", caller.tenant], ["Lane", caller.lane], ["Model", asked.model], ["Endpoint", asked.endpoint ?? asked.path],
    ["Session", caller.session && (caller.session_was_named ? caller.session : `${caller.session} (derived)`)],
    ["Streams", asked.stream === undefined ? null : asked.stream ? "yes" : "no"], ["Size", asked.bytes && `${count(asked.bytes)} bytes`],
    ["May wait", asked.may_wait_s && span(asked.may_wait_s)], ["Deadline", asked.deadline_s && `in ${span(asked.deadline_s)}`],
    ["Retries", asked.retries], ["VIP", caller.vip && "yes"], ["Observed only", asked.observed && "yes"],
    ["Ticket", found.ticket], ["Trace", found.trace_id],
  ]));
}

function checks(list) {
  return step("Checked", "", el("ul", { className: "checks" }, ...list.map(({ passed, words }) => el("li", { "data-level": passed ? "ok" : "warning" },
    el("span", { className: "mark" }), el("span", {}, passed ? "passed: " : "stopped here: ", visible(words))))));
}

function queue(found) {
  const most = Math.max(...(found.waited_for ?? []).map((spell) => spell.seconds), 0);
  const spells = (found.waited_for ?? []).map((spell) => {
    const fill = el("span", { className: "fill" });
    bar(fill, most ? spell.seconds / most : 0);
    return el("li", {}, el("span", {}, visible(spell.words || "its turn")), el("span", { className: "n" }, span(spell.seconds)), el("span", { className: "track" }, fill));
  });
  const forecast = found.forecast ? `The forecast was ${found.forecast}.` : "";
  const late = found.waited_s > 0 ? `Waited ${span(found.waited_s)}` : "In line";
  return step(late, visible(found.words ?? ""), spells.length ? el("ul", { className: "spells" }, ...spells) : null, forecast ? el("p", { className: "soft" }, forecast) : null);
}

function choice(found) {
  const order = (found.order ?? []).map((name) => visible(name));
  const words = order.length > 1 ? `${order[0]}, then ${order.slice(1).join(", ")} if that fails` : order[0] ?? "";
  const others = (found.others ?? []).map((other) => el("li", {}, el("b", {}, visible(other.upstream)), ` ${visible(other.words ?? other.why ?? "")}`));
  return step(found.upstream ? `Sent to ${visible(found.upstream)}` : "No upstream", words, others.length ? el("div", {}, el("p", { className: "soft" }, "Why not the others:"), el("ul", { className: "others" }, ...others)) : null);
}

function attempt(found) {
  const went = found.ok ? "answered" : CUT_SHORT.has(found.cause) ? "was cut short" : "failed";
  const words = [
    found.status ? `status ${found.status}` : "", found.error && visible(found.error), found.cause && visible(found.cause),
    found.seconds && `after ${span(found.seconds)}`, found.first_token_s && `first token after ${span(found.first_token_s)}`,
    found.paid_for && "paid all the same", found.then && `went on at ${visible(found.then)}`,
  ].filter(Boolean).join(", ");
  return step(`${visible(found.upstream)} ${went}`, words).withLevel(found.ok ? "ok" : "error");
}

function refusal(found, caller = {}) {
  const retry = found.retry_after_s > 0 ? `Told to come back in ${span(found.retry_after_s)}.` : "Told that a retry cannot help.";
  const words = [found.words && visible(found.words), found.detail && visible(found.detail)].filter(Boolean).join("; ");
  const more = [retry, found.answered_instead ? "An answer of last resort was given instead." : ""].filter(Boolean).join(" ");
  const helps = found.reason === "session_budget" && caller.session && button("Raise its budget …", () => raise(caller.tenant, caller.session));
  return step(`Refused: ${visible(found.reason)} (${found.status})`, words, more ? el("p", { className: "soft" }, more) : null, helps ? el("div", {}, helps) : null)
    .withLevel("warning");
}

function settlement(found) {
  const { reserved = {}, used } = found;
  return step("Settled", visible(found.words ?? ""), facts([
    ["Reserved", reserved.total !== undefined ? `${big(reserved.total)} tokens` : null], ["Used", used && `${big(used.total)} tokens`],
    ["Beyond it", found.beyond_reserved ? `${big(found.beyond_reserved)} tokens` : null], ["Cached", used?.cached ? big(used.cached) : null],
    ["Reasoning", used?.reasoning ? big(used.reasoning) : null], ["Cost", typeof found.cost_usd === "number" ? usd(found.cost_usd) : null],
    ["First token", typeof found.first_token_s === "number" ? span(found.first_token_s) : null],
    ["Duration", typeof found.duration_s === "number" ? span(found.duration_s) : null], ["Finish", found.finish],
    ["Client", found.client_gone ? "left before its end" : found.evicted ? "had sent it again" : null], ["Flags", (found.flags ?? []).join(", ")],
    ["Into debt", (found.into_debt ?? []).map((debt) => `${big(debt.amount)}: ${debt.words ?? debt.key}`).join("; ")],
  ]));
}

function notes(list) {
  return step("Notes", "", el("ul", { className: "others" }, ...list.map((note) => el("li", {}, visible(note)))));
}

function part(found, tell) {
  return found && (!Array.isArray(found) || found.length) ? tell(found) : null;
}

function step(title, words, ...more) {
  const made = el("li", {}, el("span", { className: "mark" }), el("h3", {}, title), words ? el("p", {}, words) : null, ...more);
  made.withLevel = (level) => {
    made.dataset.level = level;
    return made;
  };
  return made.withLevel("info");
}

function facts(pairs) {
  const known = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "" && value !== false && value !== 0);
  return el("dl", { className: "facts" }, ...known.map(([key, value]) => el("div", {}, el("dt", {}, key), el("dd", {}, visible(value)))));
}
