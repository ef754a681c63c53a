"""What an operator does by hand to a running gateway, on a real Envoy with callers: each lever, and that it returns."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from extproc.stack import Stack
from tests.e2e.conftest import books_balance, chat
from tests.e2e.doubles import CHAT, forget, running, until, waiting

STEADY: dict[str, Any] = {"failures": None, "paced": None, "errors": None, "slow": None, "malformed": None}
QUICK = {"first_token_s": 0.01, "output_tokens_per_s": 4000}
UPSTREAMS: dict[str, Any] = {
    "few": {"concurrency": 1, "fake": {"first_token_s": 0.01, "output_tokens_per_s": 40}, "breaker": STEADY},
    "main": {"concurrency": 100, "fake": QUICK, "breaker": {**STEADY, "cool_down_s": 0.5, "ramp_s": 0.5}},
    "spare": {"concurrency": 100, "fake": QUICK, "breaker": STEADY},
}
CHAINS = {"few": ["few"], "chain": ["main", "spare"], "spare": ["spare"]}
LONG = 60
"""Tokens of an answer that takes a second and a half."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A model with one place, and one with two upstreams."""
    routes = [{"models": [name], "chain": chain, "acknowledge_unowned": True} for name, chain in CHAINS.items()]
    lanes = {name: {"max_wait_s": 100, "max_requests": 6} for name in ("P0", "P1", "P2")}
    tenants = {"default": {"lanes": ["P0", "P1", "P2"], "default_lane": "P1"}}
    folder = tmp_path_factory.mktemp("levers")
    with running(folder, upstreams=UPSTREAMS, routes=routes, lanes=lanes, tenants=tenants) as stack:
        yield stack


@pytest.fixture
def hand(stack: Stack) -> Iterator[Hand]:
    """An operator, and callers; nothing is moved any more in the end."""
    with ThreadPoolExecutor(40) as pool:
        hand = Hand(stack, pool)
        yield hand
    levers = hand.levers()
    assert (levers["bypass"], levers["draining"], levers["changes"]) == (None, False, [])
    assert not any(one["paused"] for one in levers["lanes"].values())
    assert not any(one["out"] for one in levers["upstreams"].values())
    books_balance(stack, 60)


class Hand:
    """Moves levers through the API, and has callers ask."""

    def __init__(self, stack: Stack, pool: ThreadPoolExecutor) -> None:
        self.stack, self.pool = stack, pool

    def move(self, path: str, method: str = "POST", **asked: Any) -> dict[str, Any]:
        url = f"{self.stack.console}/api/v1/{path}"
        answer = httpx.request(method, url, json=asked, headers=self.stack.proof, timeout=60)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def levers(self) -> dict[str, Any]:
        return dict(self.stack.state()["levers"])

    def asks(self, model: str, tokens: int = 8, **headers: str) -> Future[httpx.Response]:
        body = chat(model=model, max_tokens=tokens)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.pool.submit(httpx.post, self.stack.url + CHAT, json=body, headers=named, timeout=120)

    def gets(self, model: str, **headers: str) -> tuple[int, str]:
        """Status, and who answered or why nobody did."""
        answer = self.asks(model, **headers).result()
        return answer.status_code, answer.headers.get("x-tidegate-reason") or answer.headers["x-tidegate-upstream"]

    def breaker(self, name: str) -> str:
        return str(self.stack.state()["breakers"][name]["state"])


def test_a_lane_is_paused_and_goes_on(hand: Hand) -> None:
    """Who is in it waits though all is free, others do not; at once when it is resumed, or when its time is over."""
    hand.move("lanes/P1/pause")
    held = [hand.asks("spare") for _ in range(3)]
    until(lambda: waiting(hand.stack) == 3, 60)
    assert hand.gets("spare", x_tidegate_priority="P0") == (200, "spare")
    assert waiting(hand.stack) == 3
    hand.move("lanes/P1/resume")
    assert [one.result().status_code for one in held] == [200] * 3
    hand.move("lanes/P1/pause", for_s=1)
    assert hand.gets("spare") == (200, "spare"), "it returned by itself"


