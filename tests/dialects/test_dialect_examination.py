"""A question of the doctor has one shape, and is nothing that an upstream could serve."""

from __future__ import annotations

import json

import pytest

from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Endpoint
from extproc.dialects import examination, read
from extproc.dialects.examination import Question, Told, asked, question, told


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (question(), Question(hold=True, ms=0)),
        (question(hold_ms=3000), Question(hold=True, ms=3000)),
        (question(silence_ms=1, size=100_000), Question(hold=False, ms=1)),
        (question(silence_ms=5001), Question(hold=False, ms=5000)),
        (question(hold_ms=99_999), Question(hold=True, ms=5000)),
    ],
)
def test_what_is_written_is_read(body: bytes, expected: Question) -> None:
    """Bounded, however long was asked for, and whatever spaces follow."""
    assert asked(body) == expected


def test_a_question_is_as_large_as_it_was_to_be_and_no_request() -> None:
    """It is JSON, and every endpoint would refuse it for want of a model."""
    body = question(hold_ms=10, size=4096)
    assert len(body) == 4096
    assert list(json.loads(body)) == ["tidegate_doctor"]
    for endpoint in Endpoint:
        if endpoint.generates:
            with pytest.raises(Rejected) as rejected:
                read(endpoint, body)
            assert rejected.value.reason is Reason.BAD_REQUEST


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b' {"tidegate_doctor":{"silence_ms":1}}',
        b'{"tidegate_doctor":{"silence_ms":1}}\n',
        b'{"tidegate_doctor":{"silence_ms":-1}}',
        b'{"tidegate_doctor":{"silence_ms":100000}}',
        b'{"tidegate_doctor":{"silence_ms":1.5}}',
        b'{"tidegate_doctor":{"silence_ms":1},"model":"m","messages":[]}',
        b'{"tidegate_doctor":{"silence_ms":1,"model":"m"}}',
        b'{"tidegate_doctor":{"silence_ms":1}}{"model":"m"}',
        b'{"model":"m","tidegate_doctor":{"silence_ms":1}}',
        b'{"tidegate_doctor":{"nap_ms":1}}',
        '{"tidegate_doctor":{"silence_ms":\u0661}}'.encode(),
    ],
)
def test_anything_else_is_no_question(body: bytes) -> None:
    """Not with a model beside it, nor in any other spelling: nobody can ask for silence and be served."""
    assert asked(body) is None


def test_what_it_was_told_is_found_in_a_refusals_message() -> None:
    """Whatever stands around it."""
    waited = Question(hold=False, ms=20)
    assert told(f"Your request could not be understood ({examination.tell(7, waited)}).") == Told(7, waited)
    assert told(f"({examination.busy(7)})") == Told(7, None)
    assert told("Your request could not be understood (model is missing).") is None
