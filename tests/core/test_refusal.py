"""The closed list of reasons."""

from __future__ import annotations

import pytest

from extproc.core.refusal import RULES, Reason, Rejected
from extproc.core.request import Dialect, Endpoint
from tests.doubles import request

PRODUCT_TABLE = """
tenant_quota 429 retry
tenant_concurrency 429 retry
queue_timeout 429 retry
lane_full 503 retry
evicted 503 retry
deadline_unmeetable 503 retry
deadline_passed 504 no
session_budget 403 no
spend_budget 403 no
too_large 413 no
no_upstream 503 retry
unauthenticated 401 no
forbidden 403 no
unknown_model 404 no
draining 503 retry
bad_request 400 no
not_found 404 no
upstream_failed 503 retry
admission_unavailable 503 retry
"""


def test_every_reason_has_the_rule_of_the_product_table() -> None:
    """No reason without a rule, no rule without a reason, each with its default status and whether a retry helps."""
    rows = [line.split() for line in PRODUCT_TABLE.split("\n") if line]
    assert [(str(reason), str(rule.status), "retry" if rule.retry else "no") for reason, rule in RULES.items()] == [
        tuple(row) for row in rows
    ]
    assert set(RULES) == set(Reason)


@pytest.mark.parametrize(("detail", "text"), [("", "lane_full"), ("7 wait", "lane_full: 7 wait")])
def test_a_rejection_says_its_reason(detail: str, text: str) -> None:
    """As text too, with what detail there is."""
    assert str(Rejected(Reason.LANE_FULL, detail)) == text


@pytest.mark.parametrize("endpoint", Endpoint)
def test_each_endpoint_belongs_to_one_family(endpoint: Endpoint) -> None:
    """Messages and its token counting are Anthropic's, the rest is OpenAI's; four of them generate."""
    anthropic = endpoint in {Endpoint.MESSAGES, Endpoint.COUNT_TOKENS}
    assert endpoint.dialect is (Dialect.ANTHROPIC if anthropic else Dialect.OPENAI)
    assert request(endpoint=endpoint).dialect is endpoint.dialect
    assert endpoint.generates == (str(endpoint) in {"chat", "completions", "responses", "messages"})
