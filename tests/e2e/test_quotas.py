"""Quotas on a real Envoy: loops that are stopped and let go on, dollars, tenants that nobody listed.

Prices are a cent a token in and two cents a token out, so that a call's cost can be told from its usage.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from extproc import dialects, tokens
from extproc.core.request import Endpoint
from extproc.stack import Stack
from tests.e2e.conftest import books_balance, chat
from tests.e2e.doubles import CHAT, MESSAGES, NEVER_OPENS, crowd, forget, running, until


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    """No connection outlives this file."""
    yield
    HTTP.close()


HTTP = httpx.Client(timeout=30)
IN, OUT = 0.01, 0.02
PRICES = {"*": {"input": IN * 1e6, "output": OUT * 1e6}}
CAP = 16
LOOP = 100
"""A loop that nobody stops would call so many times."""
SLOW = {"x-fake-fault": "slow-first-token;s=3"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Upstreams that are paid, some with a limit of their own, one that is free, and tenants with a limit each."""
    wide = {"limits": [{"tpm": 60_000_000, "rpm": 600_000}], "breaker": NEVER_OPENS}
    dollars = {"usd_per_hour": 5.0}
    with running(
        tmp_path_factory.mktemp("quotas"),
        upstreams={
            "main": {**wide, "prices": PRICES},
            "capped": {**wide, "prices": PRICES, "usd_per_day": 3.0},
            "tight": {**wide, "prices": PRICES, "usd_per_month": 1.0},
            "free": {**wide, "owned": True, "prices": {"*": {"input": 0, "output": 0}}},
        },
        routes=[
            {"models": ["gratis"], "chain": ["free"]},
            {"models": ["metered"], "chain": ["main"], "acknowledge_unowned": True, "usd_per_day": 5.0},
            {"models": ["steered"], "chain": ["capped", "main", "free"]},
            {"models": ["tight"], "chain": ["tight", "main"], "acknowledge_unowned": True},
            {"models": ["*"], "chain": ["main"], "acknowledge_unowned": True},
        ],
        identity={"tenant": "header:x-team"},
        tenants={
            "default": {},
            "agents": {"sessions": {"max_tokens": 400}},
            "others": {"sessions": {"max_tokens": 400}},
            "thrifty": {"sessions": {"max_usd": 4.0}},
            "crowd": {"sessions": {"max_tokens": 10 * _size()}},
            "spender": dollars,
            "saver": dollars,
            "daily": {"usd_per_day": 5.0},
            "monthly": {"usd_per_month": 5.0},
            "counted": {"usd_per_day": 1000.0},
            "watched": {"usd_per_hour": 0.01, "rpm": 1, "shadow": ["usd_per_hour", "rpm"]},
            "*": {"concurrency": 2, "usd_per_hour": 5.0},
        },
        tokens={"calibrate": False},
        internal_headers=True,
    ) as one:
        yield one


def _size(body: dict[str, Any] | None = None) -> int:
    """Tokens that are reserved for a small chat request."""
    document = dialects.read(Endpoint.CHAT, json.dumps(body or chat()).encode())
    return tokens.estimate(document.call.prompt, "gpt-5") + CAP


class Caller:
    """A client of one tenant; `session` is that of its calls, in the header that agents may set."""

    def __init__(self, stack: Stack, team: str, session: str = "") -> None:
        self._stack = stack
        self._headers = {"x-team": team} | ({"x-tidegate-session": session} if session else {})

    def openai(self, model: str = "gpt-5") -> Any:
        """One call of the OpenAI SDK with its usual retries."""
        with openai.OpenAI(base_url=f"{self._stack.url}/v1", api_key="sk", default_headers=self._headers) as client:
            return client.chat.completions.create(**chat(model=model))

    def anthropic(self) -> Any:
        """One call of the Anthropic SDK with its usual retries."""
        question = {"model": "claude", "max_tokens": CAP, "messages": [{"role": "user", "content": "hello"}]}
        with anthropic.Anthropic(base_url=self._stack.url, api_key="sk", default_headers=self._headers) as client:
            return client.messages.create(**question)

    def http(self, path: str = CHAT, **body: Any) -> httpx.Response:
        """One call without an SDK."""
        return HTTP.post(self._stack.url + path, json=chat(**body), headers=self._headers)


def run_away(stack: Stack, call: Callable[[], Any]) -> tuple[int, Any]:
    """A loop that goes on until it is stopped: how often it called, and the error that stopped it."""
    for calls in range(LOOP):
        try:
            call()
        except (openai.APIStatusError, anthropic.APIStatusError) as error:
            return calls, error
        books_balance(stack)
    raise AssertionError("nobody stopped it")


