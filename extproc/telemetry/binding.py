"""What binds: for each thing that somebody waits for, or that refuses somebody, a sentence and what would help.

A hint is only given where it follows from what is known at that moment; where nothing follows there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from extproc.core.policy import Kind, Pacing, Upstream, WhenBusy
from extproc.core.refusal import Reason
from extproc.shapes import Binding
from extproc.telemetry.keys import parts_of
from extproc.telemetry.seen import Seen
from extproc.telemetry.words import clean, key_words

__all__ = ["bindings"]

MOST = 20
MAJORITY = 0.5
"""From this share of what waits on one tenant is named."""
OWN_SETTINGS = {
    Reason.TENANT_QUOTA: "its tpm or rpm",
    Reason.TENANT_CONCURRENCY: "its concurrency",
    Reason.SESSION_BUDGET: "the budget of its sessions",
    Reason.SPEND_BUDGET: "its budget of dollars",
}

Line = Mapping[str, Any]


def bindings(seen: Seen) -> list[Binding]:
    """What binds now, the best lane first; callers' own limits, by how many they refused, behind them."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in seen.standing["lines"]:
        if line["key"]:
            groups.setdefault((line["lane"], line["key"]), []).append(line)
    found = [_waits(seen, lane, key, lines) for (lane, key), lines in groups.items()]
    found += _paused(seen)
    ranks = {name: lane.rank for name, lane in seen.policy.lanes.items()}
    found.sort(key=lambda one: (ranks.get(one["lane"] or "", len(ranks)), -one["waiting"]))
    return [*found, *_own(seen)][:MOST]


def _waits(seen: Seen, lane: str, key: str, lines: list[Line]) -> Binding:
    waiting = sum(line["requests"] for line in lines)
    next_s = min((line["next_s"] for line in lines if line["next_s"] is not None), default=None)
    line = max(lines, key=lambda one: one["requests"])
    return {
        "text": f"{lane} waits for {_what(seen, key)}: {waiting} waiting{_in(next_s)}",
        "lane": lane,
        "key": key,
        "waiting": waiting,
        "next_s": next_s,
        "help": "; ".join(hint for hint in _hints(seen, key, line) if hint),
    }


def _what(seen: Seen, key: str) -> str:
    counter, parts = seen.state["counters"].get(key, {}), parts_of(key)
    if parts.kind == "breaker":
        return f"{parts.name}, which {'is out' if seen.lever('upstreams', parts.name, 'out') else 'rests'}"
    if counter.get("closed_s"):
        return f"the pause that {parts.name} asked for ({key_words(key)})"
    return key_words(key)


