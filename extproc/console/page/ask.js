// One dialog for everything that needs a word first: what is about to happen, for how long, and why.

import { proof } from "./api.js";
import { byId, el, text } from "./dom.js";

const DURATIONS = [["300", "5 minutes"], ["900", "15 minutes"], ["3600", "1 hour"], ["14400", "4 hours"], ["", "until undone"]];

const dialog = byId("ask"), form = byId("ask-form"), go = byId("ask-go"), trouble = byId("ask-error");
let send = null, busy = false;

/**
 * Ask, then `send(values)`. The dialog stays open with the error where it fails, and closes where it worked.
 * fields: made by the functions below. danger: drawn so. open: needs no proof of who acts.
 */
export function ask({ head, words, fields = [], doIt, danger = false, open = false, send: sent }) {
  if (dialog.open) return;
  text(byId("ask-head"), head);
  text(byId("ask-text"), words);
  byId("ask-text").hidden = !words;
  text(go, doIt);
  go.classList.toggle("danger", danger);
  const shown = open || proof.given ? fields : [...tokenFields(), ...fields];
  byId("ask-fields").replaceChildren(...shown);
  trouble.hidden = true;
  send = sent;
  working(false);
  dialog.showModal();
  (form.querySelector("#ask-fields input, #ask-fields select") ?? go).focus();
}

export function duration(chosen = "900") {
  const options = DURATIONS.map(([value, words]) => el("option", { value, selected: value === chosen }, words));
  return labelled("For", el("select", { name: "for_s" }, ...options));
}

export const reason = () => labelled("Why, for the audit log", el("input", { name: "reason", maxLength: 500, autocomplete: "off" }));

export function number(name, words, set = {}) {
  return labelled(words, el("input", { name, type: "number", step: "any", inputMode: "decimal", autocomplete: "off", ...set }));
}

export function line(name, words, set = {}) {
  return labelled(words, el("input", { name, autocomplete: "off", spellcheck: false, ...set }));
}

export function check(name, words) {
  return el("label", { className: "check" }, el("input", { type: "checkbox", name }), words);
}

export function tokenFields() {
  const hint = "From the file that admin.token_file names; tidegate up prints where it is. Kept in this tab only.";
  const field = el("input", { name: "token", type: "password", maxLength: 4096, autocomplete: "off", spellcheck: false });
  return [labelled("Token", field, hint), check("certificate", "No token: this browser shows a client certificate")];
}

/** What was filled in. Error says what is missing. */
function values() {
  const found = {};
  for (const input of form.querySelectorAll("input, select")) {
    if (input.type === "checkbox") found[input.name] = input.checked;
    else if (input.validity.badInput) throw new Error(`${labelOf(input)}: that is no number`);
    else if (input.type === "number") found[input.name] = input.value === "" ? null : Number(input.value);
    else found[input.name] = input.value.trim();
  }
  return found;
}

const labelOf = (input) => input.closest("label").firstChild.textContent;

function labelled(words, input, hint = "") {
  return el("label", {}, words, input, hint ? el("small", {}, hint) : null);
}

function working(now) {
  busy = now;
  go.disabled = now;
  form.setAttribute("aria-busy", String(now));
}

function complain(error) {
  text(trouble, error.message);
  trouble.hidden = false;
  if (error.status === 401) {
    proof.forget();
    dispatchEvent(new Event("tidegate:proof"));
    if (!form.elements.token) byId("ask-fields").prepend(...tokenFields());
    form.elements.token?.select();
  }
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (busy) return;
  trouble.hidden = true;
  working(true);
  try {
    const found = values();
    if (form.elements.token) {
      if (!found.token && !found.certificate) throw new Error("Token: none was given");
      if (/[^\x21-\x7e]/.test(found.token)) throw new Error("Token: it can only be of printable ASCII characters");
      proof.keep(found.token, found.certificate);
      dispatchEvent(new Event("tidegate:proof"));
    }
    await send(found);
    dialog.close();
  } catch (error) {
    complain(error);
  } finally {
    working(false);
  }
});
byId("ask-cancel").addEventListener("click", () => dialog.close());
dialog.addEventListener("cancel", (event) => { if (busy) event.preventDefault(); });
