"""A listener that measures: how long, how many tokens, how well estimated; and who uses most.

It counts itself what the SDK's instruments would count, and hands that to the SDK's exporter as its data (see metrics).
An instrument takes 7 microseconds to record a value for one reader and 11 for two, and a request has eight values;
counted here all of a request takes 7 (`python -m tests.load.meter`). And an instrument remembers every set of
attributes that it ever saw, until it knows 2,000 and puts all others into one; names of tenants come and go.

What is counted by name is bounded: lanes, upstreams, reasons and signs are ours, models are those that are listed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

from extproc.core import events
from extproc.core.refusal import Reason
from extproc.core.request import Endpoint, Request, Usage
from extproc.telemetry.catalog import BY_NAME
from extproc.telemetry.conventions import OPERATIONS, OTHER, Conventions
from extproc.telemetry.distribution import Distribution
from extproc.telemetry.heaviest import Heaviest
from extproc.telemetry.tally import SHORTEST_S

__all__ = ["Measures"]

NOTABLE_S = 0.1
"""Shorter waits need no trace to explain them."""
MOST_MOVED = 10_000
"""Of so many requests it is remembered when they went on to another upstream."""

K = TypeVar("K", bound=Hashable)


class Spread(dict[K, Distribution]):
    """Distributions of one metric by its labels' values; they are made when they are asked for."""

    def __init__(self, metric: str) -> None:
        """metric: its name in the catalog."""
        super().__init__()
        self._bounds = BY_NAME[metric].buckets

    def __missing__(self, key: K) -> Distribution:
        """Nothing was recorded of it yet."""
        found = self[key] = Distribution(self._bounds)
        return found


class Served:
    """What is measured of the requests for one model at one upstream. Attributes as the conventions name them."""

    __slots__ = ("attributes", "durations", "each", "first", "input", "output")

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        """durations: by kind of error, which is empty for those that went well."""
        self.attributes = attributes
        self.durations: Spread[str] = Spread("gen_ai.server.request.duration")
        self.first = Distribution(BY_NAME["gen_ai.server.time_to_first_token"].buckets)
        self.each = Distribution(BY_NAME["gen_ai.server.time_per_output_token"].buckets)
        self.input = Distribution(BY_NAME["gen_ai.client.token.usage"].buckets)
        self.output = Distribution(BY_NAME["gen_ai.client.token.usage"].buckets)


