// What the closed words of the service mean, for somebody who was woken up.

/** Reason: [what it means, what would help]. */
export const REASONS = {
  tenant_quota: ["the tenant used up its own limit", "raise tenants.NAME.tpm or .rpm for a while, or let it send less"],
  tenant_concurrency: ["the tenant has too many at once", "raise tenants.NAME.concurrency for a while"],
  queue_timeout: ["waited as long as its lane allows", "more capacity, or a longer max_wait_s"],
  lane_full: ["its lane was full", "more capacity; the lane's bounds keep waits short"],
  evicted: ["a better lane, or a later copy of it, took its place", "more capacity; lower lanes give way first"],
  deadline_unmeetable: ["would have waited past its deadline", "more capacity, or a longer deadline of the caller"],
  deadline_passed: ["its deadline had passed", "look at the caller's clock and timeout"],
  session_budget: ["the session spent its budget", "raise the session's budget, if it is no runaway loop"],
  spend_budget: ["a budget in dollars is spent", "raise the budget, or wait for its window to end"],
  too_large: ["larger than any upstream of its chain takes", "the caller must send less"],
  no_upstream: ["no upstream of its chain is open", "see Upstreams: which rests, and why"],
  unauthenticated: ["nobody knows the caller", "the caller's key or token"],
  forbidden: ["the tenant may not use this model or lane", "tenants.NAME.models and .lanes"],
  unknown_model: ["no route serves this model", "routes, or the caller's model name"],
  draining: ["Tidegate takes nobody new", "undrain, or wait for the other replicas"],
  bad_request: ["the request cannot be read", "the caller"],
  not_found: ["no such path", "the caller"],
  upstream_failed: ["every attempt failed", "see Upstreams, and one of the requests"],
  admission_unavailable: ["Envoy did not reach Tidegate", "is the process well? See tidegate's log"],
};

/** Status of the whole: [level, word, what it means]. */
export const STATUS = {
  ok: ["ok", "calm"],
  waiting: ["busy", "waiting"],
  shedding: ["warning", "shedding"],
  outage: ["error", "outage"],
  draining: ["odd", "draining"],
  bypassed: ["odd", "bypassed"],
};

/** State of a breaker: [level, word, what it means]. */
export const BREAKER = {
  closed: ["ok", "closed", "lets traffic through"],
  open: ["error", "open", "rests"],
  half_open: ["warning", "half open", "a canary call tries it"],
  ramping: ["busy", "ramping", "traffic returns by and by"],
};

/** Sign by which an upstream was taken for sick. */
export const SIGNS = {
  failures: "failures in a row",
  paced: "429s in a row",
  errors: "too large a share failed",
  slow: "first tokens much later than usual",
  malformed: "answers that were none",
  terminal: "no credit at the provider",
  credential: "the provider refuses our key",
};

export const LEVELS = { error: "Error", warning: "Warning", info: "Note" };

/** Kind of a bucket. */
export const BUCKETS = {
  total: "Tokens/min", input: "Input tokens/min", output: "Output tokens/min", requests: "Requests/min",
};
