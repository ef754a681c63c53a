"""What each of several replicas may use: its part of every limit, so that all of them together pass none."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import yaml

from extproc.check import advice
from extproc.settings import Settings, SettingsError, parse

PRICES = {"*": {"input": 1, "output": 2}}
FULL: dict[str, Any] = {
    "upstreams": {
        "a": {
            "provider": "openai", "limits": [{"tpm": 3000, "rpm": 30}, {"model": "x", "itpm": 900, "otpm": 90}],
            "headroom": 0, "concurrency": 7, "prices": PRICES, "usd_per_hour": 3, "usd_per_day": 6, "usd_per_month": 9,
        },
        "pool": {"provider": "vllm", "url": "http://127.0.0.1:1", "owned": True, "kv": {"trickle_rps": 3}},
    },
    "routes": [{"models": ["*"], "chain": ["a", "pool"], "usd_per_day": 12}],
    "other_endpoints": "a",
    "tenants": {
        "t": {"tpm": 100, "rpm": 10, "concurrency": 5, "usd_per_day": 1.5, "sessions": {"max_tokens": 10}},
        "*": {"rpm": 7},
    },
    "identity": {"tenant": ["header:x-team"]},
    "sessions": {"max_tokens": 1000, "max_usd": 6},
    "retries": {"least_per_s": 3},
}  # fmt: skip


def settings(replicas: int, raw: dict[str, Any] = FULL) -> Settings:
    """The same with so many replicas."""
    return parse(yaml.safe_dump({**json.loads(json.dumps(raw)), "service": {"replicas": replicas}}), "file", {})


def test_every_limit_is_divided() -> None:
    """Whole numbers are rounded down."""
    policy = settings(3).policy()
    a, tenant = policy.upstreams["a"], policy.tenants["t"]
    assert {(limit.model, limit.kind): limit.per_minute for limit in a.limits} == {
        ("*", "total"): 1000, ("*", "requests"): 10, ("x", "input"): 300, ("x", "output"): 30,
    }  # fmt: skip
    assert [limit.capacity for limit in a.limits] == [limit.per_minute / 6 for limit in a.limits]
    assert (a.concurrency, a.dollars.per_hour, a.dollars.per_day, a.dollars.per_month) == (2, 1, 2, 3)
    assert policy.routes[0].dollars.per_day == 4
    assert (tenant.tpm, tenant.rpm, tenant.concurrency, tenant.dollars.per_day) == (33, 3, 1, 0.5)
    assert tenant.sessions is not None
    assert tenant.sessions.max_tokens == 3
    assert policy.any_tenant is not None
    assert policy.any_tenant.rpm == 2
    assert (policy.sessions.max_tokens, policy.sessions.max_usd, policy.retries.least_per_s) == (333, 2, 1)
    kv = policy.upstreams["pool"].kv
    assert kv is not None
    assert (kv.trickle_rps, kv.high, kv.waiting) == (1, 0.82, 4)


def test_nothing_else_is_touched() -> None:
    """What differs between one replica and three is what the test above names, and nothing is forgotten there."""
    assert changed(settings(1).policy(), settings(3).policy()) == {
        "upstreams.limits.per_minute", "upstreams.limits.capacity", "upstreams.concurrency", "upstreams.kv.trickle_rps",
        "upstreams.dollars.per_hour", "upstreams.dollars.per_day", "upstreams.dollars.per_month",
        "routes.dollars.per_day", "tenants.tpm", "tenants.rpm", "tenants.concurrency", "tenants.dollars.per_day",
        "tenants.sessions.max_tokens", "any_tenant.rpm", "sessions.max_tokens", "sessions.max_usd",
        "retries.least_per_s",
    }  # fmt: skip


def changed(one: Any, other: Any, place: str = "") -> set[str]:
    """Where two policies differ in what they are made from."""
    if is_dataclass(one) and type(one) is type(other):
        inner = [
            (f".{field.name}", getattr(one, field.name), getattr(other, field.name))
            for field in fields(one)
            if field.init
        ]
    elif isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        inner = [("", one[key], other[key]) for key in one]
    elif isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        inner = [("", each, its) for each, its in zip(one, other, strict=True)]
    else:
        return set() if one == other else {place.removeprefix(".")}
    return set().union(*(changed(each, its, place + name) for name, each, its in inner))


def test_alone_is_the_whole() -> None:
    """As the simulator plays it."""
    assert changed(settings(3).alone().policy(), settings(1).policy()) == set()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"concurrency": 2}, "file: upstreams.a.concurrency: 2 cannot be divided among service.replicas (3)"),
        (
            {"limits": [], "learn": True},
            "file: upstreams.a.learn: each of 3 replicas would learn the whole; give limits",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(change: dict[str, Any], said: str) -> None:
    """At an upstream."""
    raw = {**FULL, "upstreams": {**FULL["upstreams"], "a": {**FULL["upstreams"]["a"], **change}}}
    settings(1, raw)
    with pytest.raises(SettingsError) as error:
        settings(3, raw)
    assert error.value.problems == [said]


@pytest.mark.parametrize(
    ("section", "place"),
    [
        ({"tenants": {"t": {"rpm": 2}}}, "tenants.t.rpm"),
        ({"tenants": {"t": {"tpm": 2}}}, "tenants.t.tpm"),
        ({"tenants": {"t": {"concurrency": 2}}}, "tenants.t.concurrency"),
        ({"tenants": {"t": {"sessions": {"max_tokens": 2}}}}, "tenants.t.sessions.max_tokens"),
        ({"sessions": {"max_tokens": 2}}, "sessions.max_tokens"),
    ],
)
def test_so_is_a_part_that_would_be_nothing(section: dict[str, Any], place: str) -> None:
    """Of a tenant or a session."""
    settings(2, {**FULL, **section})
    with pytest.raises(SettingsError) as error:
        settings(3, {**FULL, **section})
    assert error.value.problems == [f"file: {place}: 2 cannot be divided among service.replicas (3)"]


def test_check_says_what_it_means() -> None:
    """And nothing where there is one."""
    assert [line for line in advice(settings(1)) if "replica" in line] == []
    assert [line for line in advice(settings(3)) if "replica" in line] == [
        "note: service.replicas: each of 3 has its part of every limit; what one does not use is nobody's",
        "note: service.replicas: a request above 1,000 tokens, the largest tpm divided, fits no upstream that has one",
        "note: upstreams.pool.kv: a replica does not see what others let go between two looks",
        "note: sessions: one that meets the same replica every time has only that replica's part",
    ]
