"""Where the numbers of each metric are read: in the state of the service, and in what was measured beside it.

Most are counts and levels that are kept anyway, so that no request costs more for them. One reading per metric of the
catalog, no more and no less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from extproc.core.breaker import Sign, State
from extproc.telemetry.conventions import OTHER
from extproc.telemetry.distribution import Shown
from extproc.telemetry.keys import parts_of
from extproc.telemetry.measures import Measures, Served
from extproc.telemetry.process import Process

__all__ = ["READINGS", "Sources", "Told"]

MOST_COUNTERS = 1000
"""More are on the state page alone."""
VERSION = version("tidegate")

Labels = tuple[Any, ...]
Told = Iterable[tuple[Labels, float | Shown]]
"""Numbers, or distributions, and their labels' values in the order of the catalog; None is a label that does not
apply."""


@dataclass(frozen=True, slots=True)
class Sources:
    """What is read: the state of a service as plain data, and those that measure beside it; None where none does."""

    state: Mapping[str, Any]
    measures: Measures | None = None
    process: Process | None = None


Reading = Callable[[Sources], Told]


def _one(*path: str) -> Reading:
    """A number of the state; none where it is not there."""

    def read(sources: Sources) -> Told:
        found: Any = sources.state
        for name in path:
            found = None if found is None else found.get(name)
        return [] if found is None else [((), float(found))]

    return read


def _tallied(name: str) -> Reading:
    """A count of the tally by one name."""
    return lambda sources: [((word,), number) for word, number in sources.state["tally"][name].items()]


def _summed(name: str) -> Reading:
    return lambda sources: [((), sum(sources.state["tally"][name].values()))]


def _total(name: str) -> Reading:
    return lambda sources: [((), sources.state["tally"][name])]


def _counts(name: str) -> Reading:
    """A counter that was measured, by one label or several."""

    def read(sources: Sources) -> Told:
        if sources.measures is None:
            return []
        counted = list(getattr(sources.measures, name).items())
        return [(key if isinstance(key, tuple) else (key,), number) for key, number in counted]

    return read


def _spread(name: str) -> Reading:
    """Distributions that were measured, by one label or several."""

    def read(sources: Sources) -> Told:
        if sources.measures is None:
            return []
        spread = list(getattr(sources.measures, name).items())
        return [(key if isinstance(key, tuple) else (key,), one.shown()) for key, one in spread]

    return read


def _gen_ai(each: Callable[[Served], Iterator[tuple[Labels, Shown]]]) -> Reading:
    """Distributions by upstream and model; `each` with the labels that come behind those that all of them have."""

    def read(sources: Sources) -> Told:
        for served in [] if sources.measures is None else list(sources.measures.served.values()):
            about = served.attributes
            shared = (
                about["gen_ai.operation.name"], about["gen_ai.request.model"], about.get("gen_ai.provider.name"),
                about.get("server.address"), about.get("server.port"), about["upstream"],
            )  # fmt: skip
            for labels, shown in each(served):
                if shown.count:
                    yield (*shared, *labels), shown

    return read


def _durations(served: Served) -> Iterator[tuple[Labels, Shown]]:
    for error, one in list(served.durations.items()):
        yield (error or None,), one.shown()


def _usage(served: Served) -> Iterator[tuple[Labels, Shown]]:
    yield ("input",), served.input.shown()
    yield ("output",), served.output.shown()


def _lag(sources: Sources) -> Told:
    return [] if sources.process is None else [((), sources.process.lag.shown())]


def _waiting(unit: str) -> Reading:
    return lambda sources: [((lane,), backlog[unit]) for lane, backlog in sources.state["waiting"].items()]


def _bound(name: str) -> Reading:
    return lambda sources: [((lane,), bounds[name]) for lane, bounds in sources.state.get("lanes", {}).items()]


def _oldest(sources: Sources) -> Told:
    return [((lane,), of["oldest_s"] or 0.0) for lane, of in sources.state.get("lanes", {}).items()]


def _lever(kind: str, name: str) -> Reading:
    """What an operator did to lanes or upstreams, one by one."""

    def read(sources: Sources) -> Told:
        levers = sources.state.get("levers") or {}
        return [((place,), float(bool(of.get(name)))) for place, of in levers.get(kind, {}).items()]

    return read


def _bypass(sources: Sources) -> Told:
    levers = sources.state.get("levers")
    return [] if levers is None else [((), float(levers.get("bypass") is not None))]


def _changes(sources: Sources) -> Told:
    levers = sources.state.get("levers")
    return [] if levers is None else [((), len(levers.get("changes", ())))]


def _of_counters(field: str, beside: str) -> Reading:
    """A number of all counters that have it, and another that tells their kind."""

    def read(sources: Sources) -> Told:
        for key, counter in list(sources.state["counters"].items())[:MOST_COUNTERS]:
            if beside in counter and counter.get(field) is not None:
                yield _counter(key), counter[field]

    return read


def _counter(key: str) -> Labels:
    """The labels of a counter by its key: `upstream/a/*/total`, `tenant/b/usd_day`."""
    parts = parts_of(key)
    return key, parts.name if parts.of == "upstream" else None, parts.kind


def _closed(sources: Sources) -> Told:
    for key, counter in list(sources.state["counters"].items())[:MOST_COUNTERS]:
        if "level" in counter and counter.get("closed_s", 0.0) is not None:
            yield _counter(key), counter.get("closed_s", 0.0)


def _overshot(sources: Sources) -> Told:
    return [(_counter(key), number) for key, number in sources.state["tally"]["overshot"].items()]


def _cache(field: str) -> Reading:
    """A number of an engine's KV cache."""

    def read(sources: Sources) -> Told:
        for key, counter in sources.state["counters"].items():
            if "cache" in counter and counter.get(field) is not None:
                yield (parts_of(key).name,), counter[field]

    return read


