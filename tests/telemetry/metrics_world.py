"""A service's state with something of everything, and what measured beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from extproc.console import state
from extproc.core import events
from extproc.core.breaker import Outcome, Sign, State
from extproc.core.bucket import Slots, TokenBucket
from extproc.core.budget import Budget, Period
from extproc.core.lanes import Lanes
from extproc.core.policy import KvRules, Lane, WhenBusy
from extproc.core.refusal import Reason
from extproc.core.request import Request, Session, Usage
from extproc.core.watermark import Reading, Watermark
from extproc.reloading import Told
from extproc.settings import load
from extproc.telemetry.meter import Meter
from extproc.telemetry.tally import Tally
from tests.doubles import HandClock, request

__all__ = ["HEARD", "TRACE", "meter", "streamed", "told"]

LANES = [Lane(name, rank, 10, WhenBusy.SPILL, 1, 9, 9, 9) for rank, name in enumerate(("P0", "P1"))]
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def streamed(tenant: str = "acme", session: str = "s", **more: Any) -> Request:
    """A request for a listed model that streams."""
    return replace(request(), stream=True, tenant=tenant, session=Session(session), model="gpt-5", **more)


def heard() -> list[events.Event]:
    """Something of everything that is counted or measured."""
    one = streamed()
    return [
        events.Queued(one, 1.0),
        events.Admitted(one, ("primary", "backup"), 0.7, 1.0),
        events.AttemptFailed("primary", Outcome.PACED, 429, "", one.ticket, following="backup"),
        events.Settled(one, "backup", 2, 200, Usage(100, 21), 0.7, 0.5, 3.2, cost_usd=0.25, asked="backup"),
        events.Settled(one, "", 1, 503, None, 0.0, None, 1.0, asked="primary"),
        events.Settled(one, "backup", 1, 200, None, 0.0, 0.5, 1.0, client_gone=True, asked="backup"),
        events.Refused(Reason.LANE_FULL, 503, "acme", "P1", 0.25, request=one),
        events.Refused(Reason.LANE_FULL, 503, "acme", "P1"),
        events.Refused(Reason.UNAUTHENTICATED, 401),
        events.Left(one, 1.5),
        events.Observed(one, Reason.LANE_FULL),
        events.Shadowed(one, "lane/P1/max_requests"),
        events.Retried(one, "held"),
        events.Overshot("upstream/primary/*/total", 120.0),
        events.LimitsMoved("primary", "upstream/primary/*/total", "fewer"),
        events.Probed("primary", ok=False, seconds=1.0, tokens=5, cost_usd=0.001),
        events.Scraped("local", 0.4, 2.0),
        events.BreakerMoved("primary", State.CLOSED, State.OPEN, "429", Sign.PACED),
    ]


HEARD = heard()


def meter(*trace: str, clock: HandClock | None = None) -> Meter:
    """One that heard of everything; trace: that all requests belong to, or none."""
    found = Meter(load(None, {}), (clock or HandClock()).time, "here", lambda _: trace[0] if trace else "")
    found.process.late(0.003)
    for event in HEARD:
        found(event)
    return found


def told(beside: Meter | None = None, **more: Any) -> dict[str, Any]:
    """The state of a service with one counter of each kind, as its page is made of."""
    kv = Watermark(KvRules(tokens=1000), booked=100.0, held=1)
    kv.observe(Reading(0.3, instances=2, age_s=1.5), 50.0)
    store = {
        "upstream/primary/*/total": TokenBucket(10.0, 1000.0, -5.0, 50.0, closed_until=52.0),
        "upstream/primary/slots": Slots(8.0, 3.0),
        "upstream/local/slots": Slots(float("inf"), 2.0),
        "upstream/local/kv": kv,
        "tenant/x%2Fy/usd_day": Budget(20.0, Period.DAY, used=1.25, at=50.0),
        "session/x/y/tokens": Budget(20.0, at=50.0),
    }
    tally = Tally()
    for event in HEARD:
        tally(event)
    primary = {"state": "open", "sign": "paced", "rests_s": 3.5, "failures": 1, "paced": 3, "error_share": 0.5}
    closed = {"state": "closed", "failures": 0, "paced": 0}
    return {
        **state.describe(Lanes(LANES), store, 50.0),
        "breakers": {
            "primary": primary | {"slow_share": 0.1, "sizes_kept_away": ["8192-16384"]},
            "backup": closed,
            "local": closed,
        },
        "pacing": {"upstream/primary/*/total": {"share": 0.9, "paused_s": 1.5, "limit": 600, "others_per_s": 1.0}},
        "flying": 7,
        "unsettled": 8,
        "draining": False,
        "config": Told("abc", applied=2, at=1700000000.5).state(),
        "callers": {"unlisted_tenants": 3, "sessions": 4, "forgotten_in_use": 0},
        "tally": tally.snapshot(),
        "lanes": {
            lane.name: {"max_requests": 9, "max_tokens": 900, "max_bytes": 9000, "oldest_s": 2.5 if lane.rank else None}
            for lane in LANES
        },
        "levers": {
            "bypass": {"until": None},
            "draining": False,
            "lanes": {"P0": {"paused": False, "until": None}, "P1": {"paused": True, "until": None}},
            "upstreams": {"primary": {"out": True, "until": None}},
            "changes": [{"id": "c1", "place": "tenants.chat.tpm", "value": 1, "was": 2, "until": None}],
        },
        **(beside or meter()).state(),
        **more,
    }