def refusals(stack: Stack, reason: str) -> int:
    return int(stack.state()["tally"]["refused"].get(reason, 0))


def asked(stack: Stack, name: str = "main") -> int:
    """How many requests an upstream got."""
    return len(stack.record(name)["requests"])


# Sessions.


@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
def test_a_runaway_loop_is_stopped_and_can_be_let_go_on(stack: Stack, sdk: str) -> None:
    """With a body that says why, in the caller's dialect, and that its SDK does not retry. Once its budget is raised,
    by the console or from the command line, it goes on at once. Nobody else notices.
    """
    forget(stack)
    caller = Caller(stack, "agents", f"task/{sdk}")
    call = getattr(caller, sdk)
    before = refusals(stack, "session_budget")
    calls, error = run_away(stack, call)
    assert calls >= 2
    assert error.status_code == 403
    assert isinstance(error, openai.PermissionDeniedError | anthropic.PermissionDeniedError)
    body = error.body if sdk == "openai" else error.body["error"]
    assert body["reason"] == "session_budget"
    if sdk == "openai":
        assert body["code"] == "BUDGET_EXHAUSTED"
    assert error.response.headers["x-should-retry"] == "false"
    assert "retry-after" not in error.response.headers
    assert refusals(stack, "session_budget") == before + 1, "the SDK has retried"
    assert asked(stack) == calls

    getattr(Caller(stack, "agents", "another"), sdk)()
    getattr(Caller(stack, "others", f"task/{sdk}"), sdk)()

    known = _session(stack, "agents", f"task%2F{sdk}").json()
    assert known["tokens"]["limit"] == 400
    assert 0 <= known["tokens"]["left"] < 400 / 2
    raised = HTTP.post(_at(stack, "agents", f"task%2F{sdk}"), json={"add_tokens": 100}, headers=stack.proof).json()
    assert raised["tokens"] == {"limit": 500, "used": known["tokens"]["used"], "left": known["tokens"]["left"] + 100}
    more, _ = run_away(stack, call)
    assert more >= 1
    told = _command(stack, "agents", f"task/{sdk}", "--add-tokens", "150")
    assert told.returncode == 0, told.stderr
    assert "of 650 used" in told.stdout
    assert run_away(stack, call)[0] >= 1


def _at(stack: Stack, tenant: str, session: str) -> str:
    return f"http://{stack.settings.service.console}/sessions/{tenant}/{session}"


def _session(stack: Stack, tenant: str, session: str) -> httpx.Response:
    return HTTP.get(_at(stack, tenant, session))


