"""The numbers of the state page for a Prometheus: what is kept as a count or a level anyway, read when it is asked for.

Nothing is counted for this, so no request costs more for it. Everything is read from one state, so that the numbers of
one page belong together. Names end in their unit; what only grows ends in `_total`. Counters of sessions are left out,
and of tenants that nobody listed most: there may be any number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["Metrics"]

MOST_COUNTERS = 1000
"""More are on the state page alone."""

State = Mapping[str, Any]
Told = Iterator[tuple[float, dict[str, str]]]
"""Numbers and their labels."""


class Metrics:
    """Pages of metrics of one service. It remembers none of them: names of tenants and versions come and go."""

    def page(self, state: State) -> bytes:
        """The state of a service (its state page, as plain data) in the text format of Prometheus."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Page([_family(*one, CounterMetricFamily, state) for one in GROWING]))
        registry.register(_Page([_family(*one, GaugeMetricFamily, state) for one in LEVELS]))
        return generate_latest(registry)


class _Page(Collector):
    """Families of metrics that are known already."""

    def __init__(self, families: Iterable[Metric | None]) -> None:
        """None is one of which there is nothing to tell."""
        self._families = [family for family in families if family is not None]

    def collect(self) -> Iterable[Metric]:
        """As the registry asks."""
        return self._families


def _family(
    name: str,
    unit: str,
    what: str,
    read: Callable[[State], Told],
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    state: State,
) -> Metric | None:
    told = list(read(state))
    if not told:
        return None
    family = kind(f"{name}_{unit}" if unit else name, what, labels=list(told[0][1]))
    for number, labels in told:
        family.add_metric(list(labels.values()), number)
    return family


def _tallied(name: str, label: str) -> Callable[[State], Told]:
    """A count of the tally by name."""
    return lambda state: ((number, {label: str(word)}) for word, number in state["tally"][name].items())


def _total(name: str) -> Callable[[State], Told]:
    return lambda state: iter([(state["tally"][name], {})])


def _plain(name: str) -> Callable[[State], Told]:
    return lambda state: iter([(float(state[name]), {})])


def _waiting(unit: str) -> Callable[[State], Told]:
    return lambda state: ((backlog[unit], {"lane": lane}) for lane, backlog in state["waiting"].items())


def _counted(field: str, beside: str) -> Callable[[State], Told]:
    """A number of all counters that have it, and another that tells their kind."""

    def read(state: State) -> Told:
        for key, counter in list(state["counters"].items())[:MOST_COUNTERS]:
            if beside in counter and counter.get(field) is not None:
                yield counter[field], {"counter": key}

    return read


def _version(state: State) -> Told:
    yield 1, {"version": state["config"]["version"]}


def _reloads(state: State) -> Told:
    for result, number in state["config"]["reloads"].items():
        yield number, {"result": result}


def _reloaded(state: State) -> Told:
    if (at := state["config"]["reloaded_at"]) is not None:
        yield at, {}


def _kept_back(state: State) -> Told:
    yield len(state["config"]["waiting"]), {}


def _breakers(state: State) -> Told:
    for upstream, breaker in state["breakers"].items():
        yield float(breaker["state"] != "closed"), {"upstream": upstream, "state": str(breaker["state"])}


Instrument = tuple[str, str, str, Callable[[State], Told]]
"""Name without its unit, unit, what it is, and where it is read."""
GROWING: tuple[Instrument, ...] = (
    ("tidegate_config_reloads", "", "Reloads of the config by what became of them.", _reloads),
    ("tidegate_admitted", "", "Requests that were let go, by lane.", _tallied("admitted", "lane")),
    ("tidegate_queued", "", "Requests that had to wait, by lane.", _tallied("queued", "lane")),
    ("tidegate_refused", "", "Requests that were refused, by reason.", _tallied("refused", "reason")),
    ("tidegate_observed", "", "Requests that would not have gone at once, by reason.", _tallied("observed", "reason")),
    ("tidegate_shadowed", "", "Requests that a limit in shadow mode would have held.", _tallied("shadowed", "limit")),
    ("tidegate_served", "", "Answers, by upstream.", _tallied("served", "upstream")),
    ("tidegate_failed", "", "Requests that no upstream answered, by reason.", _tallied("failed", "reason")),
    ("tidegate_failed_attempts", "", "Attempts that failed, by upstream.", _tallied("failed_attempts", "upstream")),
    ("tidegate_paced", "", "Attempts that were refused for their speed (429).", _tallied("paced", "upstream")),
    ("tidegate_tokens", "", "Tokens that upstreams reported as used.", _tallied("tokens", "upstream")),
    ("tidegate_overshot_tokens", "", "Tokens taken above a limit, by counter.", _tallied("overshot", "counter")),
    ("tidegate_spent_usd", "", "Dollars for answers, by upstream.", _tallied("spent_usd", "upstream")),
    ("tidegate_settled", "", "Requests whose outcome is known.", _total("settled")),
    ("tidegate_client_gone", "", "Requests whose client left before the end.", _total("client_gone")),
    ("tidegate_waited", "seconds", "Seconds that requests which were let go had waited.", _total("waited_s")),
)
LEVELS: tuple[Instrument, ...] = (
    ("tidegate_config_info", "", "The config in force, by a short hash of its values.", _version),
    ("tidegate_config_last_reload_timestamp", "seconds", "When a reload ended last, in epoch seconds.", _reloaded),
    ("tidegate_config_waiting", "", "Changes that hold only after a restart or a rendering.", _kept_back),
    ("tidegate_queue_requests", "", "Requests in line, by lane.", _waiting("requests")),
    ("tidegate_queue_tokens", "", "Tokens of the requests in line, by lane.", _waiting("tokens")),
    ("tidegate_queue", "bytes", "Bytes of the bodies in line, by lane.", _waiting("bytes")),
    ("tidegate_in_flight", "", "Requests whose stream is open, those in line included.", _plain("flying")),
    ("tidegate_unsettled", "", "Requests whose outcome is not known yet.", _plain("unsettled")),
    ("tidegate_draining", "", "1 while nobody is let in any more.", _plain("draining")),
    ("tidegate_bucket_level", "", "What is in a bucket; below 0 is debt.", _counted("level", "level")),
    ("tidegate_bucket_capacity", "", "What a bucket holds.", _counted("capacity", "level")),
    ("tidegate_slots_used", "", "Places that are taken.", _counted("used", "limit")),
    ("tidegate_slots_limit", "", "Places that there are.", _counted("limit", "limit")),
    ("tidegate_cache_fill", "", "Used share of the fullest KV cache of an engine.", _counted("fill", "fill")),
    ("tidegate_budget_spent", "", "What was used of a budget in this period.", _counted("spent", "budget")),
    ("tidegate_budget_limit", "", "What may be used in a period.", _counted("budget", "budget")),
    ("tidegate_breaker_open", "", "1 where users are kept away, by upstream and state.", _breakers),
)
