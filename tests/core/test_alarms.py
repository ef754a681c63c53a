"""When an operator is told that a budget runs out."""

from __future__ import annotations

from extproc.core.alarms import Alarms
from extproc.core.bucket import Slots
from extproc.core.budget import Budget, Period
from extproc.core.capacity import Store


def test_each_mark_is_told_once_a_period() -> None:
    """However what is reserved moves; a large step tells once. In the next period it begins anew."""
    budget = Budget(10.0, Period.HOUR)
    store: Store = {"a/usd_hour": budget, "a/slots": Slots(3)}
    alarms, told = Alarms([*store, "gone/usd_hour"]), []
    for now, used in enumerate((7.9, 8.0, 8.5, 7.0, 8.5, 9.5, 11.0, 9.0, 9.5)):
        budget.change(budget.used_at(now) - used, now)
        told += [(key, round(one.used_at(now), 6)) for key, one in alarms.look(store, float(now))]
    assert told == [("a/usd_hour", 8.0), ("a/usd_hour", 9.5)]
    assert alarms.look(store, 3600.0) == []
    budget.change(-9.9, 3601.0)
    assert [alarms.look(store, 3602.0), alarms.look(store, 3603.0)] == [[("a/usd_hour", budget)], []]
