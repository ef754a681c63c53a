"""What a running Tidegate tells of itself, by shape: `ServiceState` (`/state`), `Overview`, and `Hour` (the history).

Those who make it return these types, and the console's OpenAPI document describes them. Nothing is checked against
them while it runs, which would cost too much once a second: mypy and tests do that. Closed: there are no other fields.

Times that end with _s are seconds, `at`, `since` and `until` epoch seconds. What has no source is null, and so is what
has no end; `NotRequired` is left out where it does not apply.

Deliberately not here: how what is told comes about (sight, telemetry), and who may see it (console).
"""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from extproc.core import breaker
from extproc.core.refusal import Reason
from extproc.core.runbook import Runbook

__all__ = [
    "Alert", "Backlog", "Binding", "Breaker", "Bucket", "Callers", "Config", "Counted", "Counter", "Hour", "Kv",
    "Lane", "LaneBounds", "LaneHour", "Level", "Levers", "Metered", "Moved", "Notice", "Overview", "Pace", "Process",
    "Refusal", "RequestState", "Row", "ServiceState", "SessionUse", "Status", "Tally", "Tenant", "TenantUse",
    "Upstream", "UpstreamHour", "Use",
]  # fmt: skip

Status = Literal["ok", "waiting", "shedding", "outage", "bypassed", "draining"]
"""The one word for it, the gravest that is true."""
Level = Literal["error", "warning", "info"]
RequestState = Literal["arriving", "waiting", "running", "served", "failed", "refused", "evicted", "left", "unknown"]
"""How a request stands. failed: no upstream answered, or its answer was none, or broke off. evicted: a later copy of it
came while it ran, and took its place. left: its client did not wait for the decision, or for the answer. unknown: it
was let go, and nobody told what became of it.
"""


class Until(TypedDict, closed=True):
    """Something an operator has moved. until: when it returns by itself; null: not before it is undone."""

    until: float | None


class LaneLever(TypedDict, closed=True):
    """Whether a lane is paused."""

    paused: bool
    until: float | None


class UpstreamLever(TypedDict, closed=True):
    """Whether an upstream is out."""

    out: bool
    until: float | None


class ChangedLimit(TypedDict, closed=True):
    """A setting that has another value than its file says. was: what the file, or the change beneath, says."""

    id: str
    place: str
    value: float | None
    was: float | None
    until: float | None


class Levers(TypedDict, closed=True):
    """What operators have moved."""

    bypass: Until | None
    draining: bool
    lanes: dict[str, LaneLever]
    upstreams: dict[str, UpstreamLever]
    changes: list[ChangedLimit]


class Moved(TypedDict, closed=True):
    """The same after a change, and the id by which that is reverted."""

    id: str
    bypass: Until | None
    draining: bool
    lanes: dict[str, LaneLever]
    upstreams: dict[str, UpstreamLever]
    changes: list[ChangedLimit]


class Backlog(TypedDict, closed=True):
    """What waits in a lane."""

    requests: int
    tokens: int
    bytes: int


class BucketCounter(TypedDict, closed=True):
    """A token bucket: below 0 it is in debt. owed: units that are set aside for lanes. closed_s: until a pause ends.

    shadow: it is counted, and refuses nobody.
    """

    level: float
    capacity: float
    per_second: float
    owed: NotRequired[dict[str, float]]
    closed_s: NotRequired[float | None]
    shadow: NotRequired[bool]


class SlotsCounter(TypedDict, closed=True):
    """How many run at a time, and how many may; null: any number. Else as for a bucket."""

    used: float
    limit: float | None
    owed: NotRequired[dict[str, float]]
    closed_s: NotRequired[float | None]
    shadow: NotRequired[bool]


class GateCounter(TypedDict, closed=True):
    """An engine's KV cache of `cache` tokens. fill: share of it. saturation: from 1 on it is full; null: not known.

    used, requests: booked here. unseen: tokens let go that the last reading may not show. stale_s: age of that reading.
    """

    used: float
    requests: int
    fill: float
    cache: float | None
    saturation: float | None
    instances: int
    stale_s: float | None
    unseen: float
    owed: NotRequired[dict[str, float]]
    closed_s: NotRequired[float | None]
    shadow: NotRequired[bool]


class BudgetCounter(TypedDict, closed=True):
    """Dollars or tokens that may be used until it ends; null: it has no end."""

    spent: float
    budget: float
    ends_in_s: float | None
    closed_s: NotRequired[float | None]
    shadow: NotRequired[bool]


Counter = BucketCounter | SlotsCounter | GateCounter | BudgetCounter


class Breaker(TypedDict, closed=True):
    """An upstream's circuit breaker. sign: of what it is taken for sick. rests_s: until it is probed.

    failures, paced: in a row. error_share: of `attempts`; slow_share: of `timed`; late_of_last: first tokens that were
    late, of the last few. window: how many may run while traffic returns. sizes_kept_away: of prompts, in tokens.
    """

    state: breaker.State
    failures: float
    paced: float
    attempts: NotRequired[float]
    error_share: NotRequired[float]
    timed: NotRequired[float]
    slow_share: NotRequired[float]
    late_of_last: NotRequired[float]
    window: NotRequired[float]
    rests_s: NotRequired[float | None]
    sign: NotRequired[breaker.Sign]
    sizes_kept_away: NotRequired[list[str]]


