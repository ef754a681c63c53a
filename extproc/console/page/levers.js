// What an operator has moved, and the buttons to move it.

import * as actions from "./actions.js";
import { byId, each, el, text, visible } from "./dom.js";
import { count, until } from "./format.js";
import { button } from "./table.js";

export function start() {
  byId("lever-buttons").append(
    button("Change a limit …", () => actions.change()),
    button("Raise a session's budget …", () => actions.raise()),
    button("Drain …", actions.drain, { className: "danger" }),
    button("Bypass …", actions.bypass, { className: "danger" }),
  );
}

export function show({ levers }) {
  const found = inForce(levers ?? {});
  byId("no-force").hidden = found.length > 0;
  each(byId("in-force"), found, ([key]) => key, ([, , doIt, action]) => {
    const made = el("li", {}, el("span"));
    made.append(button(doIt, () => made.action()));
    made.action = action;
    return made;
  }, (node, [, words, , action]) => {
    text(node.firstChild, words);
    node.action = action;
  });
}

/** [key, what is so, what ends it, the action]. */
function inForce(levers) {
  const found = [];
  if (levers.bypass) found.push(["bypass", `Bypass ${until(levers.bypass.until)}`, "End bypass", actions.noBypass]);
  if (levers.draining) found.push(["drain", "Draining", "Stop draining", actions.undrain]);
  for (const [lane, state] of Object.entries(levers.lanes ?? {})) {
    if (state.paused) found.push([`lane ${lane}`, `Lane ${visible(lane)} paused ${until(state.until)}`, "Resume", () => actions.resume(lane)]);
  }
  for (const [upstream, state] of Object.entries(levers.upstreams ?? {})) {
    if (state.out) found.push([`upstream ${upstream}`, `${visible(upstream)} out ${until(state.until)}`, "Put back", () => actions.putBack(upstream)]);
  }
  for (const change of levers.changes ?? []) {
    const words = `${visible(change.place)} is ${number(change.value)} instead of ${number(change.was)}, ${until(change.until)}`;
    found.push([`change ${change.id}`, words, "Return", () => actions.revert(change)]);
  }
  return found;
}

const number = (value) => (Number.isInteger(value) ? count(value) : visible(value ?? "nothing"));
