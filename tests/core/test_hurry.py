"""How much time is enough for an attempt, by what is usual there or by what is assumed."""

from __future__ import annotations

from math import inf

import pytest

from extproc.core.hurry import ample_s
from extproc.core.request import Size
from tests.doubles import request


@pytest.mark.parametrize(
    ("first_token_s", "p95_s", "ample"),
    [(10.0, inf, 5.0), (10.0, 1.5, 3.0), (10.0, 0.1, 1.0), (10.0, 8.0, 10.0), (0.5, 0.1, 0.5)],
)
def test_a_first_token_has_twice_its_usual_time(first_token_s: float, p95_s: float, ample: float) -> None:
    """Half of its limit while that is not known; a second at least; and never more than the operator gives it."""
    assert ample_s(request(stream=True), first_token_s, first_token_s, p95_s=p95_s, output_s=99.0) == ample


@pytest.mark.parametrize(
    ("output", "p95_s", "output_s", "ample"),
    [
        (500, inf, 0.0, 15.0),
        (50_000, inf, 0.0, 25.0),
        (500, 1.0, 0.0, 12.0),
        (500, inf, 20.0, 45.0),
        (500, 1.0, 20.0, 42.0),
        (500, 1.0, 900.0, 900.0),
        (0, 0.1, 0.0, 1.0),
    ],
)
def test_a_whole_answer_has_the_time_to_generate_it_besides(
    output: int, p95_s: float, output_s: float, ample: float
) -> None:
    """Twice what it usually takes; at a common speed while that is not known, of no more than a common answer."""
    asked = request(stream=False, size=Size(60, output))
    assert ample_s(asked, 10.0, 900.0, p95_s=p95_s, output_s=output_s) == ample