def _command(stack: Stack, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`tidegate session ...` as an operator types it."""
    config = str(stack.workdir / "tidegate.yaml")
    command = [sys.executable, "-m", "extproc", "session", *arguments, "--config", config]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_session_is_stopped_by_dollars(stack: Stack) -> None:
    """What it costs, not how many tokens it takes; a model that is free goes on."""
    caller = Caller(stack, "thrifty", "s")
    calls, error = run_away(stack, caller.openai)
    assert error.status_code == 403
    assert error.body["reason"] == "session_budget"
    known = _session(stack, "thrifty", "s").json()
    assert known["tokens"] is None
    assert known["usd"]["used"] <= 4.0
    assert calls >= 2
    assert caller.http(model="gratis").status_code == 200
    told = _command(stack, "thrifty", "s", "--add-usd", "1.5")
    assert "of 5.500000 used" in told.stdout
    assert run_away(stack, caller.openai)[0] >= 1


def test_an_unknown_session_and_a_missing_service_are_told(stack: Stack) -> None:
    """From the console and from the command line."""
    assert _session(stack, "agents", "never-heard-of").status_code == 404
    told = _command(stack, "agents", "never-heard-of")
    assert (told.returncode, told.stdout) == (1, "")
    assert "no such session" in told.stderr
    form = HTTP.post(_at(stack, "agents", "x"), data={"add_tokens": "5"}, headers=stack.proof)
    assert form.status_code == 415


def test_a_hundred_calls_of_one_session_at_once_do_not_overshoot_together(stack: Stack) -> None:
    """With a budget of ten calls ten are let through; what the others would have used was never there."""
    forget(stack)

    async def scenario() -> Counter[str]:
        async with crowd(stack) as clients:
            calls = [clients.ask(chat(), x_team="crowd", x_tidegate_session="s", **_slow()) for _ in range(100)]
            return Counter(each.reason or str(each.status) for each in await asyncio.gather(*calls))

    assert asyncio.run(scenario()) == {"200": 10, "session_budget": 90}
    assert asked(stack) == 10
    books_balance(stack)
    known = _session(stack, "crowd", "s").json()
    assert known["tokens"]["used"] <= known["tokens"]["limit"]
    assert known["running"] == 0


def _slow() -> dict[str, str]:
    return {name.replace("-", "_"): value for name, value in SLOW.items()}


# Dollars.


@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
def test_dollars_per_hour_stop_one_tenant_and_not_another(stack: Stack, sdk: str) -> None:
    """A hard stop, not to be retried; what is free still goes, and so does everybody else."""
    before = refusals(stack, "spend_budget")
    spender = Caller(stack, "spender")
    calls, error = run_away(stack, getattr(spender, sdk))
    assert error.status_code == 403
    assert (error.body if sdk == "openai" else error.body["error"])["reason"] == "spend_budget"
    assert error.response.headers["x-should-retry"] == "false"
    assert refusals(stack, "spend_budget") == before + 1, "the SDK has retried"
    assert calls <= 5.0 / (CAP * OUT)
    getattr(Caller(stack, "saver"), sdk)()
    assert spender.http(model="gratis").status_code == 200
    budget = stack.state()["counters"]["tenant/spender/usd_hour"]
    assert budget["spent"] <= 5.0
    assert 0 < budget["ends_in_s"] <= 3600


def test_what_was_paid_is_what_was_used(stack: Stack) -> None:
    """To the cent, streamed or not, in both dialects; free models and refused requests cost nothing."""
    caller, expected = Caller(stack, "counted"), 0.0
    for body in ({}, {"max_tokens": 5}, {"stream": True, "stream_options": {"include_usage": True}}):
        expected += _cost(caller.http(**body))
    expected += _cost(caller.http(MESSAGES, model="claude"))
    assert caller.http(model="gratis").status_code == 200
    assert caller.http(max_tokens="many").status_code == 400
    assert HTTP.post(
        stack.url + CHAT, json=chat(), headers={"x-team": "counted", "x-fake-fault": "status=500"}
    ).is_error
    books_balance(stack)
    assert stack.state()["counters"]["tenant/counted/usd_day"]["spent"] == pytest.approx(expected, abs=1e-6)


def _cost(response: httpx.Response) -> float:
    """What an answer costs by the usage in it."""
    assert response.status_code == 200, response.text
    if response.text.startswith("data:"):
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        usage = json.loads(events[-1])["usage"]
    else:
        usage = response.json()["usage"]
    sent = usage.get("prompt_tokens", usage.get("input_tokens"))
    made = usage.get("completion_tokens", usage.get("output_tokens"))
    return float(sent * IN + made * OUT)


def test_a_loop_is_stopped_by_what_its_tenant_may_spend_in_a_month(stack: Stack) -> None:
    """The same hard stop as of an hour or a day; other tenants go on."""
    calls, error = run_away(stack, Caller(stack, "monthly").openai)
    assert (calls >= 2, error.status_code, error.body["reason"]) == (True, 403, "spend_budget")
    assert "month" in error.body["message"]
    assert 5.0 - 2 * _estimate() < _spent(stack, "tenant/monthly/usd_month")["tenant/monthly/usd_month"] <= 5.0
    assert Caller(stack, "saver").http().status_code == 200


def test_a_loop_is_stopped_by_what_its_chain_may_cost(stack: Stack) -> None:
    """Whoever calls: nobody's own limit is reached. Other models of the same upstream go on."""
    calls, error = run_away(stack, lambda: Caller(stack, "default").openai("metered"))
    assert (calls >= 2, error.status_code, error.body["reason"]) == (True, 403, "spend_budget")
    assert error.response.headers["x-should-retry"] == "false"
    refused = Caller(stack, "counted").http(model="metered")
    assert (refused.status_code, refused.headers["x-tidegate-reason"]) == (403, "spend_budget")
    assert Caller(stack, "default").http().status_code == 200
    assert 5.0 - 2 * _estimate() < _spent(stack, "route/metered/usd_day")["route/metered/usd_day"] <= 5.0


def test_what_an_upstream_may_cost_steers_a_loop_to_what_is_owned(stack: Stack) -> None:
    """Nobody is refused, and the cost does not move to the next paid one. An attempt that failed is not paid for."""
    failing = {"x-team": "default", "x-fake-fault": "503;provider=capped"}
    answer = HTTP.post(stack.url + CHAT, json=chat(model="steered"), headers=failing)
    assert (answer.status_code, answer.headers["x-tidegate-upstream"]) == (200, "main")
    books_balance(stack)
    assert _spent(stack, "upstream/capped/usd_day") == {"upstream/capped/usd_day": 0}
    forget(stack)
    answers = []
    for _ in range(20):
        answers.append(Caller(stack, "default").http(model="steered"))
        books_balance(stack)
    assert [each.status_code for each in answers] == [200] * 20
    paid = [each for each in answers if each.headers["x-tidegate-upstream"] == "capped"]
    assert [each.headers["x-tidegate-upstream"] for each in answers] == ["capped"] * len(paid) + ["free"] * (
        20 - len(paid)
    )
    assert len(paid) >= 2
    assert (asked(stack, "capped"), asked(stack, "main"), asked(stack, "free")) == (len(paid), 0, 20 - len(paid))
    spent = _spent(stack, "upstream/capped/usd_day")["upstream/capped/usd_day"]
    assert spent == pytest.approx(sum(map(_cost, paid)), abs=1e-6)
    assert 3.0 - _estimate() < spent <= 3.0
    until(lambda: "upstream/capped/usd_day" in [alert.get("key") for alert in stack.state()["tally"]["alerts"]])


def test_where_nothing_is_free_an_upstreams_spent_dollars_stop_a_loop(stack: Stack) -> None:
    """Its chain goes on with another that is paid, which is not asked."""
    calls, error = run_away(stack, lambda: Caller(stack, "default").openai("tight"))
    assert (calls >= 1, error.status_code, error.body["reason"]) == (True, 403, "spend_budget")
    assert error.response.headers["x-should-retry"] == "false"


def _estimate() -> float:
    """What a small request is reserved for, in dollars."""
    return (_size() - CAP) * IN + CAP * OUT


def test_a_client_that_leaves_pays_for_what_it_saw(stack: Stack) -> None:
    """Its input and the output that was on its way, not all that it had asked for."""
    before = stack.state()["counters"]["tenant/counted/usd_day"]["spent"]
    body, headers = chat(stream=True, max_tokens=4000), {"x-team": "counted"}
    with HTTP.stream("POST", stack.url + CHAT, json=body, headers=headers) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                break
    books_balance(stack)
    spent = stack.state()["counters"]["tenant/counted/usd_day"]["spent"] - before
    assert _size() * IN - CAP * IN <= spent + 1e-6
    assert spent < 4000 * OUT / 2


def test_what_was_spent_outlives_a_restart(stack: Stack) -> None:
    """Ended in good order or killed: a budget of a day is not whole again because a process is new."""
    caller = Caller(stack, "daily")
    calls, _ = run_away(stack, caller.openai)
    assert calls >= 1
    assert Caller(stack, "default").http(model="steered").status_code == 200
    books_balance(stack)
    assert _spent(stack, "upstream/capped/usd_day")["upstream/capped/usd_day"] > 0
    for kill in (False, True):
        spent = _spent(stack, "tenant/daily/usd_day", "route/metered/usd_day", "upstream/capped/usd_day")
        written = time.time()
        until(lambda written=written: _levels_at(stack) > written + 0.1)
        if kill:
            stack.kill("service")
        else:
            stack.processes["service"].terminate()
            stack.processes["service"].wait(20)
        stack.start_service()
        assert _spent(stack, *spent) == pytest.approx(spent, abs=1e-6)
        until(lambda: HTTP.get(f"{stack.url}/v1/models").status_code == 200)
        assert caller.http().headers["x-tidegate-reason"] == "spend_budget"


def _spent(stack: Stack, *budgets: str) -> dict[str, float]:
    """What the state page tells of some budgets."""
    counters = stack.state()["counters"]
    return {key: counters[key]["spent"] for key in budgets}


def _levels_at(stack: Stack) -> float:
    """When the levels were last written."""
    path = stack.settings.service.state_file
    assert path is not None
    return float(json.loads(Path(path).read_text("utf-8"))["at"])


def test_a_limit_in_shadow_mode_counts_and_stops_nobody(stack: Stack) -> None:
    """What it would have stopped is in the state."""
    caller = Caller(stack, "watched")
    assert [caller.http().status_code for _ in range(3)] == [200] * 3
    told = stack.state()["tally"]["shadowed"]
    assert told["tenant/watched/usd_hour"] == 3
    assert told["tenant/watched/requests"] == 2


# Tokens that are left.


def test_the_last_tokens_of_an_upstream_are_for_the_best_lane(tmp_path_factory: pytest.TempPathFactory) -> None:
    """From 85 % used on one lane spills and another holds, while the best goes on; it lets go when it has refilled."""
    with running(
        tmp_path_factory.mktemp("burn"),
        upstreams={
            "main": {
                "limits": [{"tpm": 30_000, "rpm": 600_000, "burst_s": 20}],
                "headroom": 0,
                "accounting": "upfront",
            },
            "local": {"owned": True, "concurrency": 100},
        },
        lanes={
            "P0": {"max_wait_s": 20},
            "P1": {"max_wait_s": 20, "spill_after_s": 0},
            "P2": {"max_wait_s": 20, "when_busy": "hold"},
        },
        tokens={"calibrate": False},
    ) as stack:

        def served(lane: str) -> str:
            response = HTTP.post(stack.url + CHAT, json=chat(max_tokens=1000), headers={"x-tidegate-priority": lane})
            assert response.status_code == 200, response.text
            return str(response.headers["x-tidegate-upstream"])

        went = [served("P1")]
        while went[-1] == "main":
            assert len(went) < 100, "it never spilled"
            went.append(served("P1"))
        assert len(went) > 7, "what is not reserved is for everybody"
        assert stack.state()["counters"]["upstream/main/*/total"]["level"] > 1000 + CAP
        with ThreadPoolExecutor(1) as pool:
            holding = pool.submit(served, "P2")
            assert served("P0") == "main"
            assert holding.result() == "main"
        assert served("P0") == "main"


# Tenants that nobody listed.


def test_tenants_that_nobody_listed_do_not_notice_one_another(stack: Stack) -> None:
    """One that spends its dollars is stopped, one that floods waits for itself; the others go on as if alone."""
    calls, error = run_away(stack, Caller(stack, "org/spendthrift").openai)
    assert calls >= 2
    assert error.body["reason"] == "spend_budget"
    assert Caller(stack, "org/other").http().status_code == 200
    assert Caller(stack, "org").http().status_code == 200

    async def scenario() -> tuple[Counter[str], list[int]]:
        async with crowd(stack) as clients:
            flood = [clients.ask(chat(), x_team="flood", **_slow()) for _ in range(40)]
            quiet = [clients.ask(chat(), x_team=f"quiet-{i}") for i in range(20)]
            answers = await asyncio.gather(*flood, *quiet)
            reasons = Counter(each.reason or str(each.status) for each in answers[:40])
            return reasons, [each.status for each in answers[40:]]

    reasons, quiet = asyncio.run(scenario())
    assert reasons == {"200": 2, "tenant_concurrency": 38}
    assert quiet == [200] * 20
    assert stack.state()["callers"]["unlisted_tenants"] >= 23


@pytest.mark.parametrize(
    "name", ["", "*", "a" * 129, "tab\tbed", "spender/usd_hour", "%2F", "租户".encode().decode("latin-1")]
)
def test_a_hostile_name_takes_nobody_elses_allowance(stack: Stack, name: str) -> None:
    """It is a tenant of its own or the default; no listed tenant pays for it."""
    before = {key: value for key, value in stack.state()["counters"].items() if key.startswith("tenant/s")}
    response = HTTP.post(stack.url + CHAT, json=chat(), headers={"x-team": name.encode("latin-1")})
    assert response.status_code == 200
    books_balance(stack)
    after = stack.state()["counters"]
    assert {key: after[key]["spent"] for key in before if "spent" in after[key]} == {
        key: value["spent"] for key, value in before.items() if "spent" in value
    }


def test_observed_requests_are_decided_upon_and_go(tmp_path_factory: pytest.TempPathFactory) -> None:
    """All of them, though their budgets are spent; the state tells what would have been refused."""
    with running(
        tmp_path_factory.mktemp("observed"),
        upstreams={"main": {"limits": [{"tpm": 60_000_000, "rpm": 600_000}], "prices": PRICES}},
        identity={"tenant": "header:x-team"},
        tenants={"spender": {"usd_per_day": 0.01}, "agents": {"sessions": {"max_tokens": 1}}},
        observe=1.0,
    ) as stack:
        for team in ("spender", "agents"):
            assert [Caller(stack, team, "s").http().status_code for _ in range(3)] == [200] * 3
        assert stack.state()["tally"]["observed"] == {"spend_budget": 3, "session_budget": 3}
        books_balance(stack)
        assert stack.state()["counters"]["tenant/spender/usd_day"]["spent"] > 0.01
