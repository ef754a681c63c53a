"""Two hundred routes and fifty upstreams: Envoy takes what is rendered, and each request goes where its route says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from extproc.against.command import compare
from extproc.stack import Stack
from tests.e2e.conftest import chat
from tests.e2e.doubles import CHAT, NEVER_OPENS, Upstream, rss_mb, running

ROUTES, UPSTREAMS = 200, 50
CHAIN = 3
ENVOY_MB = 600
"""Far above what it takes (some 150); a script or table kept for each pair of route and upstream would be more."""


def settings_of_many(port: int) -> dict[str, Any]:
    """Each model has a name of its own at each upstream, so that whoever got a request can be told from its body."""
    names = [f"up-{i:02d}" for i in range(UPSTREAMS)]
    models = [f"model-{i}" for i in range(ROUTES - 20)]
    upstreams = {
        name: {
            "provider": "compatible",
            "url": f"http://127.0.0.1:{port}",
            "concurrency": 9,
            "breaker": NEVER_OPENS,
            "models": {model: f"{model}@{name}" for model in [*models, "family-190-a", "odd"]},
        }
        for name in names
    }
    patterns = [f"family-{i}-*" for i in range(ROUTES - 20, ROUTES - 1)]
    routes = [
        {"models": [model], "chain": [names[(i + k) % UPSTREAMS] for k in range(CHAIN)], "acknowledge_unowned": True}
        for i, model in enumerate([*models, *patterns])
    ]
    routes.append({"models": ["*"], "chain": names[::-1], "acknowledge_unowned": True})
    assert len(routes) == ROUTES
    return {"upstreams": upstreams, "routes": routes, "other_endpoints": None}


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Upstream]]:
    """All of it started, with one server in the place of all upstreams."""
    folder = tmp_path_factory.mktemp("many")
    with Upstream().listening() as upstream, running(folder, full=False, **settings_of_many(upstream.port)) as stack:
        yield stack, upstream


@pytest.mark.parametrize(
    ("model", "at"),
    [
        ("model-0", "model-0@up-00"),
        ("model-77", "model-77@up-27"),
        ("model-179", "model-179@up-29"),
        ("family-190-a", "family-190-a@up-40"),
        ("odd", "odd@up-49"),
    ],
)
def test_a_request_goes_where_its_route_says(model: str, at: str, many: tuple[Stack, Upstream]) -> None:
    """By exact name at the beginning, amid and at the end of the list, by a prefix, and by what fits everything."""
    stack, upstream = many
    answer = httpx.post(stack.url + CHAT, json=chat() | {"model": model}, timeout=20)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-tidegate-upstream"] == at.partition("@")[2]
    assert upstream.last().json()["model"] == at


def test_the_next_of_its_chain_is_asked(many: tuple[Stack, Upstream]) -> None:
    stack, upstream = many
    upstream.answers[:] = [(500, {}, b"{}"), (500, {}, b"{}")]
    answer = httpx.post(stack.url + CHAT, json=chat() | {"model": "model-48"}, timeout=20)
    assert answer.status_code == 200, answer.text
    tried = [one.json()["model"] for one in upstream.received[-CHAIN:]]
    assert tried == ["model-48@up-48", "model-48@up-49", "model-48@up-00"]


def test_envoy_runs_what_was_rendered_in_little_memory(many: tuple[Stack, Upstream]) -> None:
    stack, _ = many
    settings = stack._with_secrets()
    assert compare(f"http://127.0.0.1:{settings.gateway.admin_port}", settings) == []
    assert rss_mb(stack.processes["envoy"].pid) < ENVOY_MB


def test_the_state_page_knows_them_all(many: tuple[Stack, Upstream]) -> None:
    stack, _ = many
    state = stack.state()
    assert {f"up-{i:02d}" for i in range(UPSTREAMS)} <= {*state["breakers"]}
