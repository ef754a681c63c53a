// What an operator can do from here. Each asks first, sends one request, and tells what came of it.

import { act, get, path, proof } from "./api.js";
import { ask, check, duration, line, number, reason, tokenFields } from "./ask.js";
import { byId, el, text, visible } from "./dom.js";
import { count, until } from "./format.js";

const SETTINGS = { total: "tpm", input: "itpm", output: "otpm", requests: "rpm" };

let heard = () => {};

/** after(levers): called with the levers' new state after each action. */
export function onLevers(after) {
  heard = after;
}

export const pause = (lane) => ask({
  head: `Pause lane ${visible(lane)}?`,
  words: "Its requests wait from now on, and are refused as their deadlines come. What runs already goes on.",
  fields: [duration(), reason()], doIt: "Pause", danger: true,
  send: (said) => done("POST", path`lanes/${lane}/pause`, body(said), `Lane ${visible(lane)} is paused`),
});

export const resume = (lane) => ask({
  head: `Resume lane ${visible(lane)}?`, words: "Its requests go on in order.", fields: [reason()], doIt: "Resume",
  send: (said) => done("POST", path`lanes/${lane}/resume`, body(said), `Lane ${visible(lane)} goes on`),
});

export const trip = (upstream) => ask({
  head: `Trip the breaker of ${visible(upstream)}?`,
  words: "Nothing is sent there until its rest is over and a canary call has worked. Requests go to the next upstream of their chain.",
  fields: [reason()], doIt: "Trip", danger: true,
  send: (said) => done("POST", path`upstreams/${upstream}/trip`, body(said), `The breaker of ${visible(upstream)} is open`),
});

export const reset = (upstream) => ask({
  head: `Reset the breaker of ${visible(upstream)}?`, words: "Traffic goes there again at once, without a probe.",
  fields: [reason()], doIt: "Reset",
  send: (said) => done("POST", path`upstreams/${upstream}/reset`, body(said), `The breaker of ${visible(upstream)} is closed`),
});

export const takeOut = (upstream) => ask({
  head: `Take ${visible(upstream)} out?`,
  words: "Nothing is sent there, and nothing probes it, until it is put back. What runs there goes on.",
  fields: [duration(), reason()], doIt: "Take out", danger: true,
  send: (said) => done("POST", path`upstreams/${upstream}/out`, body(said), `${visible(upstream)} is out`),
});

export const putBack = (upstream) => ask({
  head: `Put ${visible(upstream)} back?`, words: "It gets traffic as its breaker allows.", fields: [reason()], doIt: "Put back",
  send: (said) => done("POST", path`upstreams/${upstream}/in`, body(said), `${visible(upstream)} is back`),
});

export const bypass = () => ask({
  head: "Bypass everything?",
  words: "Everybody is let go at once, also who waits now: no limit, no queue, no budget holds anybody. The books are still kept.",
  fields: [duration(), reason(), check("sure", "Providers may answer 429 and engines may run full: I want it all the same")],
  doIt: "Bypass", danger: true,
  send: (said) => {
    if (!said.sure) throw new Error("Tick the box first");
    return done("POST", "bypass", body(said), "Everything passes now");
  },
});

export const noBypass = () => ask({
  head: "End the bypass?", words: "Limits hold again from now on.", fields: [reason()], doIt: "End bypass",
  send: (said) => done("DELETE", "bypass", body(said), "The bypass is over"),
});

export const drain = () => ask({
  head: "Drain this Tidegate?", words: "Nobody new gets in; what waits or runs is finished.", fields: [reason()],
  doIt: "Drain", danger: true, send: (said) => done("POST", "drain", body(said), "Draining"),
});

export const undrain = () => ask({
  head: "Stop draining?", words: "Requests are taken again.", fields: [reason()], doIt: "Stop draining",
  send: (said) => done("POST", "undrain", body(said), "Requests are taken again"),
});

export const revert = (change) => ask({
  head: `Return ${visible(change.place)} to ${shown(change.was)}?`, words: `It is ${shown(change.value)} now.`,
  fields: [reason()], doIt: "Return",
  send: (said) => done("DELETE", path`changes/${change.id}`, body(said), `${visible(change.place)} is ${shown(change.was)} again`),
});