def _probes(sources: Sources) -> Told:
    for key, number in sources.state["tally"]["probes"].items():
        upstream, _, result = key.rpartition(":")
        yield (upstream, result), number


def _breaker(field: str) -> Reading:
    """A number of the breakers that have it."""

    def read(sources: Sources) -> Told:
        for upstream, breaker in sources.state["breakers"].items():
            if breaker.get(field) is not None:
                yield (upstream,), breaker[field]

    return read


def _open(sources: Sources) -> Told:
    shut = (State.OPEN, State.HALF_OPEN)
    return [((upstream,), float(breaker["state"] in shut)) for upstream, breaker in sources.state["breakers"].items()]


def _states(sources: Sources) -> Told:
    for upstream, breaker in sources.state["breakers"].items():
        for state in State:
            yield (upstream, state), float(breaker["state"] == state)


def _signs(sources: Sources) -> Told:
    for upstream, breaker in sources.state["breakers"].items():
        for sign in Sign:
            yield (upstream, sign), float(breaker.get("sign") == sign)


def _rests(sources: Sources) -> Told:
    return [((upstream,), one.get("rests_s", 0.0)) for upstream, one in sources.state["breakers"].items()]


def _kept_away(sources: Sources) -> Told:
    for upstream, breaker in sources.state["breakers"].items():
        yield (upstream,), len(breaker.get("sizes_kept_away", ()))


def _tenant(field: str) -> Reading:
    """By tenant; the rest is one."""

    def read(sources: Sources) -> Told:
        yield from (((one["name"],), one[field]) for one in sources.state.get("tenants", ()))
        if rest := sources.state.get("rest"):
            yield (OTHER,), rest["tenants"][field]

    return read


def _session(field: str) -> Reading:
    """By session; the rest is one."""

    def read(sources: Sources) -> Told:
        yield from (((one["tenant"], one["id"]), one[field]) for one in sources.state.get("sessions", ()))
        if rest := sources.state.get("rest"):
            yield (OTHER, OTHER), rest["sessions"][field]

    return read


def _config(sources: Sources) -> Told:
    return [((sources.state["config"]["version"],), 1)]


def _kept_back(sources: Sources) -> Told:
    return [((), len(sources.state["config"]["waiting"]))]


def _reloads(sources: Sources) -> Told:
    return [((result,), number) for result, number in sources.state["config"]["reloads"].items()]