class Pace(TypedDict, closed=True):
    """What was heard of a counter. share: of its rate that is used after refusals for speed. paused_s: still.

    limit, window_s, remaining: as the provider told `age_s` ago. others_per_s: what others use of the same account.
    ramp_per_minute: what growth is held to.
    """

    share: float
    paused_s: NotRequired[float | None]
    limit: NotRequired[float | None]
    window_s: NotRequired[float | None]
    remaining: NotRequired[float | None]
    age_s: NotRequired[float | None]
    others_per_s: NotRequired[float | None]
    ramp_per_minute: NotRequired[float | None]


class Reloads(TypedDict, closed=True):
    """How many configs came to hold, and how many were refused."""

    applied: int
    refused: int


class Waits(TypedDict, closed=True):
    """A change of the config file that does not hold yet, and what it needs."""

    change: str
    needs: str


class Config(TypedDict, closed=True):
    """Which config holds. reloaded_at: when the last reload ended. problems: why it was refused, if it was.

    waiting: what of the file does not hold yet. changed: what holds that the file does not say.
    """

    version: str
    reloads: Reloads
    reloaded_at: float | None
    problems: list[str]
    waiting: list[Waits]
    changed: list[str]


class Callers(TypedDict, closed=True):
    """How many are counted. forgotten_in_use: unlisted tenants that were forgotten with what they had used."""

    unlisted_tenants: int
    sessions: int
    forgotten_in_use: int


class BreakerAlert(TypedDict, closed=True):
    """A breaker went from one state to another. requests: ids of the last that led to it."""

    at: float
    upstream: str
    before: breaker.State
    after: breaker.State
    cause: NotRequired[str]
    sign: NotRequired[str]
    numbers: dict[str, float | None]
    requests: list[str]


class SizesAlert(TypedDict, closed=True):
    """Prompts of some sizes (tokens) are kept away from an upstream, or return."""

    at: float
    upstream: str
    sizes: str
    shut: bool
    cause: NotRequired[str]
    numbers: dict[str, float | None]
    requests: list[str]


class BudgetAlert(TypedDict, closed=True):
    """Most of a budget of dollars is used."""

    at: float
    key: str
    used: float
    limit: float
    ends_in_s: float | None


Alert = BreakerAlert | SizesAlert | BudgetAlert


class Tally(TypedDict, closed=True):
    """Counts since the start: by lane, reason, upstream or counter. waited_s: the sum of all waits.

    forecasts: by lane, how waits compared with what was predicted. alerts: the last ones, newest last.
    """

    admitted: dict[str, float]
    queued: dict[str, float]
    refused: dict[str, float]
    failed: dict[str, float]
    served: dict[str, float]
    failed_attempts: dict[str, float]
    paced: dict[str, float]
    tokens: dict[str, float]
    overshot: dict[str, float]
    probes: dict[str, float]
    observed: dict[str, float]
    shadowed: dict[str, float]
    limits_moved: dict[str, float]
    preemptions: dict[str, float]
    spent_usd: dict[str, float]
    retried: dict[str, float]
    probe_tokens: dict[str, float]
    probe_usd: dict[str, float]
    forecasts: dict[str, dict[str, int]]
    settled: int
    unknown_usage: int
    unpriced: int
    client_gone: int
    evicted: int
    waited_s: float
    alerts: list[Alert]


class LaneBounds(TypedDict, closed=True):
    """What a lane may hold, and for how long its oldest request has been there; null: nobody waits."""

    max_requests: float
    max_tokens: float
    max_bytes: float
    oldest_s: float | None


class Process(TypedDict, closed=True):
    """How the process does; null: cannot be read. loop_lag_s: the worst of the last minute or two."""

    pid: int
    started_at: float
    cpu_s: float
    memory_bytes: int | None
    open_files: int | None
    max_files: int | None
    loop_lag_s: float


class Use(TypedDict, closed=True):
    """What somebody used: requests that were settled or refused, tokens, dollars; how many were refused."""

    requests: int
    tokens: int
    usd: float
    refused: int


class TenantUse(TypedDict, closed=True):
    """The same of one tenant."""

    name: str
    requests: int
    tokens: int
    usd: float
    refused: int


class Tenant(TypedDict, closed=True):
    """The same, and how many of its requests wait."""

    name: str
    requests: int
    tokens: int
    usd: float
    refused: int
    waiting: int


class SessionUse(TypedDict, closed=True):
    """The same of one agent session."""

    tenant: str
    id: str
    requests: int
    tokens: int
    usd: float
    refused: int


class Rest(TypedDict, closed=True):
    """What those used who are not among the named."""

    tenants: Use
    sessions: Use


