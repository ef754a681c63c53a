// Tenants and sessions that use most.

import * as actions from "./actions.js";
import { attr, byId, el, name, text, visible } from "./dom.js";
import { big, count, usd } from "./format.js";
import { button, row, rows } from "./table.js";

const TENANT = [["Tenant", "head"], ["Waiting", "n"], ["Requests", "n"], ["Tokens", "n"], ["Cost", "n"], ["Refused", "n"]];
const SESSION = [["Session", "head"], ["Tenant", ""], ["Requests", "n"], ["Tokens", "n"], ["Cost", "n"], ["", "does"]];

const MOST = 100;  // many more make a browser slow that has to draw them every second

/** only(tenant): shows the decisions on one tenant's requests. */
export function show(view, only) {
  rows(byId("tenant-rows"), byId("no-tenants"), first(view.tenants, "tenants-most"), (tenant) => tenant.name, (tenant) => {
    const made = row(TENANT);
    made.firstChild.append(button("", () => only(tenant.name), { className: "id", title: "Show its newest decisions" }));
    return made;
  }, (made, tenant) => {
    const [head, waiting, requests, tokens, cost, refused] = made.children;
    name(head.firstChild, tenant.name || "(unknown)");
    text(waiting, count(tenant.waiting));
    text(requests, count(tenant.requests));
    text(tokens, big(tenant.tokens));
    text(cost, usd(tenant.usd));
    text(refused, count(tenant.refused));
    attr(refused, "data-level", tenant.refused > 0 ? "warning" : null);
  });
  rows(byId("session-rows"), byId("no-sessions"), first(view.sessions, "sessions-most"), (session) => JSON.stringify([session.tenant, session.id]), (session) => {
    const made = row(SESSION);
    made.firstChild.append(el("span", { className: "cut" }));
    made.children[1].append(el("span", { className: "cut" }));
    made.lastChild.append(button("Raise budget", () => actions.raise(session.tenant, session.id), {
      "aria-label": `Raise the budget of session ${visible(session.id)}`,
    }));
    return made;
  }, (made, session) => {
    const [head, tenant, requests, tokens, cost] = made.children;
    name(head.firstChild, session.id);
    name(tenant.firstChild, session.tenant);
    text(requests, count(session.requests));
    text(tokens, big(session.tokens));
    text(cost, usd(session.usd));
  });
}

/** As many as are shown; `place` says so where there are more. */
function first(items, place) {
  const all = items ?? [];
  text(byId(place), all.length > MOST ? `the first ${count(MOST)} of ${count(all.length)}` : "");
  return all.slice(0, MOST);
}
