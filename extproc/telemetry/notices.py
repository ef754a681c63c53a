"""What an operator should know now, worst first, each with the section of the runbook that says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from extproc.core.runbook import Runbook
from extproc.shapes import Level, Notice
from extproc.telemetry.seen import PRESSURE, Seen
from extproc.telemetry.words import key_words, seconds

__all__ = ["notices"]

MOST, MOST_OF_A_KIND = 30, 5
LEVELS = ("error", "warning", "info")
SHED_S = 60.0
"""So long a refusal is told after the last one."""
NEARLY = 0.9
"""A limit is near when so much of it is used, over the last minutes."""
BURNT, LEAST = 0.01, 20
"""More than this share of the best lane's requests refused, of at least so many, burns what it is promised."""
SPENT = 0.9
PACED = 0.05
"""From this share of an upstream's attempts on, refusals for speed are more than what now and then happens."""
DRIFT = 0.8, 1.25
"""Estimates of prompts that are off by more, in the sum of five minutes, are told."""
LAG_S = 0.25
GRAVE = {"terminal": "its account has no credit", "credential": "it refuses our key"}


def notices(seen: Seen) -> list[Notice]:
    """All that is to be told. since: in epoch seconds, None where that is not known."""
    kinds: tuple[Callable[[Seen], Iterator[Notice]], ...] = (
        _bypass, _draining, _outages, _breakers, _sizes, _full, _pressure, _failures, _burn, _near, _paced, _drift,
        _budgets, _engines, _config, _levers, _loop,
    )  # fmt: skip
    found = [notice for kind in kinds for notice in _some(kind(seen))]
    found.sort(key=lambda one: LEVELS.index(one["level"]))
    return found[:MOST]


def _some(found: Iterator[Notice]) -> list[Notice]:
    """Many of one kind are told as a few and a number."""
    every = list(found)
    if len(every) <= MOST_OF_A_KIND:
        return every
    rest: Notice = {
        **every[MOST_OF_A_KIND],
        "text": f"and {len(every) - MOST_OF_A_KIND} more like these",
        "since": None,
    }
    return [*every[:MOST_OF_A_KIND], rest]


def _notice(level: Level, text: str, runbook: Runbook, since: float | None = None) -> Notice:
    return {"level": level, "text": text, "since": since, "runbook": runbook}


def _requests(many: float) -> str:
    return "1 request was" if many == 1 else f"{many:.0f} requests were"


def _bypass(seen: Seen) -> Iterator[Notice]:
    bypass = seen.levers.get("bypass")
    if bypass:
        text = f"bypass: everybody is let go at once, no limit is kept{_until(seen, bypass)}"
        yield _notice("error", text, Runbook.BYPASSED)


def _draining(seen: Seen) -> Iterator[Notice]:
    if seen.draining:
        yield _notice("warning", "draining: nobody is let in any more", Runbook.LEVERS)


def _outages(seen: Seen) -> Iterator[Notice]:
    for route in seen.policy.routes:
        if not any(map(seen.serves, route.chain)):
            text = f"no upstream of {', '.join(route.models[:3])[:80]} serves: {', '.join(route.chain)} are away"
            yield _notice("error", text, Runbook.REQUESTS_FAIL)


def _breakers(seen: Seen) -> Iterator[Notice]:
    for name, breaker in seen.state["breakers"].items():
        state, sign = str(breaker["state"]), breaker.get("sign")
        if state == "closed":
            continue
        why = GRAVE.get(str(sign)) or (f"sign: {sign}" if sign else "")
        rests = f", tried again in {breaker['rests_s']:.0f} s" if breaker.get("rests_s") else ""
        level: Level = "error" if sign in GRAVE else "info" if state == "ramping" else "warning"
        text = f"{name}: breaker {state.replace('_', ' ')}{f' ({why})' if why else ''}{rests}"
        yield _notice(level, text, Runbook.BREAKER_OPEN, _moved_at(seen, name))


def _moved_at(seen: Seen, upstream: str) -> float | None:
    """When its breaker left the closed state last, as far as that was told."""
    for alert in reversed(seen.state["tally"]["alerts"]):
        if alert.get("upstream") == upstream and alert.get("before") == "closed":
            return float(alert["at"])
    return None


def _sizes(seen: Seen) -> Iterator[Notice]:
    for name, breaker in seen.state["breakers"].items():
        if kept := breaker.get("sizes_kept_away"):
            told = ", ".join(map(str, kept))
            yield _notice("warning", f"{name}: prompts of {told} tokens are kept away from it", Runbook.BREAKER_OPEN)


def _full(seen: Seen) -> Iterator[Notice]:
    for name, backlog in seen.state["waiting"].items():
        rule = seen.policy.lanes.get(name)
        bounds = {"requests": rule.max_requests, "tokens": rule.max_tokens, "bytes": rule.max_bytes} if rule else {}
        full = [unit for unit, most in bounds.items() if backlog[unit] >= NEARLY * most]
        if full:
            told = ", ".join(f"{backlog[unit]:,} of {bounds[unit]:,} {unit}" for unit in full)
            yield _notice("warning", f"lane {name} is nearly full: {told}", Runbook.QUEUE_FULL)


def _pressure(seen: Seen) -> Iterator[Notice]:
    """Who was refused in the last minutes because there was more to do than could be done."""
    for reason in PRESSURE:
        many = seen.now.refused.get(reason, 0) - seen.minutes.refused.get(reason, 0)
        if many and seen.history.refused_within(reason, SHED_S):
            text = f"{_requests(many)} refused in five minutes: {reason}"
            yield _notice("warning", text, Runbook.QUEUE_FULL)


