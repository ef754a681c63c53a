"""State, overview and history are what the OpenAPI document says: with all fields, and with no others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from extproc.console.answers import encoded
from extproc.core.breaker import State
from extproc.telemetry.history import STEP_S, History
from tests.console.world import HOUR, OVERVIEWS, World
from tests.doubles import VirtualLoop, play
from tests.published import as_described, document, faults
from tests.telemetry.metrics_world import told
from tests.test_levers import aside
from tests.test_overview import Watched
from tests.test_reload import RAW, NoServer

FULL: dict[str, Any] = {
    **RAW,
    "upstreams": {
        "a": {"provider": "compatible", "url": "http://a", "concurrency": 1, "breaker": {"failures": 1}},
        "b": {
            "provider": "openai",
            "url": "http://b",
            "limits": [{"tpm": 60_000, "rpm": 60, "burst_s": 60}],
            "prices": {"m": {"input": 1.0, "output": 2.0}},
        },
        "c": {"provider": "vllm", "url": "http://c", "owned": True, "kv": {"tokens": 1000}},
    },
    "tenants": {"one": {"tpm": 100_000, "usd_per_day": 5.0}, "two": {"concurrency": 1, "shadow": ["concurrency"]}},
}


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.app.Server", NoServer)


def whole(bench: Watched) -> None:
    """State and history of a service."""
    as_described("ServiceState", bench.service.sight.state())
    as_described("Hour", bench.service.listeners.history.told())


@pytest.mark.parametrize("name", ["calm", "overload", "outage"])
def test_recorded_overviews(name: str) -> None:
    as_described("Overview", json.loads((OVERVIEWS / f"{name}.json").read_text()))


def test_what_other_tests_take_for_a_state_is_one() -> None:
    """And for an hour."""
    as_described("ServiceState", told())
    as_described("Hour", HOUR)
    as_described("Hour", History().told())


@pytest.mark.usefixtures("_alone")
def test_a_service_that_has_seen_something() -> None:
    """New, busy, with levers pulled, an open breaker, refusals, and all of it over again."""

    async def scenario(_: VirtualLoop) -> None:
        bench = Watched(FULL)
        bench.service.reloading._aside = aside  # virtual time knows no threads
        whole(bench)
        as_described("Overview", await bench.look())
        running = bench.send("first", stays_s=20.0)
        await asyncio.sleep(0.5)
        waiting = [bench.send(f"r{number}", stays_s=0.1) for number in range(3)]
        levers = bench.service.levers
        await levers.pause("P2", 60.0)
        await levers.take_out("b")
        await levers.trip("c")
        await levers.change("lanes.P2.max_requests", 5, 60.0)
        await asyncio.sleep(STEP_S + 1.0)
        state, overview = bench.service.sight.state(), await bench.look()
        assert state["breakers"]["c"]["state"] is State.OPEN
        assert overview["binding"]
        assert overview["notices"]
        assert overview["alerts"]
        assert {row["state"] for row in overview["recent"]} == {"running", "waiting"}
        whole(bench)
        as_described("Overview", overview)
        as_described("RequestPage", {"requests": bench.service.sight.sources().requests(limit=50)})
        as_described("Levers", levers.state())
        await levers.bypass(5.0)
        as_described("Overview", await bench.look())
        await asyncio.gather(running.task, *(one.task for one in waiting))
        await levers.drain()
        late = bench.send("late", stays_s=0.1)
        await late.task
        await asyncio.sleep(2 * STEP_S)
        overview = await bench.look()
        assert overview["refusals"]
        whole(bench)
        as_described("Overview", overview)
        await bench.stop()

    play(scenario)


def objects(data: Any) -> Iterator[dict[str, Any]]:
    """All that is somewhere in it."""
    if isinstance(data, dict):
        yield data
    for each in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from objects(each)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("ServiceState", told()),
        ("Hour", HOUR),
        *(("Overview", json.loads((OVERVIEWS / f"{name}.json").read_text())) for name in ("overload", "outage")),
    ],
)
def test_nothing_may_be_missing_or_too_much(name: str, data: Any) -> None:
    """At the top, and in whatever is inside that has fields of its own."""
    data = json.loads(encoded(data))
    for field in list(data):
        assert faults(name, {key: each for key, each in data.items() if key != field})
    assert faults(name, {**data, "more": 1})
    inside = [each for each in objects(data) if each.keys() >= {"requests", "tokens"} or "wait_p95_s" in each]
    assert inside
    for each in inside:
        each["more"] = 1
        assert faults(name, data)
        del each["more"]
        kept = each.pop("tokens" if "tokens" in each else "wait_p95_s")
        assert faults(name, data)
        each["tokens" if "requests" in each else "wait_p95_s"] = kept
        assert faults(name, data) == []


def test_the_document_says_so_of_each_address() -> None:
    """An event of the stream has an overview as its data."""
    paths = document()["paths"]

    def answer(path: str, kind: str = "application/json") -> Any:
        return paths[path]["get"]["responses"]["200"]["content"][kind]

    for path, name in (
        ("/state", "ServiceState"),
        ("/api/v1/state", "ServiceState"),
        ("/api/v1/overview", "Overview"),
        ("/api/v1/history", "Hour"),
        ("/api/v1/levers", "Levers"),
    ):
        assert answer(path)["schema"] == {"$ref": f"#/components/schemas/{name}"}
    event = answer("/api/v1/stream", "text/event-stream")["itemSchema"]
    assert event["properties"]["data"]["contentSchema"] == {"$ref": "#/components/schemas/Overview"}


def test_no_shape_shadows_another() -> None:
    """Each has the name that it has in the code: where two had the same, both would be renamed."""
    names = document()["components"]["schemas"]
    assert not [name for name in names if "__" in name]
    for name, schema in names.items():
        assert schema.get("type") != "object" or schema["additionalProperties"] is False, name


async def test_what_a_console_of_tests_tells_is_real() -> None:
    """So that whoever looks at it sees what a service would tell."""
    as_described("Overview", await World().overview())