class Counted(TypedDict, closed=True):
    """What waits, by lane; and the counters by their keys."""

    waiting: dict[str, Backlog]
    counters: dict[str, Counter]


class Metered(TypedDict, closed=True):
    """How the process does, and who used most of late."""

    process: Process
    tenants: list[TenantUse]
    sessions: list[SessionUse]
    rest: Rest


class ServiceState(TypedDict, closed=True):
    """Everything as it is now. waiting, lanes: by lane. counters, pacing: by counter. breakers: by upstream.

    flying: requests that were let go. unsettled: those whose books are open. tenants, sessions: who used most.
    """

    waiting: dict[str, Backlog]
    counters: dict[str, Counter]
    breakers: dict[str, Breaker]
    pacing: dict[str, Pace]
    flying: int
    unsettled: int
    draining: bool
    config: Config
    callers: Callers
    tally: Tally
    lanes: dict[str, LaneBounds]
    process: Process
    tenants: list[TenantUse]
    sessions: list[SessionUse]
    rest: Rest
    levers: Levers


class Notice(TypedDict, closed=True):
    """What an operator should know. runbook: the section of README that says what to do."""

    level: Level
    text: str
    since: float | None
    runbook: Runbook


class Binding(TypedDict, closed=True):
    """What somebody waits for, or is refused for. lane: null for a caller's own limit. next_s: until one goes."""

    text: str
    lane: str | None
    key: str
    waiting: int
    next_s: float | None
    help: str


class Lane(TypedDict, closed=True):
    """A lane. rank: 0 is the most urgent. predicted_s: the wait of who comes now. binding: key of what it waits for.

    Percentiles of waits are those of the last five minutes, rates are those of the last ten seconds.
    """

    name: str
    rank: int | None
    requests: int
    tokens: int
    bytes: int
    oldest_s: float | None
    predicted_s: float | None
    wait_p50_s: float | None
    wait_p95_s: float | None
    wait_p99_s: float | None
    admitted_per_s: float | None
    refused_per_s: float | None
    binding: str | None
    paused: bool | None
    max_wait_s: float | None
    max_requests: int | None


class Bucket(TypedDict, closed=True):
    """A bucket of an upstream, as among the counters of the state. kind: what it counts."""

    key: str
    kind: str
    level: float
    capacity: float
    per_second: float
    closed_s: float | None
    shadow: bool


class Kv(TypedDict, closed=True):
    """An engine's KV cache, as among the counters of the state."""

    saturation: float | None
    fill: float
    stale_s: float | None


class Upstream(TypedDict, closed=True):
    """An upstream. owned: nobody else uses it. out: taken out by an operator.

    Rates are those of the last ten seconds, of dollars five minutes.
    """

    name: str
    provider: str
    owned: bool
    state: breaker.State | None
    sign: breaker.Sign | None
    rests_s: float | None
    out: bool | None
    in_flight: float | None
    slots_limit: float | None
    buckets: list[Bucket]
    kv: Kv | None
    requests_per_s: float | None
    tokens_per_s: float | None
    errors_per_s: float | None
    paced_per_s: float | None
    usd_per_hour: float | None
    first_token_p50_s: float | None


class Refusal(TypedDict, closed=True):
    """Refusals for one reason. ids: of the last ones, newest first."""

    reason: Reason
    count_5m: int
    last_at: float
    ids: list[str]


class Row(TypedDict, closed=True):
    """A request in one line. at: its arrival. reason: why it was refused, evicted or failed, else empty. tokens:
    estimated, until they are reported.
    """

    id: str
    ticket: str
    at: float
    tenant: str
    lane: str
    model: str
    state: RequestState
    reason: str
    upstream: str
    waited_s: float | None
    tokens: int


class Overview(TypedDict, closed=True):
    """Everything at a glance. Of tenants, sessions and requests those that used most, or the newest; null: nobody keeps
    them.
    """

    at: float
    version: str
    uptime_s: float
    config: Config
    status: Status
    notices: list[Notice]
    binding: list[Binding]
    lanes: list[Lane]
    upstreams: list[Upstream]
    tenants: list[Tenant] | None
    sessions: list[SessionUse] | None
    refusals: list[Refusal]
    recent: list[Row] | None
    alerts: list[Alert]
    levers: Levers | None
    process: Process | None


class LaneHour(TypedDict, closed=True):
    """A lane, by step; null: it was not there yet, or nobody waited."""

    waiting: list[int | None]
    admitted: list[float | None]
    refused: list[float | None]
    wait_p95_s: list[float | None]


class UpstreamHour(TypedDict, closed=True):
    """An upstream, by step. errors: failed attempts. level: of its emptiest bucket, 0 to 1; null: it has none."""

    tokens_per_s: list[float | None]
    errors: list[float | None]
    level: list[float | None]
    state: list[breaker.State | None]


class Hour(TypedDict, closed=True):
    """The last hour in steps. at: their ends; all other lists are as long. refused: by reason."""

    step_s: float
    at: list[float]
    lanes: dict[str, LaneHour]
    upstreams: dict[str, UpstreamHour]
    refused: dict[str, list[float]]