def _failures(seen: Seen) -> Iterator[Notice]:
    """Who was let go in the last minutes and got an answer from nobody."""
    for reason, total in seen.now.failed.items():
        many = total - seen.minutes.failed.get(reason, 0)
        if many:
            text = f"{_requests(many)} let go and failed in five minutes: {reason}"
            yield _notice("warning", text, Runbook.REQUESTS_FAIL)


def _burn(seen: Seen) -> Iterator[Notice]:
    """The best lane's requests that were refused, of all that came in five minutes."""
    best = min(seen.policy.lanes.values(), key=lambda lane: lane.rank, default=None)
    if best is None:
        return
    now, then, name = seen.now, seen.minutes, best.name
    refused = now.missed.get(name, 0) - then.missed.get(name, 0)
    came = refused + now.admitted.get(name, 0) - then.admitted.get(name, 0)
    if came >= LEAST and refused > BURNT * came:
        text = f"{refused:.0f} of {came:.0f} requests of {name} were refused in five minutes"
        yield _notice("error", text, Runbook.SLO_BURN)


def _near(seen: Seen) -> Iterator[Notice]:
    """Providers of whose tokens a minute most is used."""
    for name, upstream in seen.policy.upstreams.items():
        rates = [seen.state["counters"].get(f"upstream/{name}/{limit.model}/total", {}) for limit in upstream.limits]
        most = sum(counter.get("per_second", 0.0) for counter in rates)
        used = seen.now.rate(seen.minutes, "tokens", name)
        if most and used is not None and used >= NEARLY * most:
            yield _notice("info", f"{name} is at {used / most:.0%} of its tokens a minute", Runbook.NEAR_LIMIT)


def _paced(seen: Seen) -> Iterator[Notice]:
    """Providers that refused for speed though there was room here."""
    for name in seen.policy.upstreams:
        paced, served, errors = (
            getattr(seen.now, what).get(name, 0) - getattr(seen.minutes, what).get(name, 0)
            for what in ("paced", "served", "errors")
        )
        if paced:
            level: Level = "warning" if paced >= PACED * (served + errors) else "info"
            text = f"{name} refused {paced:.0f} of {served + errors:.0f} attempts for speed (429) in five minutes"
            yield _notice(level, text, Runbook.PROVIDER_REFUSES)


def _drift(seen: Seen) -> Iterator[Notice]:
    ratio = seen.history.drift(LEAST)
    if ratio is not None and not DRIFT[0] <= ratio <= DRIFT[1]:
        text = f"prompts are estimated at {ratio:.0%} of what upstreams report"
        yield _notice("warning", text, Runbook.ESTIMATOR_DRIFT)


def _budgets(seen: Seen) -> Iterator[Notice]:
    for key, counter in seen.state["counters"].items():
        limit = counter.get("budget")
        if limit and not counter.get("shadow") and counter["spent"] >= SPENT * limit:
            level: Level = "error" if counter["spent"] >= limit else "warning"
            text = f"{counter['spent'] / limit:.0%} used of {key_words(key)} (${limit:,.2f})"
            yield _notice(level, text, Runbook.BUDGET)


def _engines(seen: Seen) -> Iterator[Notice]:
    for name, upstream in seen.policy.upstreams.items():
        counter = seen.state["counters"].get(f"upstream/{name}/kv", {})
        if upstream.kv is not None and counter and counter.get("saturation") is None:
            text = f"metrics of {name} cannot be read: how full its cache is, nobody knows"
            yield _notice("warning", text, Runbook.KV_STALE)
        elif counter.get("saturation", 0.0) >= 1.0:
            text = f"{name} is full: its fullest cache is at {counter['fill']:.0%}, or its own queue is long"
            yield _notice("info", text, Runbook.KV_SATURATED)


def _config(seen: Seen) -> Iterator[Notice]:
    config = seen.state["config"]
    if config["problems"]:
        text = f"the config file was refused, what held before holds: {config['problems'][0]}"
        yield _notice("warning", text[:300], Runbook.CONFIG, config["reloaded_at"])
    if config["waiting"]:
        text = f"{len(config['waiting'])} changes of the config wait: {config['waiting'][0]['change']}"
        yield _notice("info", text[:300], Runbook.CONFIG, config["reloaded_at"])


def _levers(seen: Seen) -> Iterator[Notice]:
    moved = seen.levers
    for name in moved.get("lanes") or {}:
        if seen.lever("lanes", name, "paused"):
            text = f"lane {name} is paused by an operator{_until(seen, moved['lanes'][name])}"
            yield _notice("warning", text, Runbook.LEVERS)
    for name in moved.get("upstreams") or {}:
        if seen.lever("upstreams", name, "out"):
            text = f"{name} was taken out by an operator{_until(seen, moved['upstreams'][name])}"
            yield _notice("warning", text, Runbook.LEVERS)
    for change in moved.get("changes") or ():
        text = f"{change['place']} is {change['value']} instead of {change['was']}{_until(seen, change)}"
        yield _notice("info", text, Runbook.LEVERS)


def _until(seen: Seen, lever: Mapping[str, Any]) -> str:
    """When a lever returns by itself."""
    until = lever.get("until")
    return ", until it is undone" if until is None else f", for another {seconds(max(0.0, until - seen.at))}"


def _loop(seen: Seen) -> Iterator[Notice]:
    lag_s = (seen.state.get("process") or {}).get("loop_lag_s")
    if lag_s is not None and lag_s >= LAG_S:
        yield _notice("warning", f"Tidegate's own loop is {lag_s:.2f} s late", Runbook.NO_TIME)
