"""Who calls, in which lane, for which models, in which session, and that nobody lives at another's expense.

A tenant is seen by the slot of its concurrency that a request holds while it runs; lanes by the tally of admissions.
Sessions show nowhere outside yet but in the departure's facts, which a desk double of Envoy's side collects.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import select
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import httpx
import openai
import pytest

from extproc.app import Service
from extproc.core.capacity import Level
from extproc.ports import Departure, Head
from extproc.stack import Stack
from tests.e2e.conftest import books_balance, chat, settings_for
from tests.e2e.doubles import (
    CHAT,
    MESSAGES,
    NEVER_OPENS,
    Reply,
    connect,
    crowd,
    forget,
    read_reply,
    running,
    until,
    written,
)

HTTP = httpx.Client(timeout=30)
SECRET = b"0123456789abcdef0123456789abcdef"
ISSUER, AUDIENCE = "https://issuer.example", "tidegate"


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def token(claims: Mapping[str, Any], *, secret: bytes = SECRET, alg: str = "HS256", **more: Any) -> str:
    """A JWT that is valid unless told otherwise."""
    now = int(time.time())
    payload = {"iss": ISSUER, "aud": AUDIENCE, "sub": "somebody", "iat": now, "exp": now + 300, **claims, **more}
    head = base64url(json.dumps({"alg": alg, "typ": "JWT", "kid": "k1"}).encode())
    signed = f"{head}.{base64url(json.dumps(payload).encode())}"
    signature = b"" if alg == "none" else hmac.new(secret, signed.encode(), "sha256").digest()
    return f"{signed}.{base64url(signature)}"


def bearer(value: str) -> dict[str, str]:
    return {"authorization": f"Bearer {value}"}


def tenants() -> dict[str, Any]:
    """Four tenants whose slots can be told apart, and the one for strangers."""
    some = {"concurrency": 50}
    return {
        "default": some,
        "alpha": {**some, "key_sha256": [sha256("sk-alpha"), sha256("sk-alpha-2")], "lanes": ["P1", "P2"]},
        "beta": {**some, "key_sha256": [sha256("sk-beta")], "models": ["gpt-*", "exact"]},
        "gamma": {**some, "key_sha256": [sha256("sk-gamma")], "lanes": ["P2", "P0"]},
        "delta": {**some, "lanes": ["P0", "P1"], "default_lane": "P0"},
    }


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """JWT first, then a trusted header, then keys; strangers are refused."""
    folder = tmp_path_factory.mktemp("strict")
    key = {"kty": "oct", "kid": "k1", "alg": "HS256", "k": base64url(SECRET)}
    (folder / "jwks.json").write_text(json.dumps({"keys": [key]}), "utf-8")
    with running(
        folder,
        upstreams={"main": {"concurrency": 100, "breaker": NEVER_OPENS}},
        routes=[
            {"models": ["gpt-5", "exact"], "chain": ["main"], "acknowledge_unowned": True},
            {"models": ["*"], "chain": ["main"], "acknowledge_unowned": True},
        ],
        identity={
            "tenant": ["jwt:team", "header:x-tidegate-team", "api_key"],
            "unknown": "reject",
            "jwt": {"issuer": ISSUER, "audiences": [AUDIENCE], "jwks_file": str(folder / "jwks.json")},
        },
        tenants=tenants(),
    ) as stack:
        yield stack


@pytest.fixture(scope="module")
def open_door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Keys only; strangers are the tenant `default`. One tenant has small quotas."""
    limited = {"key_sha256": [sha256("sk-flood")], "concurrency": 5, "rpm": 1200}
    poor = {"key_sha256": [sha256("sk-poor")], "tpm": 3000}
    with running(
        tmp_path_factory.mktemp("open"),
        upstreams={"main": {"concurrency": 10, "breaker": NEVER_OPENS}},
        tenants={**tenants(), "flood": limited, "poor": poor},
    ) as stack:
        yield stack