class Measures:
    """An Observer. clock: as the requests'. shown: so many tenants and sessions are told by name.

    trace: the trace that a request belongs to, as 32 hex digits, empty where none was kept.
    """

    def __init__(
        self,
        conventions: Conventions,
        clock: Callable[[], float],
        shown: int = 50,
        trace: Callable[[Request], str] = lambda _: "",
    ) -> None:
        """Nothing was heard yet."""
        self._conventions = conventions
        self._clock = clock
        self.trace = trace
        self.tenants: Heaviest[str] = Heaviest(shown, clock)
        self.sessions: Heaviest[tuple[str, str]] = Heaviest(shown, clock)
        self.waits: Spread[tuple[str, str]] = Spread("tidegate.wait")
        self.forecasts: Spread[str] = Spread("tidegate.forecast.ratio")
        self.first_tokens: Spread[str] = Spread("tidegate.first_token")
        self.durations: Spread[tuple[str, str]] = Spread("tidegate.request.duration")
        self.estimates: Spread[str] = Spread("tidegate.estimate.ratio")
        self.reservations: Spread[str] = Spread("tidegate.reservation.ratio")
        self.served: dict[tuple[str, str, str], Served] = {}
        """By upstream, model and operation, as they are told: several endpoints are one operation."""
        self.refused: Counter[tuple[str, str]] = Counter()
        self.attempts: Counter[tuple[str, str]] = Counter()
        self.failovers: Counter[tuple[str, str]] = Counter()
        self.moves: Counter[tuple[str, str, str]] = Counter()
        self.reserved: Counter[str] = Counter()
        self._moved: OrderedDict[str, float] = OrderedDict()
        """By ticket, when it was heard that a request went on to another upstream."""
        self._hear: dict[type[Any], Callable[[Any], None]] = {
            events.Admitted: self._admitted,
            events.Settled: self._settled,
            events.Refused: self._refused,
            events.Left: self._left,
            events.AttemptFailed: self._attempt_failed,
            events.BreakerMoved: self._breaker_moved,
        }

    def __call__(self, event: events.Event) -> None:
        """Measure what it tells."""
        hear = self._hear.get(type(event))
        if hear is not None:
            hear(event)

    def follow(self, conventions: Conventions) -> None:
        """Go by other settings from now on."""
        self._conventions = conventions

    def _admitted(self, event: events.Admitted) -> None:
        request, waited_s = event.request, event.waited_s
        trace = self.trace(request) if waited_s >= NOTABLE_S else ""
        self.waits[request.lane, "admitted"].record(waited_s, trace)
        if event.predicted_s is not None and event.predicted_s >= SHORTEST_S:
            self.forecasts[request.lane].record(waited_s / event.predicted_s, trace)

    def _refused(self, event: events.Refused) -> None:
        self.refused[event.reason, event.lane] += 1
        if event.lane:
            self.waits[event.lane, "refused"].record(event.waited_s)
        if event.tenant:
            self.tenants.refused(event.tenant)
        if event.request is not None:
            self.sessions.refused((event.tenant, event.request.session.id))

    def _left(self, event: events.Left) -> None:
        self.waits[event.request.lane, "left"].record(event.waited_s)

    def _attempt_failed(self, event: events.AttemptFailed) -> None:
        self.attempts[event.upstream, event.outcome] += 1
        if event.following:
            self.failovers[event.upstream, event.following] += 1
            self._moved[event.ticket] = self._clock()
            if len(self._moved) > MOST_MOVED:
                self._moved.popitem(last=False)

    def _breaker_moved(self, event: events.BreakerMoved) -> None:
        self.moves[event.upstream, event.after, event.sign] += 1

    def _settled(self, event: events.Settled) -> None:
        request, answered = event.request, event.answered
        trace, began_s = self.trace(request), self._began_s(event)
        outcome = _given_up(event) or ("answered" if answered else "failed")
        if event.duration_s is not None:
            self.durations[request.lane, outcome].record(event.duration_s, trace)
        if request.stream and answered and event.first_token_s is not None:
            first_s = began_s + event.first_token_s
            self.first_tokens[request.lane].record(min(first_s, event.duration_s or first_s), trace)
        tokens = _tokens(event)
        self.tenants.used(request.tenant, tokens, event.cost_usd or 0.0)
        self.sessions.used((request.tenant, request.session.id), tokens, event.cost_usd or 0.0)
        if event.asked in self._conventions.upstreams:
            took_s = None if event.duration_s is None else max(0.0, event.duration_s - began_s)
            self._at_upstream(event, took_s, trace, well=answered and not event.given_up)

    def _began_s(self, event: events.Settled) -> float:
        """Seconds from its arrival until the upstream was asked that was the last, as far as that was heard."""
        went_on = self._moved.pop(event.request.ticket, None) if self._moved else None
        return event.waited_s if went_on is None else max(event.waited_s, went_on - event.request.arrived)

    def _at_upstream(self, event: events.Settled, took_s: float | None, trace: str, *, well: bool) -> None:
        request, upstream, usage = event.request, event.asked, event.usage
        key = (upstream, request.model, OPERATIONS.get(request.endpoint, OTHER))
        served = self.served.get(key) or self._served(key, request.endpoint)
        if took_s is not None:
            served.durations["" if well else _error(event)].record(took_s, trace)
        first_s = event.first_token_s if well and request.stream else None
        if first_s is not None:
            served.first.record(first_s, trace)
        if usage is None:
            return
        if usage.input is not None:
            served.input.record(usage.input, trace)
        if usage.output is not None:
            served.output.record(usage.output, trace)
            if first_s is not None and took_s is not None and usage.output > 1:
                served.each.record(max(0.0, took_s - first_s) / (usage.output - 1), trace)
        self._compare(request, upstream, usage, served.attributes["gen_ai.request.model"], trace)

    def _compare(self, request: Request, upstream: str, usage: Usage, model: str, trace: str) -> None:
        """What was reserved with what was used."""
        size = request.size_at(upstream)
        if usage.input and size.input:
            self.estimates[model].record(size.input / usage.input, trace)
        if usage.input is not None and usage.output is not None and size.total:
            self.reserved[upstream] += size.total
            self.reservations[request.lane].record((usage.input + usage.output) / size.total, trace)

    def _served(self, key: tuple[str, str, str], endpoint: Endpoint) -> Served:
        """Under the name of the model that is told: callers may name any number of others."""
        upstream, model, operation = key
        key = (upstream, self._conventions.model(model), operation)
        if (served := self.served.get(key)) is None:
            served = self.served[key] = Served(self._conventions.attributes(upstream, key[1], endpoint))
        return served


def _tokens(event: events.Settled) -> int:
    """What was used: as reported, else as estimated where there was an answer, or may have been."""
    usage = event.usage
    if usage is not None:
        return usage.total
    return event.request.size_at(event.upstream).total if event.upstream or event.lost else 0


def _given_up(event: events.Settled) -> str:
    """By whom it was not waited for to its end, as an outcome; empty where it was."""
    return str(Reason.EVICTED) if event.evicted else "client_gone" if event.client_gone else ""


def _error(event: events.Settled) -> str:
    """Why it did not go well, in the conventions' words where they have some."""
    if event.given_up:
        return str(Reason.EVICTED) if event.evicted else "canceled"
    return str(event.status) if event.status else "_OTHER"
