"""What an engine's metrics page says of its KV cache: a few numbers out of a text of thousands of lines.

The page is not parsed as a whole. Each wanted name is searched for in the bytes, and only its own lines are read; so a
page of 1,500 lines costs a fraction of a millisecond, several times a second, for each instance.

One instance may tell a name several times, once for each engine in it. Series that differ only in a worker's rank
(`tp_rank`, `pp_rank`, `moe_ep_rank`) are the same engine told again: the largest counts. Series of different engines
(`engine`, `dp_rank`) add up, except for shares, of which the largest counts. Where SGLang schedules by priority it
tells the total (`priority=""`) and then its parts: only the total counts.

What cannot be is not guessed at: a used share of 37 was meant in percent, perhaps, and is refused with that hint.

Deliberately not here: whom to ask, and when (engines), and what follows from the numbers (core.watermark).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from math import inf, isfinite

from extproc.core.value import value
from extproc.settings import EngineMetrics

__all__ = ["Absent", "Page", "Sample", "Unreadable", "highest"]

A_LITTLE_OVER = 1.05
"""Shares are rounded and sampled: up to here they are full caches."""
RANKS = frozenset({b"tp_rank", b"pp_rank", b"moe_ep_rank", b"attn_tp_rank", b"pid"})

_LABELS = re.compile(rb'\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\}')
_LABEL = re.compile(rb'([A-Za-z_][A-Za-z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"')
_NAMED = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?")

Labels = dict[bytes, bytes]


class Unreadable(Exception):  # noqa: N818 - what the page is
    """The page does not say what it should; the message says what is missing, for an operator."""


class Absent(Unreadable):
    """What is looked for is not on the page."""


@value
class Sample:
    """One instance at one moment.

    usage: used share of the KV cache, 0..1. waiting, running: requests. preemptions: since the engine started. tokens:
    size of the cache, None when not told. pulse: numbers that move whenever the engine does anything.
    """

    usage: float
    waiting: float = 0.0
    running: float = 0.0
    preemptions: float = 0.0
    tokens: float | None = None
    pulse: tuple[float, ...] = ()


class Page:
    """Reads the pages of one kind of engine. Names may select by labels: `name{kind="used"}`."""

    def __init__(self, names: EngineMetrics) -> None:
        """Know what to look for."""
        self._usage = [_Wanted(name) for name in names.usage]
        self._waiting, self._running = _maybe(names.waiting), _maybe(names.running)
        self._preemptions, self._tokens = _maybe(names.preemptions), _maybe(names.tokens)
        self._config = _maybe(names.config)
        self._pulse = [_Wanted(name) for name in names.pulse]

    def read(self, page: bytes) -> Sample:
        """What the page says. Unreadable when there is no used share on it that can be one."""
        usage = self._share(page)
        waiting, running = _sum(self._waiting, page), _sum(self._running, page)
        preemptions = _sum(self._preemptions, page)
        pulse = (usage, waiting or 0.0, running or 0.0, preemptions or 0.0)
        return Sample(
            usage=usage,
            waiting=waiting or 0.0,
            running=running or 0.0,
            preemptions=preemptions or 0.0,
            tokens=self._size(page),
            pulse=(*pulse, *(_sum(name, page) or 0.0 for name in self._pulse)),
        )

    def names(self) -> list[str]:
        """Every name that is looked for, without labels."""
        others = (self._waiting, self._running, self._preemptions, self._tokens, self._config)
        return [wanted.name for wanted in (*self._usage, *others, *self._pulse) if wanted is not None]

    def missing(self, page: bytes) -> list[str]:
        """Names that are configured and not on the page; of several spellings of one, the first."""
        absent = [] if any(name.series(page) for name in self._usage) else [self._usage[0].spelled]
        others = (self._waiting, self._running, self._preemptions, self._tokens, self._config)
        return absent + [name.spelled for name in others if name is not None and not name.series(page)]

    def _share(self, page: bytes) -> float:
        for name in self._usage:
            if series := name.series(page):
                return share(max(number for _, number in series), name.spelled)
        raise Absent(f"no {' or '.join(name.spelled for name in self._usage)} on the page")

    def _size(self, page: bytes) -> float | None:
        """Tokens in the cache: told as such, or as a number of blocks, or not at all."""
        told = _sum(self._tokens, page)
        if told is None and self._config is not None:
            told = _total((labels, size) for labels, _ in self._config.series(page) if (size := _blocks(labels)))
        return told if told and told > 0 else None


def share(number: float, what: str) -> float:
    """`number` as a used share of a cache. Unreadable when it cannot be one."""
    if not 0.0 <= number <= A_LITTLE_OVER:
        hint = "; is it in percent?" if 1.0 < number < inf else ""
        raise Unreadable(f"{what} is no share of 0 to 1{hint}")
    return min(1.0, number)


def highest(answer: bytes) -> float:
    """The largest value in Prometheus' answer to an instant query. Unreadable when there is none, or an error."""
    try:
        data = json.loads(answer)["data"]
        pairs = {"scalar": lambda: [data["result"]], "vector": lambda: [row["value"] for row in data["result"]]}
        values = [float(number) for _, number in pairs[data["resultType"]]()]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        raise Unreadable("the answer is not a scalar or a vector" + _said(answer)) from None
    told = [number for number in values if isfinite(number)]
    if not told:
        raise Unreadable("the query has no result")
    return share(max(told), "the query's result")