READINGS: dict[str, Reading] = {
    "tidegate.admitted": _tallied("admitted"),
    "tidegate.queued": _tallied("queued"),
    "tidegate.refused": _counts("refused"),
    "tidegate.observed": _tallied("observed"),
    "tidegate.shadowed": _tallied("shadowed"),
    "tidegate.retried": _summed("retried"),
    "tidegate.served": _tallied("served"),
    "tidegate.failed": _tallied("failed"),
    "tidegate.settled": _total("settled"),
    "tidegate.client.gone": _total("client_gone"),
    "tidegate.evicted": _total("evicted"),
    "tidegate.unknown_usage": _total("unknown_usage"),
    "tidegate.waited": _total("waited_s"),
    "tidegate.in_flight": _one("flying"),
    "tidegate.unsettled": _one("unsettled"),
    "tidegate.wait": _spread("waits"),
    "tidegate.forecast.ratio": _spread("forecasts"),
    "tidegate.first_token": _spread("first_tokens"),
    "tidegate.request.duration": _spread("durations"),
    "tidegate.queue.requests": _waiting("requests"),
    "tidegate.queue.tokens": _waiting("tokens"),
    "tidegate.queue": _waiting("bytes"),
    "tidegate.queue.oldest": _oldest,
    "tidegate.queue.limit.requests": _bound("max_requests"),
    "tidegate.queue.limit.tokens": _bound("max_tokens"),
    "tidegate.queue.limit": _bound("max_bytes"),
    "tidegate.lane.paused": _lever("lanes", "paused"),
    "tidegate.bucket.level": _of_counters("level", "level"),
    "tidegate.bucket.capacity": _of_counters("capacity", "level"),
    "tidegate.bucket.refill": _of_counters("per_second", "level"),
    "tidegate.bucket.closed": _closed,
    "tidegate.slots.used": _of_counters("used", "limit"),
    "tidegate.slots.limit": _of_counters("limit", "limit"),
    "tidegate.budget.spent": _of_counters("spent", "budget"),
    "tidegate.budget.limit": _of_counters("budget", "budget"),
    "tidegate.overshot": _overshot,
    "tidegate.limits.moved": _tallied("limits_moved"),
    "tidegate.failed_attempts": _counts("attempts"),
    "tidegate.failovers": _counts("failovers"),
    "tidegate.paced": _tallied("paced"),
    "tidegate.tokens": _tallied("tokens"),
    "tidegate.reserved.tokens": _counts("reserved"),
    "tidegate.spent.usd": _tallied("spent_usd"),
    "tidegate.unpriced": _total("unpriced"),
    "tidegate.probes": _probes,
    "tidegate.probe.tokens": _tallied("probe_tokens"),
    "tidegate.probe.usd": _tallied("probe_usd"),
    "tidegate.estimate.ratio": _spread("estimates"),
    "tidegate.reservation.ratio": _spread("reservations"),
    "tidegate.upstream.out": _lever("upstreams", "out"),
    "tidegate.kv.saturation": _cache("saturation"),
    "tidegate.kv.fill": _cache("fill"),
    "tidegate.kv.stale": _cache("stale_s"),
    "tidegate.kv.instances": _cache("instances"),
    "tidegate.kv.preemptions": _tallied("preemptions"),
    "tidegate.breaker.open": _open,
    "tidegate.breaker.state": _states,
    "tidegate.breaker.sign": _signs,
    "tidegate.breaker.rest": _rests,
    "tidegate.breaker.failures": _breaker("failures"),
    "tidegate.breaker.paced": _breaker("paced"),
    "tidegate.breaker.error": _breaker("error_share"),
    "tidegate.breaker.slow": _breaker("slow_share"),
    "tidegate.breaker.sizes_kept_away": _kept_away,
    "tidegate.breaker.moves": _counts("moves"),
    "tidegate.tenant.requests": _tenant("requests"),
    "tidegate.tenant.refused": _tenant("refused"),
    "tidegate.tenant.tokens": _tenant("tokens"),
    "tidegate.tenant.usd": _tenant("usd"),
    "tidegate.session.requests": _session("requests"),
    "tidegate.session.refused": _session("refused"),
    "tidegate.session.tokens": _session("tokens"),
    "tidegate.session.usd": _session("usd"),
    "tidegate.sessions": _one("callers", "sessions"),
    "tidegate.unlisted_tenants": _one("callers", "unlisted_tenants"),
    "tidegate.build.info": lambda _: [((VERSION,), 1)],
    "tidegate.config.info": _config,
    "tidegate.config.last_reload_timestamp": _one("config", "reloaded_at"),
    "tidegate.config.waiting": _kept_back,
    "tidegate.config.reloads": _reloads,
    "tidegate.draining": _one("draining"),
    "tidegate.bypass": _bypass,
    "tidegate.changes": _changes,
    "tidegate.loop.lag": _lag,
    "process.cpu": _one("process", "cpu_s"),
    "process.resident_memory": _one("process", "memory_bytes"),
    "process.start_time": _one("process", "started_at"),
    "process.open_fds": _one("process", "open_files"),
    "process.max_fds": _one("process", "max_files"),
    "gen_ai.server.request.duration": _gen_ai(_durations),
    "gen_ai.server.time_to_first_token": _gen_ai(lambda served: iter([((), served.first.shown())])),
    "gen_ai.server.time_per_output_token": _gen_ai(lambda served: iter([((), served.each.shown())])),
    "gen_ai.client.token.usage": _gen_ai(_usage),
}
"""By a metric's name to OpenTelemetry."""
