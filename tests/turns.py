"""Which worker runs which files of tests on Envoy, and in what order, where several run them."""

from __future__ import annotations

from pathlib import PurePath

import pytest
from xdist.scheduler import LoadFileScheduling

__all__ = ["Turns", "turn_of"]

TOGETHER = (
    ("test_pacing", "test_lanes"), ("test_engines", "test_overload", "test_duplicates"), ("test_breaker",),
    ("test_lifecycle",), ("test_bad_days",), ("test_pods",), ("test_quotas",), ("test_doctor",), ("test_stack",),
    ("test_bad_hour",), ("test_failover",), ("test_refusals",), ("test_merged",), ("test_mesh",), ("test_settlement",),
    ("test_restart",), ("test_hostile",), ("test_levers",), ("test_reload",), ("test_identity",),
)  # fmt: skip
"""Files that one worker does one after another, and all that take half a minute or more. The longest come first: one
of them begun last would run alone while the other workers have nothing to do. The first two have the crowds: more of
these at the same time would wait for processors instead of for places and tokens.
"""
_TURNS = {f"e2e/{name}.py": turn for turn, names in enumerate(TOGETHER) for name in names}


class Turns(LoadFileScheduling):
    """`--dist loadfile`, but for the files that are done together, and in the order of the tests."""

    def __init__(self, config: pytest.Config, log: object = None) -> None:
        """Files with few tests do not come last here."""
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        turn = turn_of(file)
        return file if turn == len(TOGETHER) else f"turn {turn}"


def turn_of(file: str | PurePath) -> int:
    """When a file of tests is begun: the smaller, the earlier."""
    return _TURNS.get("/".join(PurePath(file).parts[-2:]), len(TOGETHER))
