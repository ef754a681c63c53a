// Joins the parts: the feed fills the page, once a second; clicks open dialogs.

import { proof } from "./api.js";
import * as actions from "./actions.js";
import { start as startAudit } from "./audit.js";
import * as callers from "./callers.js";
import * as charts from "./charts.js";
import * as decisions from "./decisions.js";
import { attr, byId, text, visible } from "./dom.js";
import { explain, start as startExplain } from "./explain.js";
import { follow } from "./feed.js";
import { age as aged, big, clock, span } from "./format.js";
import * as moves from "./moves.js";
import * as lanes from "./lanes.js";
import * as levers from "./levers.js";
import * as now from "./now.js";
import * as upstreams from "./upstreams.js";

const OLD_S = 4;
const THEMES = { auto: "as the system says", light: "light", dark: "dark" };

let view = null, newsAt = 0, trouble = null;

/** Lanes and upstreams as the levers say: after an action these are newer than the rest. */
function withLevers(overview, levers = overview.levers) {
  const lanes = (overview.lanes ?? []).map((lane) => ({ ...lane, paused: levers?.lanes?.[lane.name]?.paused ?? lane.paused }));
  const upstreams = (overview.upstreams ?? []).map((one) => ({ ...one, out: levers?.upstreams?.[one.name]?.out ?? one.out }));
  return { ...overview, lanes, upstreams, levers };
}

/** One part that fails takes none of the others with it. */
function show() {
  const parts = [
    () => now.show(view, explain), () => lanes.show(view), () => upstreams.show(view), () => moves.show(view),
    () => decisions.show(view), () => callers.show(view, decisions.only), () => levers.show(view), foot,
  ];
  for (const part of parts) {
    try {
      part();
    } catch (error) {
      console.error(error);
    }
  }
}

function foot() {
  const { version = "", uptime_s: uptime, process } = view;
  const late = typeof process?.loop_lag_s === "number" ? `, its event loop ${span(process.loop_lag_s)} late` : "";
  const memory = typeof process?.memory_bytes === "number" ? `, ${big(process.memory_bytes / 2 ** 20)} MiB` : "";
  text(byId("foot"), `Tidegate ${visible(version)}, up for ${span(uptime)}${memory}${late}. Times of day are this browser's.`);
}

function heard(overview) {
  if (!overview || typeof overview !== "object" || typeof overview.at !== "number") return;
  view = withLevers(overview);
  newsAt = performance.now();
  trouble = null;
  document.body.classList.remove("stale");
  show();
  age();
}

function lost(problem, wait) {
  trouble = { problem, next: performance.now() + wait * 1000 };
  age();
}

/** How old the page is, every second: old figures must not look like new ones. */
function age() {
  const old = newsAt ? (performance.now() - newsAt) / 1000 : null;
  const locked = trouble?.problem.status === 401 || trouble?.problem.status === 403;
  const stale = old === null ? trouble !== null : trouble !== null || old > OLD_S;
  const link = byId("link");
  attr(link, "data-level", stale ? "error" : old === null ? "quiet" : "ok");
  text(byId("link-text"), stale ? (locked ? "locked" : "no connection") : old === null ? "connecting" : "live");
  attr(link, "title", view ? `figures of ${clock(view.at)}` : "");
  document.body.classList.toggle("stale", stale && view !== null);
  if (stale) document.title = `${locked ? "locked" : "no connection"}: Tidegate`;  // the tab is all that many look at
  const banner = byId("stale");
  banner.hidden = !stale;
  if (!stale) return;
  const why = trouble ? trouble.problem.message : `nothing came for ${aged(old)}`;
  text(byId("stale-why"), locked ? `Reading needs a token: ${visible(why)}.` : `Connection lost: ${visible(why)}.`);
  const next = trouble ? Math.max(0, Math.ceil((trouble.next - performance.now()) / 1000)) : 0;
  text(byId("stale-age"), `${view ? `Figures are ${aged(old)} old. ` : ""}${next ? `Next try in ${aged(next)}.` : "Trying now."}`);
  byId("stale-token").hidden = !locked;
}

function unlocked() {
  text(byId("proof"), proof.given ? "Lock" : "Unlock");
  attr(byId("proof"), "aria-label", proof.given ? "Lock actions: forget the token" : "Unlock actions: give the token");
  attr(byId("proof"), "data-given", proof.given ? "yes" : null);
}

function theme() {
  const root = document.documentElement, button = byId("theme");
  const said = () => {
    const chosen = root.dataset.theme ?? "auto";
    text(button, chosen[0].toUpperCase() + chosen.slice(1));
    attr(button, "aria-label", `Colours: ${THEMES[chosen]}`);
  };
  button.addEventListener("click", () => {
    const order = Object.keys(THEMES);
    const next = order[(order.indexOf(root.dataset.theme ?? "auto") + 1) % order.length];
    if (next === "auto") delete root.dataset.theme;
    else root.dataset.theme = next;
    try {
      localStorage.setItem("tidegate.theme", next);
    } catch {
      // Then it holds for this page.
    }
    said();
    dispatchEvent(new Event("tidegate:theme"));
  });
  said();
}

actions.onLevers((state) => {
  if (!view) return;
  view = withLevers(view, state);
  show();
});
byId("proof").addEventListener("click", actions.unlock);
byId("stale-token").addEventListener("click", actions.unlock);
addEventListener("tidegate:proof", unlocked);
addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(document.activeElement?.tagName)) return;
  event.preventDefault();
  byId("search-id").focus();
});
unlocked();
theme();
startExplain();
levers.start();
startAudit();
decisions.start(explain);
charts.start();
setInterval(age, 1000);
follow(heard, lost);
