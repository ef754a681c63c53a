"""What came of one simulation, in figures. Pure: stories, books and counts in, plain values out.

A job is within its lane's SLO when its answer arrived whole and its first token came in time, counted from the first
try and with every pause and retry in between. Goodput is those answers alone. An answer that is not streamed counts by
when its first token was generated, as a stream's does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from extproc.sim.callers import Fate, Story
from extproc.sim.ears import Ears, Series
from extproc.sim.figures import Quantiles, quantiles
from extproc.sim.policies import PolicyName
from extproc.sim.work import Books

__all__ = ["Forecasts", "LaneOutcome", "Outcome", "Promises", "Seen", "Span", "outcome_of"]

BINS = 60


@dataclass(frozen=True, slots=True)
class LaneOutcome:
    """One lane, or all of them. in_slo: answers in time; tokens: of answers, good: of those in time.

    shed, expired, failed: by word. first_token_s: of answers. silence_s: longest that somebody waited and nobody went.
    """

    offered: int
    served: int
    in_slo: int
    shed: Mapping[str, int]
    expired: Mapping[str, int]
    failed: Mapping[str, int]
    gone: int
    waiting: int
    tries: int
    tokens: int
    good: int
    slo_s: float | None
    first_token_s: Quantiles
    silence_s: float = 0.0

    @property
    def attainment(self) -> float:
        """Share of all that was offered that was answered in time; 1 when nothing was."""
        return self.in_slo / self.offered if self.offered else 1.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What one upstream saw; tokens as it counts them. allowed: most tokens that its limit allows in any minute."""

    begun: int
    served: int
    served_tokens: int
    refused: Mapping[int, int]
    over: int
    charged: float
    busiest_minute: float
    allowed: float | None
    wasted: float
    preempted: int
    copies: int
    doubled: int
    most_running: int


@dataclass(frozen=True, slots=True)
class Promises:
    """Retries that came when they were told to: how many, and how many were let go then."""

    told: int
    kept: int

    @property
    def share(self) -> float | None:
        """Share that was kept; None when nothing was promised."""
        return self.kept / self.told if self.told else None


@dataclass(frozen=True, slots=True)
class Forecasts:
    """Forecast against real wait of those who queued and were let go, in seconds. off_s: how far off, either way.

    bias_s: mean of forecast less wait. waited_s: the waits themselves. vain: how many queued and were refused.
    """

    count: int
    off_s: Quantiles
    bias_s: float
    waited_s: Quantiles
    vain: int


