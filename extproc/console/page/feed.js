// The overview, once a second: a stream of server-sent events, read with fetch because EventSource cannot send a token.
// Where no stream gets through (a proxy that buffers), it is asked for every two seconds instead.

import { Problem, get, headers } from "./api.js";

const SILENT_S = 8, FIRST_WAIT_S = 0.5, MOST_WAIT_S = 15, POLL_S = 2, POLLS = 60;

/**
 * Follow the overview until the page is left. heard(overview); lost(problem, seconds until the next try).
 * Tries again after half a second, then after twice as long each time up to 15 s, with jitter. A stream that stays
 * silent twice is taken for one that something on the way holds back; it gets another chance every two minutes.
 */
export async function follow(heard, lost) {
  let wait = FIRST_WAIT_S, silent = 0;
  for (;;) {
    let problem = new Problem(0, "the stream ended");
    try {
      if (silent >= 2) {
        await poll((overview) => {
          wait = FIRST_WAIT_S;
          heard(overview);
        });
        silent = 1;
        continue;
      }
      await stream((overview) => {
        wait = FIRST_WAIT_S;
        silent = 0;
        heard(overview);
      });
    } catch (error) {
      problem = error instanceof Problem ? error : new Problem(0, "Tidegate cannot be reached");
      silent = problem.silent ? silent + 1 : silent;
    }
    const pause = wait * (0.8 + 0.4 * Math.random());
    lost(problem, pause);
    await awake(pause * 1000);
    wait = Math.min(MOST_WAIT_S, wait * 2);
  }
}

async function stream(news) {
  const stop = new AbortController();
  let timer;
  const watch = () => {
    clearTimeout(timer);
    timer = setTimeout(() => stop.abort(), SILENT_S * 1000);
  };
  watch();
  try {
    const answer = await fetch("api/v1/stream", {
      headers: { accept: "text/event-stream", ...headers() }, signal: stop.signal, cache: "no-store", redirect: "error",
    });
    if (!answer.ok) throw await refused(answer);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    const parse = events(news);
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      watch();
      parse(value);
    }
  } catch (error) {
    if (!stop.signal.aborted) throw error;
    throw Object.assign(new Problem(0, `no news for ${SILENT_S} s`), { silent: true });
  } finally {
    clearTimeout(timer);
    stop.abort();
  }
}

async function poll(news) {
  for (let i = 0; i < POLLS; i += 1) {
    news(await get("overview"));
    await awake(POLL_S * 1000);
  }
}

async function refused(answer) {
  let words = `answer ${answer.status}`;
  try {
    words = String((await answer.json()).error ?? words);
  } catch {
    // No JSON: the status says enough.
  }
  return new Problem(answer.status, words);
}

/** Feeds pieces of text/event-stream to `news`, one parsed event at a time. */
export function events(news) {
  let rest = "", data = [];
  return (piece) => {
    const lines = (rest + piece).split(/\r\n|\n|\r(?!$)/);
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      else if (line === "" && data.length) {
        const whole = data.join("\n");
        data = [];
        try {
          news(JSON.parse(whole));
        } catch (error) {
          if (!(error instanceof SyntaxError)) throw error;
        }
      }
    }
  };
}

/** Sleep; who comes back to the tab, whose network is back, or who has just given the token, is not kept waiting. */
function awake(ms) {
  return new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", seen);
      removeEventListener("online", done);
      removeEventListener("tidegate:proof", done);
      resolve();
    };
    const seen = () => { if (!document.hidden) done(); };
    const timer = setTimeout(done, ms);
    document.addEventListener("visibilitychange", seen);
    addEventListener("online", done);
    addEventListener("tidegate:proof", done);
  });
}
