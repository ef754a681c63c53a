// What the page asks of the service it came from: relative addresses, so that it also works behind a path of a proxy.

const BASE = "api/v1/";
const TOKEN = "tidegate.token", CERTIFICATE = "tidegate.certificate";

/** Why something was not done. status 0: nobody answered. */
export class Problem extends Error {
  constructor(status, words) {
    super(words);
    this.status = status;
  }
}

// The token lives in this tab and no longer than it: sessionStorage, never localStorage, never a cookie.
export const proof = {
  get token() { return sessionStorage.getItem(TOKEN) ?? ""; },
  get certificate() { return sessionStorage.getItem(CERTIFICATE) === "yes"; },
  get given() { return this.token !== "" || this.certificate; },
  keep(token, certificate) {
    this.forget();
    if (token) sessionStorage.setItem(TOKEN, token);
    else if (certificate) sessionStorage.setItem(CERTIFICATE, "yes");
  },
  forget() {
    sessionStorage.removeItem(TOKEN);
    sessionStorage.removeItem(CERTIFICATE);
  },
};

export function headers() {
  return proof.token ? { authorization: `Bearer ${proof.token}` } : {};
}

/**
 * A path with names in it, each quoted whole: path`lanes/${lane}/pause`. Names of dots alone lead elsewhere in every
 * browser, however they are quoted: Problem.
 */
export function path(words, ...names) {
  const dots = names.find((name) => /^\.{1,2}$/.test(name));
  if (dots) throw new Problem(0, `the name ${dots} cannot be part of an address; use tidegate admin`);
  return words.reduce((whole, part, i) => whole + encodeURIComponent(names[i - 1]) + part);
}

export async function get(place, signal = undefined) {
  return asked("GET", place, undefined, signal);
}

/** An action. Nothing is sent without proof of who acts. */
export async function act(method, place, body) {
  if (!proof.given) throw new Problem(401, "no token was given");
  return asked(method, place, body);
}

async function asked(method, place, body, signal = AbortSignal.timeout(10_000)) {
  const set = { method, headers: headers(), signal, cache: "no-store", redirect: "error", referrerPolicy: "no-referrer" };
  if (body !== undefined) {
    set.body = JSON.stringify(body);
    set.headers["content-type"] = "application/json";
  }
  let answer, told;
  try {
    answer = await fetch(BASE + place, set);
    told = await answer.text();
  } catch (error) {
    throw new Problem(0, error.name === "TimeoutError" ? "no answer within 10 s" : "Tidegate cannot be reached");
  }
  const data = parsed(told);
  if (!answer.ok) throw new Problem(answer.status, data?.error ? String(data.error) : `answer ${answer.status}`);
  return data;
}

function parsed(told) {
  try {
    return JSON.parse(told);
  } catch {
    return null;
  }
}