/** Another limit for one bucket of an upstream: its place in the config is looked up. */
export async function changeBucket(upstream, kind, model) {
  let place = "";
  try {
    const limits = (await get("config")).upstreams?.[upstream]?.limits ?? [];
    const which = limits.findIndex((limit) => (limit.model ?? "*") === (model || "*") && typeof limit[SETTINGS[kind]] === "number");
    if (which >= 0) place = `upstreams.${upstream}.limits.${which}.${SETTINGS[kind]}`;
  } catch {
    // Then it has to be written.
  }
  change(place);
}

export function change(place = "") {
  const known = el("datalist", { id: "places" });
  const where = line("place", "Which limit", { value: place, list: "places", placeholder: "upstreams.primary.limits.0.tpm" });
  where.append(known, el("small", { id: "place-now" }));
  const values = new Map();
  const tell = () => text(byId("place-now"), values.has(where.control.value) ? `now ${shown(values.get(where.control.value))}` : "");
  where.addEventListener("input", tell);
  ask({
    head: "Change a limit for a while", words: "It holds at once, and returns by itself. A reload of the config keeps it.",
    fields: [where, number("value", "Value"), duration(), reason()], doIt: "Change",
    send: ({ place: at, value, ...said }) => {
      if (!at) throw new Error("Which limit: none was given");
      if (value === null) throw new Error("Value: none was given");
      return done("POST", "changes", { place: at, value, ...body(said) }, `${visible(at)} is ${shown(value)}`);
    },
  });
  limits(known, values).then(tell, () => {});
}

/** More for a session. Without names they are asked for. */
export const raise = (tenant = "", session = "") => ask({
  head: session ? `Raise the budget of session ${visible(session)}?` : "Raise the budget of a session",
  words: `${tenant ? `Of tenant ${visible(tenant)}. ` : ""}It is added to what the session may use in all.`,
  fields: [...(session ? [] : [line("tenant", "Tenant"), line("session", "Session")]), number("add_tokens", "Tokens to add", { min: 1, step: 1 }), number("add_usd", "Dollars to add", { min: 0 }), reason()],
  doIt: "Raise",
  send: ({ add_tokens: tokens, add_usd: dollars, tenant: of = tenant, session: id = session, ...said }) => {
    if (!of || !id) throw new Error("Tenant and session: both are needed");
    if (tokens === null && dollars === null) throw new Error("Give tokens, dollars or both");
    const more = { ...(tokens === null ? {} : { add_tokens: tokens }), ...(dollars === null ? {} : { add_usd: dollars }) };
    return done("POST", path`sessions/${of}/${id}`, { ...more, ...body(said) }, `Session ${visible(id)} may use more`);
  },
});

/** The token, given before anything is done with it; or forgotten. */
export function unlock() {
  if (proof.given) {
    proof.forget();
    dispatchEvent(new Event("tidegate:proof"));
    tell("The token is forgotten");
    return;
  }
  ask({
    head: "Unlock actions", words: "Whoever acts must prove that they may.", fields: tokenFields(), open: true, doIt: "Keep",
    send: async () => tell("Actions are unlocked in this tab"),
  });
}

function body(said) {
  return {
    ...(said.for_s ? { for_s: Number(said.for_s) } : {}),
    ...(said.reason ? { reason: said.reason } : {}),
  };
}

async function done(method, place, wanted, words) {
  const levers = await act(method, place, wanted);
  const end = wanted.for_s ? ` ${until(Date.now() / 1000 + wanted.for_s)}` : "";
  tell(`${words}${end}.`);
  if (levers && typeof levers === "object" && "lanes" in levers) heard(levers);
}

/** A word on what was done, for some seconds. */
export function tell(words) {
  const note = el("p", {}, words);
  byId("told").replaceChildren(note);
  setTimeout(() => note.remove(), 8000);
}

const shown = (value) => (typeof value === "number" ? count(value) === String(value) || Number.isInteger(value) ? count(value) : String(value) : String(value ?? "none"));

/** The config's numbers, as places that can be chosen. */
async function limits(list, values) {
  const walk = (node, at) => {
    if (typeof node === "number") values.set(at, node);
    else if (node && typeof node === "object") for (const [key, under] of Object.entries(node)) walk(under, at ? `${at}.${key}` : key);
  };
  walk(await get("config"), "");
  const live = /^(upstreams|tenants|lanes|routes|queue|sessions)\./;
  list.append(...[...values].filter(([at]) => live.test(at)).slice(0, 1000).map(([at]) => el("option", { value: at })));
}