def _in(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return ", next now" if seconds < 0.5 else f", next in {seconds:.0f} s"  # noqa: PLR2004 - it is rounded


def _hints(seen: Seen, key: str, line: Line) -> Iterator[str]:
    parts = parts_of(key)
    upstream = seen.policy.upstreams.get(parts.name) if parts.of == "upstream" else None
    if upstream is not None:
        yield from _of_upstream(seen, key, upstream, line)
    yield _chain(seen, key, line)
    if line["tenants"] > 1 and line["tenant_share"] >= MAJORITY:
        yield f"tenant {clean(line['tenant'])} has {line['tenant_share']:.0%} of what waits"


def _of_upstream(seen: Seen, key: str, upstream: Upstream, line: Line) -> Iterator[str]:
    counter, parts = seen.state["counters"].get(key, {}), parts_of(key)
    match parts.kind:
        case "breaker":
            yield _breaker(seen, upstream.name)
        case "kv":
            yield _cache(counter, upstream)
        case "slots":
            yield _slots(counter, upstream)
        case _:
            yield _bucket(seen, key, counter, upstream, line)


def _breaker(seen: Seen, name: str) -> str:
    breaker = seen.state["breakers"].get(name, {})
    sign, rests = breaker.get("sign"), breaker.get("rests_s")
    if seen.lever("upstreams", name, "out"):
        return f"{name} was taken out by an operator: put it back"
    why = f" because of {SIGNS.get(sign, sign)}" if sign else ""
    then = f", tried again in {rests:.0f} s" if rests else ""
    return f"the breaker of {name} is {str(breaker.get('state')).replace('_', ' ')}{why}{then}"


SIGNS = {
    "failures": "failures in a row",
    "paced": "429s in a row",
    "errors": "its share of errors",
    "slow": "late first tokens",
    "malformed": "answers that are none",
    "terminal": "an account without credit",
    "credential": "a key that it refuses",
}


def _cache(counter: Mapping[str, Any], upstream: Upstream) -> str:
    if counter.get("saturation") is None:
        return f"metrics of {upstream.name} cannot be read, so that only a trickle goes: see whether it answers"
    return f"its cache is {counter['fill']:.0%} full: another instance of {upstream.name}, or shorter prompts"


def _slots(counter: Mapping[str, Any], upstream: Upstream) -> str:
    held, limit = counter.get("used", 0), counter.get("limit")
    if limit is not None and upstream.concurrency is not None and limit < upstream.concurrency:
        return f"{upstream.name} is held back to {limit:g} of {upstream.concurrency} at a time"
    if limit is None or held < limit:
        return ""
    raised = "raise its concurrency, if it can do more" if upstream.concurrency else "its concurrency is learned"
    return f"{held:g} of {limit:g} run there: {raised}"


def _bucket(seen: Seen, key: str, counter: Mapping[str, Any], upstream: Upstream, line: Line) -> str:
    parts, brake = parts_of(key), seen.state["pacing"].get(key) or {}
    if counter.get("closed_s"):
        return f"a 429 or a header of {upstream.name} asked for this pause"
    if brake.get("others_per_s", 0) > 0.1 * counter.get("per_second", 0.0) > 0:
        return f"others use {brake['others_per_s'] * 60:,.0f} a minute of the same account"
    if brake.get("share", 1.0) < 0.95:  # noqa: PLR2004 - less is no reason
        return f"after refusals for speed only {brake['share']:.0%} of the rate of {upstream.name} is used"
    more = f"more {parts.setting} at {upstream.name}, if its provider allows it"
    kept = _kept(seen, parts.kind, counter, upstream, line)
    return f"{kept}; {more}" if kept else more


def _kept(seen: Seen, kind: str, counter: Mapping[str, Any], upstream: Upstream, line: Line) -> str:
    """Why there is enough in a bucket, and yet not for this lane."""
    lane, needs, level = seen.policy.lanes.get(line["lane"]), line["needs"] or 0.0, counter.get("level", 0.0)
    if lane is None or level < needs:
        return ""
    reserve = 1.0 - upstream.burn if upstream.burn is not None and kind != Kind.REQUESTS and lane.rank else 0.0
    share = max(lane.keep_free, reserve)
    if level - share * counter.get("capacity", 0.0) < needs:
        setting = f"lanes.{lane.name}.keep_free" if lane.keep_free >= reserve else f"upstreams.{upstream.name}.burn"
        return f"the last {share:.0%} stay free for better lanes ({setting})"
    owed = [name for name, units in counter.get("owed", {}).items() if name != lane.name and units > 0]
    if owed:
        return f"what is there is owed to {', '.join(owed)} (min_share)"
    if lane.pacing is Pacing.SMOOTH:
        return f"{lane.name} takes no more than flows in (pacing: smooth)"
    return "what is there is for others whose turn is before" if line["behind"] else ""


def _chain(seen: Seen, key: str, line: Line) -> str:
    """What another upstream could do."""
    chain, asked = line["chain"], line["asked"]
    others = [name for name in chain if name not in asked]
    if not asked:
        return (
            ""
            if len(chain) > 1
            else f"no other upstream serves {clean(line['model'][:60])}: one more in its chain would"
        )
    if len(asked) > 1:
        full = [name for name in asked if name != parts_of(key).name]
        return f"{', '.join(full)} have no room either" if len(full) > 1 else f"{full[0]} has no room either"
    if len(chain) == 1:
        return f"or another upstream in the chain of {clean(line['model'][:60])}"
    lane = seen.policy.lanes.get(line["lane"])
    serving = [name for name in others if seen.serves(name)]
    if serving and lane is not None and lane.when_busy is WhenBusy.HOLD:
        return f"{lane.name} holds for its first choice; when_busy: spill would let it go to {serving[0]}"
    shut = [name for name in others if not seen.serves(name)]
    return f"{', '.join(shut)} of its chain {'is' if len(shut) == 1 else 'are'} away" if shut else ""


def _paused(seen: Seen) -> Iterator[Binding]:
    for name, backlog in seen.state["waiting"].items():
        if seen.lever("lanes", name, "paused") and backlog["requests"]:
            until = seen.levers["lanes"][name].get("until")
            yield {
                "text": f"{name} is paused by an operator: {backlog['requests']} waiting",
                "lane": name,
                "key": f"lane/{name}/paused",
                "waiting": backlog["requests"],
                "next_s": None if until is None else round(max(0.0, until - seen.at), 3),
                "help": f"resume {name}",
            }


def _own(seen: Seen) -> Iterable[Binding]:
    """Callers' own limits that refused somebody in the last minutes."""
    for (reason, tenant), many in seen.history.own_limits().most_common(5):
        limit = OWN_SETTINGS[Reason(reason)]
        yield {
            "text": f"tenant {clean(tenant) or 'others'} reached {limit}: {many} refused in 5 minutes",
            "lane": None,
            "key": f"tenant/{tenant}/{reason}",
            "waiting": 0,
            "next_s": None,
            "help": f"raise {limit}, if it may use more" if tenant else "",
        }