class Asked:
    """What became of a request: the tenant whose slot it took, or its refusal."""

    def __init__(self, stack: Stack, headers: Mapping[str, str | bytes], path: str = CHAT, **body: Any) -> None:
        request = written(
            path=path,
            body=json.dumps(chat(**body)).encode(),
            headers={"x-fake-fault": "slow-first-token;s=100", **headers},
        )
        self.tenant, self.reply = "", Reply(0, {}, b"")
        with connect(stack) as connection:
            connection.sendall(request)
            until(lambda: self._answered(connection) or (self._running(stack) and _reached(stack)))
        until(lambda: not self._running(stack) and not _reached(stack))

    @property
    def reason(self) -> str:
        return self.reply.headers.get("x-tidegate-reason", "")

    def _answered(self, connection: Any) -> bool:
        if not select.select([connection], [], [], 0.005)[0]:
            return False
        self.reply = read_reply(connection)[0]
        return True

    def _running(self, stack: Stack) -> bool:
        used = [key.split("/")[1] for key, c in stack.state()["counters"].items() if _tenant_slot(key) and c["used"]]
        assert len(used) <= 1
        self.tenant = self.tenant or "".join(used)
        return bool(used)


def _reached(stack: Stack) -> bool:
    """Whether a request is at the upstream."""
    return bool(stack.record("main")["in_flight"])


def _tenant_slot(key: str) -> bool:
    return key.startswith("tenant/") and key.endswith("/slots")


# The ladder.

KNOWN = [
    ("authorization", "Bearer sk-alpha"), ("authorization", "bearer   sk-alpha"), ("authorization", "sk-alpha"),
    ("x-api-key", "sk-alpha"), ("api-key", "sk-alpha"), ("x-api-key", "sk-alpha-2"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), KNOWN)
def test_a_key_on_file_names_its_tenant(strict: Stack, name: str, value: str) -> None:
    """Every way in which SDKs carry a key works, for each of a tenant's keys."""
    assert Asked(strict, {name: value}).tenant == "alpha"


@pytest.mark.parametrize(
    "headers",
    [
        {}, {"authorization": ""}, {"authorization": "Bearer"}, {"authorization": "Bearer sk-alphA"},
        {"authorization": "Basic sk-alpha"}, {"authorization": "Bearer sk-alpha x"}, {"x-api-key": sha256("sk-alpha")},
        {"x-api-key": "alpha"}, {"cookie": "key=sk-alpha"}, {"x-tenant": "alpha"}, {"x-api-key": "default"},
        {"x-tidegate-tenant": "alpha"}, {"x-tidegate-team": "nobody"}, {"x-tidegate-team": "Alpha"},
    ],
)  # fmt: skip
def test_strangers_are_refused(strict: Stack, headers: dict[str, str]) -> None:
    """No key, a wrong key, a key in the wrong place, or a digest in its stead prove nothing; no upstream is asked."""
    forget(strict)
    asked = Asked(strict, headers)
    assert (asked.reply.status, asked.reason) == (401, "unauthenticated")
    assert strict.record("main")["requests"] == []


def test_a_declared_header_is_trusted(strict: Stack) -> None:
    """The header that the settings name decides, even if its name is one of ours, and never reaches an upstream."""
    forget(strict)
    with connect(strict) as connection:
        connection.sendall(written(path=CHAT, body=json.dumps(chat()).encode(), headers={"X-Tidegate-Team": "beta"}))
        assert read_reply(connection)[0].status == 200
    (seen,) = strict.record("main")["requests"]
    assert not [name for name in seen["headers"] if name.startswith("x-tidegate-")]
    assert Asked(strict, {"X-Tidegate-Team": "beta"}).tenant == "beta"


def test_a_header_that_nobody_declared_means_nothing(open_door: Stack) -> None:
    """Without a declaration a caller that names a tenant is still a stranger."""
    for name in ("x-tidegate-team", "x-tidegate-tenant", "x-team", "x-tenant", "x-tidegate-tenant-id"):
        assert Asked(open_door, {name: "alpha"}).tenant == "default"
    assert Asked(open_door, {"x-api-key": "sk-wrong", "x-tidegate-team": "alpha"}).tenant == "default"
    assert Asked(open_door, {"x-api-key": "sk-alpha", "x-tidegate-team": "beta"}).tenant == "alpha"


def test_a_verified_claim_names_its_tenant(strict: Stack) -> None:
    """A JWT signed with a key of the JWKS file, in date, for us: its claim decides. It stays at the gateway."""
    forget(strict)
    assert Asked(strict, bearer(token({"team": "gamma"}))).tenant == "gamma"
    assert Asked(strict, bearer(token({"team": "gamma", "aud": ["x", AUDIENCE]}))).tenant == "gamma"
    assert [seen["key"] for seen in strict.record("main")["requests"]] == [None, None]


