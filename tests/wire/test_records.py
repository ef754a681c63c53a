"""What a record says of an answer's time and of its provider's limits."""

from __future__ import annotations

from datetime import timedelta

import pytest

from extproc.ports import RecordKind
from extproc.wire.codec import LIMITS, record
from extproc.wire.pb.access_log_pb2 import AccessLogType, HttpAccessLogEntry


def entry(**headers: str) -> HttpAccessLogEntry:
    """A record of an attempt at upstream a, with response headers; `__` stands for a dash."""
    one = HttpAccessLogEntry()
    one.common_properties.access_log_type = AccessLogType.UpstreamEnd
    one.common_properties.upstream_cluster = "a"
    for name, value in headers.items():
        one.response.response_headers[name.replace("__", "-")] = value
    return one


@pytest.mark.parametrize("seconds", [0.0, 0.9, 61.25])
def test_when_the_first_byte_of_an_answer_came(seconds: float) -> None:
    """From the request's start, so that what its headers say can be dated."""
    one = entry()
    one.common_properties.time_to_first_upstream_rx_byte.FromTimedelta(timedelta(seconds=seconds))
    found = record(one)
    assert found is not None
    assert found.answered_s == pytest.approx(seconds)


def test_without_a_first_byte_there_is_nothing_to_date() -> None:
    """The attempt was refused a connection, say."""
    found = record(entry())
    assert found is not None
    assert (found.kind, found.answered_s, dict(found.headers)) == (RecordKind.ATTEMPT, None, {})


def test_limits_are_those_left_on_the_answer_and_those_taken_off() -> None:
    """The former are of a failed attempt, the latter were noted for an answer that went to the caller."""
    one = entry(retry__after="1")
    one.common_properties.metadata.filter_metadata[LIMITS]["x-ratelimit-limit-tokens"] = "9"
    found = record(one)
    assert found is not None
    assert found.headers == {"retry-after": "1", "x-ratelimit-limit-tokens": "9"}


@pytest.mark.parametrize(("headers", "told"), [({}, "22s"), ({"retry__after": "3"}, "3")])
def test_a_wait_that_only_the_body_tells_counts_where_no_header_does(headers: dict[str, str], told: str) -> None:
    """The header is the provider's first word."""
    found = record(entry(x__tg__wait="22s", **headers))
    assert found is not None
    assert found.headers["retry-after"] == told


def test_an_answer_of_last_resort_is_no_upstreams() -> None:
    """Its status is the caller's; what became of the request is that everybody failed."""
    one = entry(x__tidegate__last__resort="true")
    one.response.response_code.value = 200
    found = record(one)
    assert found is not None
    assert found.status == 503