@dataclass(frozen=True, slots=True)
class Span:
    """Jobs by when they were first sent: start of each bin, and per lane how many and how many in time."""

    at_s: Sequence[float]
    offered: Mapping[str, Sequence[int]]
    in_slo: Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One policy at one load. span_s: of arrivals; lasted_s: until the last client had its end.

    requests: tries of all jobs. refusals: by reason, of requests. probes: canaries by upstream and how they
    ended. broken: invariants that do not hold, a line each.
    """

    policy: PolicyName
    load: float | None
    span_s: float
    lasted_s: float
    requests: int
    lanes: Mapping[str, LaneOutcome]
    all: LaneOutcome
    upstreams: Mapping[str, Seen]
    refusals: Mapping[str, int]
    promises: Promises
    promises_by_reason: Mapping[str, Promises]
    forecasts: Forecasts
    overshot: Mapping[str, int]
    breaker_moves: Sequence[str]
    broken: Sequence[str]
    span: Span
    series: Series
    parts: Mapping[str, LaneOutcome] = field(default_factory=dict)
    probes: Mapping[str, int] = field(default_factory=dict)

    @property
    def goodput(self) -> float:
        """Answers in time, per second of arrivals."""
        return self.all.in_slo / self.span_s

    @property
    def good_tokens_per_s(self) -> float:
        """Tokens of answers in time, per second of arrivals."""
        return self.all.good / self.span_s

    @property
    def wasted(self) -> float:
        """Tokens that upstreams spent for nobody."""
        return sum(seen.wasted for seen in self.upstreams.values())

    @property
    def over(self) -> int:
        """Tokens of requests that providers refused as above their limits."""
        return sum(seen.over for seen in self.upstreams.values())

    @property
    def preempted(self) -> int:
        """Requests that engines threw out."""
        return sum(seen.preempted for seen in self.upstreams.values())

    @property
    def doubled(self) -> int:
        """Works that began while another of the same job ran."""
        return sum(seen.doubled for seen in self.upstreams.values())


def outcome_of(
    policy: PolicyName,
    load: float | None,
    stories: Sequence[Story],
    books: Mapping[str, tuple[Books, float | None]],
    ears: Ears,
    series: Series,
    *,
    slo_s: Mapping[str, float],
    silence_s: Mapping[str, float],
    lasted_s: float,
    broken: Sequence[str],
) -> Outcome:
    """Compute all figures. `books`: of each upstream, and what its limit allows within a minute."""
    span_s = max(1.0, max((story.job.at_s for story in stories), default=0.0))
    told = [back for story in stories for back in story.returns]
    return Outcome(
        policy=policy,
        load=load,
        span_s=span_s,
        lasted_s=lasted_s,
        requests=sum(story.tries for story in stories),
        lanes={
            lane: _lane([s for s in stories if s.job.lane == lane], slo_s, limit, silence_s.get(lane, 0.0))
            for lane, limit in slo_s.items()
        },
        all=_lane(stories, slo_s, None, max(silence_s.values(), default=0.0)),
        upstreams={name: _seen(book, allowed) for name, (book, allowed) in books.items()},
        refusals=dict(ears.refused.most_common()),
        promises=Promises(len(told), sum(back.went for back in told)),
        promises_by_reason={
            reason: Promises(sum(b.reason == reason for b in told), sum(b.went for b in told if b.reason == reason))
            for reason in sorted({back.reason for back in told})
        },
        forecasts=_forecasts(ears),
        overshot=dict(ears.overshot),
        breaker_moves=ears.moves,
        broken=broken,
        span=_span(stories, slo_s, span_s),
        series=series,
        parts=_parts(stories, slo_s),
        probes=dict(ears.probes),
    )


def _parts(stories: Sequence[Story], slo_s: Mapping[str, float]) -> Mapping[str, LaneOutcome]:
    """Bursts apart from the trace, where there is both."""
    if len({story.job.burst for story in stories}) < 2:  # noqa: PLR2004 - both
        return {}
    keys = sorted({(story.job.lane, story.job.burst) for story in stories})
    return {
        f"{lane} {'burst' if burst else 'trace'}": _lane(
            [s for s in stories if (s.job.lane, s.job.burst) == (lane, burst)], slo_s, slo_s[lane]
        )
        for lane, burst in keys
    }


def _lane(
    stories: Sequence[Story], slo_s: Mapping[str, float], limit: float | None, silence_s: float = 0.0
) -> LaneOutcome:
    served = [story for story in stories if story.fate is Fate.SERVED]
    good = [story for story in served if _in_time(story, slo_s)]
    return LaneOutcome(
        offered=len(stories),
        served=len(served),
        in_slo=len(good),
        shed=_words(stories, Fate.SHED),
        expired=_words(stories, Fate.EXPIRED),
        failed=_words(stories, Fate.FAILED),
        gone=sum(story.fate is Fate.GONE and story.over for story in stories),
        waiting=sum(not story.over for story in stories),
        tries=sum(story.tries for story in stories),
        tokens=sum(story.job.prompt + story.job.output for story in served),
        good=sum(story.job.prompt + story.job.output for story in good),
        slo_s=limit,
        first_token_s=quantiles(story.first_s for story in served),
        silence_s=silence_s,
    )


def _in_time(story: Story, slo_s: Mapping[str, float]) -> bool:
    return story.fate is Fate.SERVED and story.first_s is not None and story.first_s <= slo_s[story.job.lane]


def _words(stories: Iterable[Story], fate: Fate) -> Mapping[str, int]:
    return dict(Counter(story.word for story in stories if story.fate is fate and story.over).most_common())


def _seen(books: Books, allowed: float | None) -> Seen:
    return Seen(
        begun=books.begun,
        served=books.served,
        served_tokens=books.served_tokens,
        refused=dict(books.refused),
        over=books.over,
        charged=books.charged,
        busiest_minute=books.busiest_minute,
        allowed=allowed,
        wasted=books.wasted,
        preempted=books.preempted,
        copies=books.copies,
        doubled=books.doubled,
        most_running=books.most_running,
    )


def _forecasts(ears: Ears) -> Forecasts:
    off = [predicted - waited for predicted, waited in ears.waits]
    return Forecasts(
        count=len(off),
        off_s=quantiles(abs(error) for error in off),
        bias_s=sum(off) / len(off) if off else 0.0,
        waited_s=quantiles(waited for _, waited in ears.waits),
        vain=len(ears.vain),
    )


def _span(stories: Sequence[Story], slo_s: Mapping[str, float], span_s: float) -> Span:
    width = span_s / BINS
    offered = {lane: [0] * BINS for lane in slo_s}
    in_slo = {lane: [0] * BINS for lane in slo_s}
    for story in stories:
        place = min(BINS - 1, int(story.job.at_s / width))
        offered[story.job.lane][place] += 1
        in_slo[story.job.lane][place] += _in_time(story, slo_s)
    return Span([index * width for index in range(BINS)], offered, in_slo)