BAD_TOKENS = {
    "expired": lambda: token({"team": "gamma"}, exp=int(time.time()) - 3600),
    "not yet": lambda: token({"team": "gamma"}, nbf=int(time.time()) + 3600),
    "wrong secret": lambda: token({"team": "gamma"}, secret=b"x" * 32),
    "alg none": lambda: token({"team": "gamma"}, alg="none"),
    "another issuer": lambda: token({"team": "gamma"}, iss="https://evil.example"),
    "another audience": lambda: token({"team": "gamma"}, aud="other"),
    "no signature": lambda: token({"team": "gamma"}).rpartition(".")[0] + ".",
    "changed claims": lambda: _tampered(token({"team": "alpha"})),
    "no claim": lambda: token({}),
    "unknown tenant": lambda: token({"team": "nobody"}),
    "a number": lambda: token({"team": 5}),
    "a list": lambda: token({"team": ["gamma"]}),
    "an object": lambda: token({"team": {"gamma": 1}}),
    "null": lambda: token({"team": None}),
    "nonsense": lambda: "a.b.c",
}


def _tampered(valid: str) -> str:
    head, _, signature = valid.split(".")
    claims = {"team": "gamma", "iss": ISSUER, "aud": AUDIENCE, "exp": 4_000_000_000}
    return f"{head}.{base64url(json.dumps(claims).encode())}.{signature}"


@pytest.mark.parametrize("what", BAD_TOKENS)
def test_a_token_that_proves_nothing_is_no_identity(strict: Stack, what: str) -> None:
    """Expired, forged, unsigned, for somebody else, or without a usable claim: unauthenticated, by our own refusal."""
    asked = Asked(strict, bearer(BAD_TOKENS[what]()))
    assert (asked.reply.status, asked.reason) == (401, "unauthenticated")
    assert asked.reply.json()["error"]["code"] == "UNAUTHENTICATED"


@pytest.mark.parametrize("what", BAD_TOKENS)
def test_below_a_token_that_proves_nothing_the_ladder_goes_on(strict: Stack, what: str) -> None:
    """A caller that also brings a key on file is known by that key, whatever its token was worth."""
    assert Asked(strict, {**bearer(BAD_TOKENS[what]()), "x-api-key": "sk-beta"}).tenant == "beta"


def test_the_first_rung_that_names_a_tenant_wins(strict: Stack) -> None:
    """JWT before header before key, as the settings list them."""
    jwt, header, key = bearer(token({"team": "gamma"})), {"x-tidegate-team": "beta"}, {"x-api-key": "sk-alpha"}
    assert Asked(strict, {**jwt, **header, **key}).tenant == "gamma"
    assert Asked(strict, {**header, **key}).tenant == "beta"
    assert Asked(strict, {**jwt, **key}).tenant == "gamma"
    assert Asked(strict, key).tenant == "alpha"


def test_strangers_may_be_let_in_as_the_default_tenant(open_door: Stack) -> None:
    """With `unknown: default` a caller without a key, or with an unknown one, is the tenant `default`."""
    assert Asked(open_door, {}).tenant == "default"
    assert Asked(open_door, bearer("sk-wrong")).tenant == "default"
    assert Asked(open_door, {"x-api-key": "sk-alpha"}, path=MESSAGES).tenant == "alpha"


# Lanes.


@pytest.mark.parametrize(
    ("key", "asked", "lane"),
    [
        ("sk-alpha", "", "P1"), ("sk-alpha", "P1", "P1"), ("sk-alpha", "p2", "P2"),
        ("sk-alpha", "P0", ""), ("sk-gamma", "", "P2"), ("sk-gamma", "P0", "P0"), ("sk-gamma", "P1", ""),
        ("sk-beta", "", "P1"), ("sk-beta", "P0", "P0"),
    ],
)  # fmt: skip
def test_a_caller_may_lower_its_lane_and_never_raise_it(strict: Stack, key: str, asked: str, lane: str) -> None:
    """Only lanes of one's tenant; unasked the tenant's own, else P1, and P0 only when asked for or configured."""
    before = strict.state()["tally"]["admitted"]
    answer = HTTP.post(strict.url + CHAT, json=chat(), headers={"x-api-key": key, "x-tidegate-priority": asked})
    if not lane:
        assert (answer.status_code, answer.headers["x-tidegate-reason"]) == (403, "forbidden")
        assert asked in answer.json()["error"]["message"]
        return
    assert answer.status_code == 200
    after = strict.state()["tally"]["admitted"]
    assert {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)} == {
        lane: 1
    }