class _Wanted:
    """One name, and the labels that a series must have."""

    def __init__(self, spelled: str) -> None:
        found = _NAMED.fullmatch(spelled)
        if found is None:
            raise ValueError(f"{spelled!r} is not the name of a metric")
        self.spelled = spelled
        self.name = found[1]
        self._bytes = found[1].encode()
        self._labels = dict(_LABEL.findall((found[2] or "").encode()))

    def series(self, page: bytes) -> list[tuple[Labels, float]]:
        """Labels and value of every line with this name; lines without a number are left out, and parts of a total."""
        found = list(self._lines(page))
        if any(labels.get(b"priority") == b"" for labels, _ in found):
            found = [(labels, number) for labels, number in found if not labels.get(b"priority")]
        return found

    def _lines(self, page: bytes) -> Iterator[tuple[Labels, float]]:
        name, length = self._bytes, len(self._bytes)
        at = page.find(name)
        while at >= 0:
            end = at + length
            if page[at - 1 : at] in (b"", b"\n") and page[end : end + 1] in (b"{", b" ", b"\t"):
                line_end = page.find(b"\n", end)
                line = page[end : line_end if line_end >= 0 else len(page)]
                if (told := _told(line)) is not None and self._labels.items() <= told[0].items():
                    yield told
            at = page.find(name, end)


def _told(line: bytes) -> tuple[Labels, float] | None:
    """Labels and value of what follows a name; a timestamp behind the value is left alone."""
    labels: Labels = {}
    if line.startswith(b"{"):
        block = _LABELS.match(line)
        if block is None:
            return None
        labels = dict(_LABEL.findall(block[1]))
        line = line[block.end() :]
    words = line.split(None, 1)
    try:
        number = float(words[0])
    except (IndexError, ValueError):
        return None
    return None if number != number else (labels, number)  # noqa: PLR0124 - not a number


def _maybe(name: str | None) -> _Wanted | None:
    return None if name is None else _Wanted(name)


def _sum(name: _Wanted | None, page: bytes) -> float | None:
    """The total over an instance's engines, None when nothing finite is told."""
    return None if name is None else _total((labels, n) for labels, n in name.series(page) if isfinite(n))


def _total(series: Iterable[tuple[Labels, float]]) -> float | None:
    """Ranks of one engine tell the same, engines add up."""
    engines: dict[tuple[tuple[bytes, bytes], ...], float] = {}
    for labels, number in series:
        engine = tuple(sorted(label for label in labels.items() if label[0] not in RANKS))
        engines[engine] = max(number, engines.get(engine, -inf))
    return sum(engines.values()) if engines else None


def _blocks(labels: Labels) -> float | None:
    """Tokens of a cache from vLLM's description of it, where a number that is not known reads `None`."""
    number: Callable[[bytes], float] = lambda name: _number(labels.get(name, b""))  # noqa: E731
    tokens = number(b"kv_cache_size_tokens") or number(b"block_size") * number(b"num_gpu_blocks")
    return tokens or None


def _number(text: bytes) -> float:
    return float(text) if text.isdigit() else 0.0


def _said(answer: bytes) -> str:
    """Prometheus' own words about a query that it cannot run."""
    try:
        error = json.loads(answer)["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return f": {str(error)[:200]}"
