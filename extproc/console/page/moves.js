// What breakers, sizes and budgets did of late, the newest first.

import { attr, byId, each, el, text, visible } from "./dom.js";
import { ago, clock, plural, share, usd } from "./format.js";
import { BREAKER } from "./words.js";

export function show(view) {
  const found = view.alerts ?? [];
  byId("moves").hidden = found.length === 0;
  text(byId("moves-head"), `What moved of late: ${plural(found.length, "event")}, the last ${ago(found[0]?.at, view.at)}`);
  each(byId("moves-list"), found, (item) => JSON.stringify(item), (item) => {
    const [level, words] = told(item);
    return el("li", { "data-level": level }, el("span", { className: "mark" }), el("time", { className: "n soft" }, clock(item.at)), el("span", {}, words));
  }, (node, item) => attr(node.children[1], "title", ago(item.at, view.at)));
}

/** [level, words] of one event: a breaker that moved, prompts of one size kept away, or a budget that is used. */
function told(item) {
  const cause = item.cause ? `: ${visible(item.cause)}` : "";
  if (item.after) {
    const [level, word] = BREAKER[item.after] ?? ["info", visible(item.after)];
    const before = BREAKER[item.before]?.[1] ?? visible(item.before ?? "");
    return [level, `${visible(item.upstream)}: ${before} → ${word}${cause}`];
  }
  if (item.sizes) return [item.shut ? "warning" : "ok", `${visible(item.upstream)}: prompts of ${visible(item.sizes)} tokens ${item.shut ? "are kept away" : "return"}${cause}`];
  if (item.limit) return [item.used >= item.limit ? "error" : "warning", `${visible(item.key ?? "")}: ${usd(item.used)} of ${usd(item.limit)} (${share(item.used / item.limit)}) is used`];
  return ["info", visible(JSON.stringify(item))];
}
