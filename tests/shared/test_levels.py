"""Bucket levels over a restart: a file that cannot be trusted counts as none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from extproc.core.bucket import Slots, TokenBucket
from extproc.core.budget import Budget, Period
from extproc.shared.levels import load, save


def test_what_is_saved_is_loaded_with_its_age(tmp_path: Path) -> None:
    """Levels as of the moment of saving, debt included; slots are not kept, their holders are gone."""
    path = tmp_path / "levels.json"
    store = {"a": TokenBucket(10, 100, 50, 5.0), "debt": TokenBucket(1, 100, -7, 7.0), "slots": Slots(3, 2.0)}
    save(path, store, now=1_000_000.0, clock_now=7.0)
    assert load(path, 1_000_060.0) == {"a": (70, 60), "debt": (-7, 60)}


def test_what_was_used_of_a_budget_is_kept_too(tmp_path: Path) -> None:
    """Of the period it was saved in; of one that was over by then nothing. Those of sessions are not kept."""
    path = tmp_path / "levels.json"
    store = {
        "hour": Budget(10.0, Period.HOUR, used=4.5, at=3600.0),
        "last": Budget(10.0, Period.HOUR, used=4.5, at=3599.0),
        "session": Budget(10.0, used=4.5),
    }
    save(path, store, now=1_000_000.0, clock_now=3700.0)
    assert load(path, 1_000_060.0) == {"hour": (4.5, 60), "last": (0, 60)}


def test_a_clock_that_went_back_gives_no_dollars_back(tmp_path: Path) -> None:
    """What was used counts, as of now; buckets start empty, as with any file from the future."""
    path = tmp_path / "levels.json"
    store = {"tenant/a/usd_month": Budget(10.0, Period.MONTH, used=4.5, at=7.0), "a": TokenBucket(10, 100, 50, 7.0)}
    save(path, store, now=1_000_000.0, clock_now=7.0)
    assert load(path, 999_999.5) == {"tenant/a/usd_month": (4.5, 0)}


@pytest.mark.parametrize("name", ["levels.json", "levels.new", "levels", ".levels"])
def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, name: str) -> None:
    """It is drafted beside the old one, whatever that is called, and nothing else is left in the directory."""
    path = tmp_path / name
    save(path, {"a": TokenBucket(1, 10, 3, 0.0)}, now=10.0, clock_now=0.0)
    (draft := tmp_path / f"{name}.new").mkdir()  # the next draft cannot be written
    with pytest.raises(OSError, match="new"):
        save(path, {"a": TokenBucket(1, 10, 9, 0.0)}, now=20.0, clock_now=0.0)
    assert load(path, 10.0) == {"a": (3, 0)}
    draft.rmdir()
    save(path, {"a": TokenBucket(1, 10, 9, 0.0)}, now=20.0, clock_now=0.0)
    assert load(path, 20.0) == {"a": (9, 0)}
    assert [each.name for each in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json",
        "[]",
        "7",
        "{}",
        '{"at": 1}',
        '{"at": 1, "levels": []}',
        '{"at": 1, "levels": {"a": "full"}}',
        '{"at": 1, "levels": {"a": [1]}}',
        '{"at": 1, "levels": {"a": null}}',
        '{"at": 101, "levels": {"a": 5}}',
        '{"at": NaN, "levels": {"a": 5}}',
        '{"at": -Infinity, "levels": {"a": 5}}',
        '{"at": Infinity, "levels": {"a/usd_day": 5}}',
        '{"at": "now", "levels": {"a": 5}}',
        '{"at": 1, "levels": {"a": 1%s}}' % ("0" * 400),
        "[" * 100_000,
        '{"at": 1, "levels": {"a": 5}',
        "\udcff",
    ],
)
def test_a_file_that_makes_no_sense_counts_as_none(tmp_path: Path, text: str) -> None:
    """Torn, foreign, from the future, without a time or not text at all: buckets start empty and nothing breaks."""
    path = tmp_path / "levels.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert load(path, 100.0) == {}


def test_a_missing_file_counts_as_none(tmp_path: Path) -> None:
    """So does a directory of that name."""
    assert load(tmp_path / "none.json", 1.0) == {}
    assert load(tmp_path, 1.0) == {}


def test_a_level_that_is_no_number_is_left_out(tmp_path: Path) -> None:
    """The others are kept."""
    path = tmp_path / "levels.json"
    path.write_text('{"at": 90, "levels": {"a": NaN, "b": Infinity, "c": 4}}')
    assert load(path, 100.0) == {"c": (4, 10)}


def test_a_restored_bucket_refills_for_the_time_it_was_away(tmp_path: Path) -> None:
    """As the service does it: never beyond capacity, debt paid first."""
    path = tmp_path / "levels.json"
    save(path, {"a": TokenBucket(10, 100, -50, 0.0)}, now=1000.0, clock_now=0.0)
    level, age = load(path, 1008.0)["a"]
    assert TokenBucket(10, 100, level, 500.0 - age).level_at(500.0) == 30
    level, age = load(path, 5000.0)["a"]
    assert TokenBucket(10, 100, level, 500.0 - age).level_at(500.0) == 100
    assert json.loads(path.read_text())["at"] == 1000.0
