"""Upstreams of one chain whose models count differently: who can hold a prompt, first and after a failure."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from extproc.stack import Stack
from tests.e2e.conftest import chat
from tests.e2e.doubles import CHAT, MESSAGES, NEVER_OPENS, forget, running

DIGITS = "0123456789" * 30
"""A hundred tokens to GPT, which takes digits by threes, three hundred to Qwen, which takes them one by one."""
PROSE = "The quick brown fox jumps over the lazy dog. " * 10
"""A hundred tokens to both."""
WINDOWS = {"gpt": 150, "qwen": 300}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Either behind the other; nothing is learned, so that no test depends on what was asked before."""
    own = {"gpt": "gpt-5", "qwen": "qwen3-32b"}
    with running(
        tmp_path_factory.mktemp("windows"),
        upstreams={
            name: {
                "concurrency": 9,
                "window": window,
                "models": dict.fromkeys(own.values(), own[name]),
                "breaker": NEVER_OPENS,
            }
            for name, window in WINDOWS.items()
        },
        routes=[
            {"models": ["gpt-5"], "chain": ["gpt", "qwen"], "acknowledge_unowned": True},
            {"models": ["qwen3-32b"], "chain": ["qwen", "gpt"], "acknowledge_unowned": True},
        ],
        tokens={"calibrate": False},
    ) as stack:
        yield stack


@pytest.fixture
def stack(shared: Stack) -> Stack:
    """The shared stack with empty records."""
    forget(shared)
    return shared


def ask(stack: Stack, path: str, model: str, text: str, fault: str = "") -> httpx.Response:
    body = chat(text) | {"model": model}
    return httpx.post(stack.url + path, json=body, headers={"x-fake-fault": fault}, timeout=30)


def came(stack: Stack) -> dict[str, int]:
    """How many requests each upstream got."""
    return {name: len(stack.record(name)["requests"]) for name in WINDOWS}


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize(
    ("model", "text", "way", "got"),
    [
        ("gpt-5", PROSE, ("gpt", "1"), {"gpt": 1, "qwen": 0}),
        ("gpt-5", DIGITS, ("gpt", "1"), {"gpt": 1, "qwen": 0}),
        ("qwen3-32b", PROSE, ("qwen", "1"), {"gpt": 0, "qwen": 1}),
        ("qwen3-32b", DIGITS, ("gpt", "1"), {"gpt": 1, "qwen": 0}),
    ],
)
def test_a_prompt_goes_where_it_fits_as_it_is_counted_there(
    stack: Stack, path: str, model: str, text: str, way: tuple[str, str], got: dict[str, int]
) -> None:
    """Too large for the first, it goes straight to the second, whose window is the smaller one and whose count, too."""
    answer = ask(stack, path, model, text)
    assert answer.status_code == 200
    assert (answer.headers["x-tidegate-upstream"], answer.headers["x-tidegate-attempts"]) == way
    assert came(stack) == got


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_failure_takes_it_only_where_it_fits(stack: Stack, path: str) -> None:
    """By the backup's own tokenizer: prose moves on, digits of as many tokens to the first end there."""
    moved = ask(stack, path, "gpt-5", PROSE, fault="500;provider=gpt")
    assert (moved.status_code, moved.headers["x-tidegate-upstream"]) == (200, "qwen")
    assert came(stack) == {"gpt": 1, "qwen": 1}
    stayed = ask(stack, path, "gpt-5", DIGITS, fault="500;provider=gpt")
    assert (stayed.status_code, stayed.headers["x-tidegate-reason"]) == (503, "upstream_failed")
    assert came(stack) == {"gpt": 2, "qwen": 1}


def test_what_fits_nowhere_is_too_large(stack: Stack) -> None:
    """By every count; nobody is asked."""
    answer = ask(stack, CHAT, "gpt-5", DIGITS * 2)
    assert (answer.status_code, answer.headers["x-tidegate-reason"]) == (413, "too_large")
    assert came(stack) == {"gpt": 0, "qwen": 0}