def test_a_tenant_may_have_an_urgent_lane_by_default(strict: Stack) -> None:
    """`default_lane: P0` is the operator's word, and a caller may still ask for less."""
    for asked, lane in (({}, "P0"), ({"x-tidegate-priority": "P1"}, "P1")):
        before = strict.state()["tally"]["admitted"].get(lane, 0)
        answer = HTTP.post(strict.url + CHAT, json=chat(), headers={**bearer(token({"team": "delta"})), **asked})
        assert answer.status_code == 200
        assert strict.state()["tally"]["admitted"][lane] == before + 1


# Models.


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v1/messages/count_tokens"])
def test_a_tenant_gets_only_its_models(strict: Stack, path: str) -> None:
    """Patterns and names of `models` pass, others are forbidden before any upstream is asked, in every dialect."""
    forget(strict)
    for model, status in (
        ("gpt-5", 200),
        ("gpt-99", 200),
        ("exact", 200),
        ("exactly", 403),
        ("claude", 403),
        ("GPT-5", 403),
    ):
        answer = HTTP.post(strict.url + path, json=chat(model=model), headers={"x-api-key": "sk-beta"})
        assert answer.status_code == status, model
        if status == 403:
            assert answer.headers["x-tidegate-reason"] == "forbidden"
            assert model in answer.json()["error"]["message"]
        assert (
            HTTP.post(strict.url + path, json=chat(model=model), headers={"x-api-key": "sk-alpha"}).status_code == 200
        )
    assert len(strict.record("main")["requests"]) == 3 + 6


