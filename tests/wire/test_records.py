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


@pytest.mark.parametrize(("first_s", "whole_s", "since"), [(1.25, 4.5, 3.25), (0.9, 3.1, 2.2), (5.0, 4.0, 0.0)])
def test_how_long_the_answer_took_after_its_first_byte(first_s: float, whole_s: float, since: float) -> None:
    """So that what its headers say can be dated; never negative."""
    one = entry()
    one.common_properties.time_to_first_upstream_rx_byte.FromTimedelta(timedelta(seconds=first_s))
    one.common_properties.duration.FromTimedelta(timedelta(seconds=whole_s))
    found = record(one)
    assert found is not None
    assert found.head_s == pytest.approx(since)


def test_without_a_first_byte_there_is_nothing_to_date() -> None:
    """The attempt was refused a connection, say."""
    found = record(entry())
    assert found is not None
    assert (found.kind, found.head_s, dict(found.headers)) == (RecordKind.ATTEMPT, None, {})


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