def test_what_is_taken_out_is_asked_by_nobody(hand: Hand) -> None:
    """Neither first nor behind another; in a chain of its own nobody is left, and the end of it is told."""
    assert hand.gets("chain") == (200, "main")
    assert hand.gets("chain", x_fake_fault="503;provider=main") == (200, "spare")
    hand.move("upstreams/main/out")
    assert hand.gets("chain") == (200, "spare")
    hand.move("upstreams/main/in")
    hand.move("upstreams/spare/out", for_s=300)
    asked = hand.stack.record("spare")["requests"]
    assert hand.gets("chain") == (200, "main")
    assert hand.gets("chain", x_fake_fault="503;provider=main") == (503, "upstream_failed")
    refused = hand.asks("spare").result()
    assert (refused.status_code, refused.headers["x-tidegate-reason"]) == (503, "no_upstream")
    assert 200 < int(refused.headers["retry-after"]) < 400
    assert hand.stack.record("spare")["requests"] == asked
    hand.move("upstreams/spare/in")
    assert hand.gets("spare") == (200, "spare")


def test_a_breaker_is_tripped_comes_back_by_itself_and_is_reset(hand: Hand) -> None:
    """While it is open the next upstream serves; its canary closes it, once it is answered."""
    where = f"{hand.stack.fakes['main'].where}/admin/fault"
    httpx.post(where, json={"fault": "503"}, timeout=60).raise_for_status()
    hand.move("upstreams/main/trip")
    assert hand.gets("chain") == (200, "spare")
    httpx.delete(where, timeout=60).raise_for_status()
    until(lambda: hand.breaker("main") == "closed", 60)
    hand.move("upstreams/main/trip")
    hand.move("upstreams/main/reset")
    assert hand.breaker("main") == "closed"
    assert hand.gets("chain") == (200, "main")


def test_a_limit_is_changed_for_a_while(hand: Hand) -> None:
    """More run at once; it returns by itself, and the version of the config with it."""
    version = hand.stack.state()["config"]["version"]
    hand.move("lanes/P1/pause")
    held = [hand.asks("few", LONG) for _ in range(3)]
    until(lambda: waiting(hand.stack) == 3, 60)
    done = hand.move("changes", place="upstreams.few.concurrency", value=3, for_s=3)
    assert [one["id"] for one in done["changes"]] == [done["id"]]
    assert hand.stack.state()["config"]["version"] != version
    hand.move("lanes/P1/resume")
    assert [one.result().status_code for one in held] == [200] * 3
    assert hand.stack.record("few")["max_in_flight"] == 3
    until(lambda: not hand.levers()["changes"], 60)
    state = hand.stack.state()
    assert (state["counters"]["upstream/few/slots"]["limit"], state["config"]["version"]) == (1, version)


def test_a_bypass_lets_a_full_queue_go(hand: Hand) -> None:
    """And whoever comes, also into a lane that is paused; when it is over all of that holds again."""
    forget(hand.stack)
    hand.move("lanes/P1/pause")
    asked = [hand.asks("few", LONG) for _ in range(6)]
    until(lambda: waiting(hand.stack) == 6, 60)
    assert hand.gets("few") == (503, "lane_full")
    hand.move("bypass")
    until(lambda: waiting(hand.stack) == 0, 60)
    assert hand.gets("few") == (200, "few")
    assert [one.result().status_code for one in asked] == [200] * 6
    assert hand.stack.record("few")["max_in_flight"] >= 6
    hand.move("bypass", "DELETE")
    late = hand.asks("few")
    until(lambda: waiting(hand.stack) == 1, 60)
    hand.move("lanes/P1/resume")
    assert late.result().status_code == 200
    log = (hand.stack.workdir / "service.log").read_text("utf-8")
    assert [line for line in log.splitlines() if '"error"' in line and '"bypass"' in line]


def test_a_drain_is_taken_back(hand: Hand) -> None:
    """Who comes is refused meanwhile; what runs goes on."""
    runs = hand.asks("few", 3 * LONG)
    until(lambda: hand.stack.state()["flying"] == 1, 60)
    hand.move("drain")
    assert hand.gets("spare") == (503, "draining")
    hand.move("undrain")
    assert hand.gets("spare") == (200, "spare")
    assert runs.result().status_code == 200
