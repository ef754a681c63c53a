// Rows of tables. On a phone a row becomes a card, in which each figure stands under the head of its column.

import { each, el } from "./dom.js";

/** A row with one cell for each column: [head, kind], where kind is "n" for figures, "head" for the first, or "". */
export function row(columns) {
  return el("tr", {}, ...columns.map(([head, kind]) => (kind === "head"
    ? el("th", { scope: "row" })
    : el("td", { className: kind, "data-head": head }))));
}

/** Keep the rows of a table body in step with items; `none` is shown where there are none. */
export function rows(body, none, items, key, make, fill) {
  none.hidden = items.length > 0;
  body.parentElement.hidden = items.length === 0;
  each(body, items, key, make, fill);
}

export function button(words, action, more = {}) {
  return el("button", { type: "button", on: { click: action }, ...more }, words);
}
