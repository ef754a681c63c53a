"""The stage of an overload, what the other side says, and the page that is printed."""

import io
import json

import pytest
from rich.console import Console

from extproc.settings import SettingsError
from extproc.sim.figures import End, Result
from extproc.sim.gauges import buckets, filling, held
from extproc.sim.plan import Planned
from extproc.sim.report import Sides, made, shown
from extproc.sim.scene import PORTS, Scene, settings_of, told

REST = {
    "waiting": {"P0": {"requests": 0}},
    "counters": {
        "upstream/primary/*/total": {"level": 499.5, "capacity": 500.0, "per_second": 50.0},
        "upstream/primary/*/requests": {"level": 10.0, "capacity": 10.0, "per_second": 1.0},
        "upstream/local/slots": {"used": 0.0, "limit": 4},
        "tenant/chat/total": {"level": 7.0, "capacity": 7.0, "per_second": 1.0},
    },
    "flying": 0,
    "unsettled": 0,
    "tally": {"overshot": {"upstream/primary/*/total": 5}, "failed_attempts": {"primary": 2}},
}
BUSY = {
    **REST,
    "waiting": {"P0": {"requests": 3}},
    "counters": {
        "upstream/primary/*/total": {"level": -1200.0, "capacity": 500.0, "per_second": 50.0},
        "upstream/local/slots": {"used": 2.0, "limit": 4},
    },
    "flying": 1,
}
RECORD = {
    "served": 2,
    "refused_429": 0,
    "max_in_flight": 2,
    "charged_tokens": 6000,
    "busiest_minute_tokens": 6000,
}


def report(*, late=0.001, busiest=6000, after=REST, interrupted=False):
    requests = [Planned(i, 0.0, 10, 5, lane, None, stream=True) for i, lane in enumerate(("P1", "P0", "P0"))]
    results = [
        Result(0, "P1", End.SHED, lag_s=late, word="lane_full", status=503),
        Result(1, "P0", End.SERVED, lag_s=late, status=200, upstream="primary", waited_s=0.5, first_token_s=0.75),
    ]
    record = {**RECORD, "busiest_minute_tokens": busiest}
    tally = {"tally": {"overshot": {"upstream/primary/*/total": 5}, "failed_attempts": {"primary": 1}}}
    sides = Sides(
        tally, after, 1.5, {"primary": {"tpm": 3000, "burst_s": 60.0}}, {"primary": RECORD}, {"primary": record}
    )
    return made(
        requests, results, ["assumed this"], sides, seconds=60.0, lasted_s=61.0, cpu_share=0.1, interrupted=interrupted
    )


def page(found):
    output = io.StringIO()
    shown(found, Console(file=output, width=170))
    return output.getvalue()


def test_the_figures_add_up():
    """By lane and in all; growth of the tallies, not their level."""
    found = report()
    assert list(found.lanes) == ["P0", "P1"]
    assert (found.all.offered, found.all.served, found.all.unanswered) == (3, 1, 1)
    assert found.failed_attempts == {"primary": 1}
    assert found.overshot == {}
    primary = found.providers["primary"]
    assert (primary.tokens_per_s, primary.gateway_per_s, primary.provider_per_s, primary.allowed) == (100, 50, 50, 6000)


def test_everything_is_there_as_json():
    """Plain data, nothing that only Python reads."""
    data = json.loads(json.dumps(report().data()))
    assert data["lanes"]["P1"]["shed"] == {"lane_full": 1}
    assert data["lanes"]["P0"]["first_token_s"]["p99"] == 0.75


def test_the_page_says_what_holds():
    """Assumptions first, then figures, then what must hold."""
    text = page(report())
    assert text.startswith("- assumed this")
    assert "lane_full 1" in text
    assert "given back: every slot; every bucket full again, 1.5 s after the last answer" in text
    assert "above a provider's limit: never; refused by providers: 0" in text
    assert "warning" not in text


def test_the_page_says_what_does_not_hold():
    """A late load generator, a limit that was passed, something kept."""
    text = page(report(late=0.08, busiest=6001, after=BUSY, interrupted=True))
    assert "warning: the load generator was late: 80.0 ms at p99" in text
    assert "warning: stopped early" in text
    assert "above a provider's limit: primary" in text
    assert "given back: NO, still held: P0 3 waiting, flying 1, " in text
    assert "not full yet: upstream/primary/*/total -1,200 of 500" in text


def test_a_gateway_that_shows_nothing_is_reported_as_such():
    """No state page, no records: only what callers met with."""
    found = made([], [], [], Sides(), seconds=1.0, lasted_s=1.0, cpu_share=0.0, interrupted=False)
    assert found.held is None
    assert "given back: not known" in page(found)


def test_what_is_held_is_named():
    """A bucket may be a token short: levels are rounded."""
    assert held(REST) == filling(REST) == []
    assert held(BUSY) == ["P0 3 waiting", "flying 1", "upstream/local/slots 2 used"]
    assert filling(BUSY) == ["upstream/primary/*/total -1,200 of 500"]
    assert list(buckets(REST)) == ["primary"]


def test_the_stage_is_too_small_by_its_factor():
    """Gateway and provider are told the same limit; the gateway keeps below it, in rate and in burst."""
    settings = settings_of(Scene(2.0), 1000.0, "gpt-5", ("chat",), list(range(20000, 20000 + PORTS)))
    primary = settings.upstreams["primary"]
    assert primary.limits[0].tpm == 30_000
    (limit,) = settings.policy().upstreams["primary"].limits
    assert (limit.per_minute, limit.capacity) == pytest.approx((28_500, 4750))
    assert primary.fake.burst_s == primary.limits[0].burst_s
    assert settings.upstreams["local"].concurrency == 4
    assert "chat" in settings.policy().tenants
    lines = list(told(Scene(2.0), settings, 1000.0))
    assert any("the provider allows 500 tokens/s and 10 s of burst" in line for line in lines)


def test_the_chain_of_the_stage_is_chosen():
    """Any order of the three; ports differ; nothing else is accepted."""
    scene = Scene(4.0, chain=("backup", "primary"), backup_share=0.5)
    settings = settings_of(scene, 1000.0, "gpt-5", (), list(range(20000, 20000 + PORTS)))
    assert settings.routes[0].chain == ("backup", "primary")
    assert settings.upstreams["backup"].limits[0].tpm == 7500
    assert len({upstream.port for upstream in settings.upstreams.values()}) == 2
    for chain in (("primary", "cloud"), ("primary", "primary")):
        with pytest.raises(SettingsError, match="chain"):
            settings_of(Scene(2.0, chain=chain), 1000.0, "gpt-5", (), list(range(20000, 20000 + PORTS)))
    with pytest.raises(SettingsError, match=r"private stack: .*pattern"):
        settings_of(Scene(), 1000.0, "gpt-5", ("no name",), list(range(20000, 20000 + PORTS)))