def test_the_list_of_models_is_the_tenants_own(strict: Stack) -> None:
    """What a tenant may not use it does not see; strangers see nothing."""
    url = f"{strict.url}/v1"
    with openai.OpenAI(base_url=url, api_key="sk-beta", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["gpt-5", "exact"]
    with openai.OpenAI(base_url=url, api_key="sk-nobody", max_retries=0) as client:  # noqa: SIM117 - to be closed
        with pytest.raises(openai.AuthenticationError):
            client.models.list()


# Quotas.


async def test_one_tenants_flood_never_takes_anothers_share(
    open_door: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tenant that sends a hundred at once holds its five slots, and its neighbour does not even wait."""
    forget(open_door)
    slow = {"x_fake_fault": "slow-first-token;s=1"}
    queued = open_door.state()["tally"]["queued"]
    async with crowd(open_door) as clients:
        flood = [asyncio.create_task(clients.ask(chat(), x_api_key="sk-flood", **slow)) for _ in range(100)]
        calm = [await clients.ask(chat(), x_api_key="sk-alpha") for _ in range(20)]
        flooded = await asyncio.gather(*flood)
    assert [answer.status for answer in calm] == [200] * 20
    assert open_door.state()["tally"]["queued"] == queued
    assert {answer.reason for answer in flooded} <= {"", "tenant_concurrency"}
    served = sum(answer.status == 200 for answer in flooded)
    assert 5 <= served < 100
    record = open_door.record("main")
    spans = [(seen["admitted"], seen["finished"]) for seen in record["requests"] if seen["fault"] == "slow-first-token"]
    assert _most_at_once(spans) <= 5
    with capsys.disabled():
        print(f"\n  flood of 100 with 5 slots: {served} served, its neighbour did not wait")  # noqa: T201


def _most_at_once(spans: Sequence[tuple[float, float]]) -> int:
    steps = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    here = most = 0
    for _, step in steps:
        here += step
        most = max(most, here)
    return most


def test_a_spent_quota_is_one_tenants_own_trouble(open_door: Stack) -> None:
    """Who has spent its tokens is refused until they are back; everybody else goes on."""
    body = chat(max_tokens=900)
    answers = [HTTP.post(open_door.url + CHAT, json=body, headers={"x-api-key": "sk-poor"}) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert answers[-1].headers["x-tidegate-reason"] == "tenant_quota"
    assert answers[-1].headers["x-ratelimit-limit-tokens"] == "3000"
    assert HTTP.post(open_door.url + CHAT, json=body, headers={"x-api-key": "sk-alpha"}).status_code == 200


def test_what_was_refused_later_is_not_charged_to_the_tenant(open_door: Stack) -> None:
    """Requests and slots taken for a request that is refused afterwards come back."""
    books_balance(open_door)
    key = "tenant/flood/requests"
    full = until(lambda: (c := open_door.state()["counters"][key])["level"] >= c["capacity"] and c)
    with taken(open_door, 10):
        for _ in range(20):
            late = {"x-api-key": "sk-flood", "x-request-timeout-ms": "1"}
            assert HTTP.post(open_door.url + CHAT, json=chat(), headers=late).status_code in (503, 504)
    assert open_door.state()["counters"][key]["level"] >= full["capacity"] - 1
    assert open_door.state()["counters"]["tenant/flood/slots"]["used"] == 0


class taken:  # noqa: N801 - reads as the sentence it is
    """All slots of `main` are in use by strangers while the block runs."""

    def __init__(self, stack: Stack, count: int) -> None:
        self._connections = [connect(stack) for _ in range(count)]
        request = written(body=json.dumps(chat()).encode(), headers={"x-fake-fault": "slow-first-token;s=100"})
        for connection in self._connections:
            connection.sendall(request)
        until(lambda: stack.state()["flying"] == count)

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()


# Sessions.


@dataclass
class Desk:
    """Envoy's side of one request, as a double: hands in head and body, keeps what comes out."""

    headers: Mapping[str, str]
    content: bytes
    departure: Departure | None = None
    answered: list[int] = field(default_factory=list)

    async def head(self) -> Head:
        given = {":method": "POST", ":path": CHAT, "x-request-id": "r-1", **self.headers}
        return Head(given, bodiless=False)

    async def body(self) -> bytes:
        return self.content

    async def hold(self, seconds: float) -> None:
        raise AssertionError(seconds)

    async def forward(self, departure: Departure) -> None:
        self.departure = departure

    async def answer(self, status: int, *_: object) -> None:
        self.answered.append(status)

    async def ended(self) -> None:
        return


SESSIONS = [
    ({"x-tidegate-session": "mine"}, {}, "mine"),
    ({"x-my-agent": "other"}, {}, "other"),
    ({"x-tidegate-session": "mine", "x-claude-code-session-id": "cc"}, {}, "mine"),
    ({"x-claude-code-session-id": "cc"}, {"metadata": {"session_id": "meta"}}, "cc"),
    ({"session_id": "codex"}, {}, "codex"),
    ({}, {"metadata": {"session_id": "meta"}}, "meta"),
    ({}, {"metadata": {"user_id": "user_x_account__session_0123456789ab"}}, "0123456789ab"),
    ({}, {"prompt_cache_key": "cache"}, "cache"),
    ({"x-tidegate-session": "x" * 300}, {"metadata": {"session_id": "meta"}}, "meta"),
    ({"x-tidegate-session": "bad\x07bell"}, {}, None),
    ({}, {}, None),
]


async def test_the_session_is_found_on_its_ladder_and_told_to_the_records() -> None:
    """Configured header, agents' headers, ids in the body, else derived from tenant and key; never the key itself."""
    identity = {"session_headers": ["x-tidegate-session", "x-my-agent"]}
    service = Service(settings_for(identity=identity, tenants=tenants()))
    await service.capacity.tune([Level(key, least=inf) for key in service.capacity.levels()])
    try:
        handle = service._handler()
        derived = set()
        for headers, body, expected in SESSIONS:
            desk = Desk({"authorization": "Bearer sk-alpha", **headers}, json.dumps(chat(**body)).encode())
            await handle(desk)
            assert desk.departure is not None
            facts = desk.departure.facts
            assert (facts["tenant"], facts["lane"], facts["model"]) == ("alpha", "P1", "gpt-5")
            if expected is None:
                derived.add(facts["session"])
            else:
                assert facts["session"] == expected
            assert "sk-alpha" not in str(desk.departure)
        assert len(derived) == 1
        assert str(derived.pop()).startswith(f"alpha/{sha256('sk-alpha')[:16]}/")
        another = Desk({"authorization": "Bearer sk-alpha-2"}, json.dumps(chat()).encode())
        await handle(another)
        assert another.departure is not None
        assert str(another.departure.facts["session"]).startswith(f"alpha/{sha256('sk-alpha-2')[:16]}/")
    finally:
        await service.stop()


def test_nothing_is_held_in_the_end(strict: Stack, open_door: Stack) -> None:
    """After all of this no tenant holds a slot."""
    books_balance(strict)
    books_balance(open_door)
