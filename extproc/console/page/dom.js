// Elements, made and kept up to date. Whatever comes from outside gets in as text, never as markup.

export const byId = (id) => document.getElementById(id);

/** An element. `set`: properties, or attributes where there is no such property; `on`: listeners by event. */
export function el(tag, set = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(set)) {
    if (name === "on") for (const [event, heard] of Object.entries(value)) made.addEventListener(event, heard);
    else if (name in made && name !== "list" && !name.includes("-")) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Set a text only where it differs, so that a selection and a screen reader are left in peace. */
export function text(node, words) {
  const wanted = String(words);
  if (node.textContent !== wanted) node.textContent = wanted;
}

export function attr(node, name, value) {
  if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, String(value));
}

/** A name from outside: isolated from the text around it, with the whole of it on hover. */
export function name(node, words) {
  const shown = visible(words);
  text(node, shown);
  attr(node, "title", shown);
}

/** Control and direction characters become readable, and the endless ends: no name rearranges what is around it. */
export function visible(words, most = 300) {
  const odd = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;
  const whole = String(words);
  const shown = whole.length > most ? `${whole.slice(0, most)}…` : whole;
  return shown.replace(odd, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);
}

/**
 * Keep the children of `parent` in step with `items`: one for each key, made once, then only filled anew. So focus,
 * open details and selections survive a page that changes every second.
 */
export function each(parent, items, key, make, fill) {
  const old = parent.kept ?? new Map();
  const kept = new Map();
  let place = parent.firstElementChild;
  for (const item of items) {
    const id = key(item);
    if (kept.has(id)) continue;
    const node = old.get(id) ?? make(item);
    kept.set(id, node);
    fill(node, item);
    if (node === place) place = place.nextElementSibling;
    else parent.insertBefore(node, place);
  }
  for (const [id, node] of old) if (!kept.has(id)) node.remove();
  parent.kept = kept;
}

/** A bar from 0 to 1. Widths are set through CSSOM, which a strict policy allows. */
export function bar(node, share) {
  const percent = `${(Math.min(1, Math.max(0, share || 0)) * 100).toFixed(1)}%`;
  if (node.style.width !== percent) node.style.width = percent;
}
