"""Upstreams of one chain whose models cannot all do the same: who is asked, first and after a failure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from extproc.stack import Stack
from tests.e2e.conftest import chat
from tests.e2e.doubles import CHAT, MESSAGES, running

TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
PICTURE = {"messages": [{"role": "user", "content": [IMAGE]}]}
BEGUN = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Well,"}]}
AS_JSON = {"response_format": {"type": "json_object"}}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The first can do nothing special, the second all but images."""
    with running(
        tmp_path_factory.mktemp("abilities"),
        upstreams={
            "plain": {"concurrency": 9, "lacks": ["tools", "images", "json", "prefill"]},
            "able": {"concurrency": 9, "lacks": ["images"]},
        },
    ) as stack:
        yield stack


def ask(stack: Stack, path: str, **more: Any) -> httpx.Response:
    headers = {"x-fake-fault": more.pop("fault", "")}
    return httpx.post(stack.url + path, json=chat(**more), headers=headers)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize(("more", "upstream"), [({}, "plain"), (TOOLS, "able"), (AS_JSON, "able"), (BEGUN, "able")])
def test_a_request_goes_where_it_can_be_served(stack: Stack, path: str, more: dict[str, Any], upstream: str) -> None:
    """At the first attempt, without an error to learn it from."""
    if path == MESSAGES and more is AS_JSON:
        more = {"output_format": {"type": "json_schema", "schema": {}}}
    answer = ask(stack, path, **more)
    assert answer.status_code == 200
    assert (answer.headers["x-tidegate-upstream"], answer.headers["x-tidegate-attempts"]) == (upstream, "1")


def test_a_failure_does_not_take_it_to_one_that_cannot(stack: Stack) -> None:
    """There is only one left, so its failure is the end."""
    answer = ask(stack, CHAT, **TOOLS, fault="500")
    assert answer.status_code == 503
    assert answer.headers["x-tidegate-reason"] == "upstream_failed"


def test_what_nobody_can_do_is_refused_for_good(stack: Stack) -> None:
    """It is told what was needed, and not to come back."""
    answer = ask(stack, CHAT, **PICTURE)
    assert (answer.status_code, answer.headers["x-tidegate-reason"]) == (503, "no_upstream")
    assert answer.headers["x-should-retry"] == "false"
    assert "images" in answer.json()["error"]["message"]
