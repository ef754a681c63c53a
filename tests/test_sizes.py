"""How many prompt tokens a request has at each upstream of its chain."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from math import ceil
from typing import Any

import pytest

from extproc import tokens
from extproc.admission import Admission
from extproc.core.flight import Flight
from extproc.core.policy import Kind, Limit, Policy, Route, Upstream
from extproc.core.request import Call, Dialect, Endpoint, Prompt, Usage
from extproc.sizes import Counted, Sizes, may_teach
from tests.doubles import HandClock, Observer, request

MODEL = "gpt-5"
WORDS = "The quick brown fox jumps over the lazy dog. "
DIGITS = "0123456789" * 30
"""A hundred tokens to GPT, three hundred to Qwen, which takes digits one by one."""
ARMENIAN = "Արհեստական բանականություն "


class Counting(Executor):
    """Runs what it is given at once, and remembers as which model a prompt was counted there."""

    def __init__(self) -> None:
        self.models: list[str] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.models.append(args[1])
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


class Scales:
    """Sizes over a chain of upstreams: own name of the model and rules for each."""

    def __init__(self, *upstreams: tuple[str, dict[str, Any]], executor: Executor | None = None) -> None:
        both = frozenset(Dialect)
        places = {
            f"u{i}": Upstream(f"u{i}", "fake", both, models={MODEL: own}, **rules)
            for i, (own, rules) in enumerate(upstreams)
        }
        self.chain = tuple(places)
        self.calibration = tokens.Calibration()
        policy = Policy(places, (Route("r", ("*",), self.chain),), {}, {})
        self.sizes = Sizes(policy, self.calibration, executor or Counting())

    def learn(self, own: str, ratio: float, public: str = MODEL) -> None:
        """Enough answers of an upstream's own model."""
        for _ in range(10):
            self.calibration.learn((own, public), 1000, round(1000 * ratio))

    def counted(self, call: Call, usual: int = 100) -> Counted:
        """What is counted of a call."""
        return asyncio.run(self.sizes.count(call, self.chain, usual))

    def inputs(self, call: Call, usual: int = 100) -> list[int]:
        """Prompt tokens at each upstream, in the order of the chain."""
        return list(self.sizes.inputs(call, self.chain, self.counted(call, usual)).values())


def call(text: str, **more: Any) -> Call:
    """A chat of one message."""
    return Call(Endpoint.CHAT, MODEL, prompt=Prompt((text,), messages=1), **more)


def own(text: str, model: str) -> int:
    """What a model itself would count."""
    return tokens.estimate(Prompt((text,), messages=1), model)


def window(size: int) -> dict[str, Any]:
    return {"window": size}


def test_who_counts_as_the_public_name_does_needs_nothing_of_its_own() -> None:
    """The same model, a relative, or a deployment whose name says nothing."""
    scales = Scales(("gpt-5", {}), ("gpt-5.1", {}), ("prod5", {}))
    assert scales.inputs(call(WORDS)) == [own(WORDS, MODEL)] * 3


def test_before_anything_is_learned_the_own_name_says_how_it_counts() -> None:
    """Factor and overheads of its encoding, first choice or not; a vocabulary makes no difference to prose."""
    scales = Scales(("claude-opus-4-5", {}), ("gpt-5", {}), ("mistral-large", {}), ("qwen3-32b", {}))
    names = ("claude-opus-4-5", "gpt-5", "mistral-large", "qwen3-32b")
    assert scales.inputs(call(WORDS * 9)) == [own(WORDS * 9, name) for name in names]
    assert len(set(scales.inputs(call(WORDS * 9)))) == 4


def test_each_is_corrected_by_what_its_own_model_has_taught() -> None:
    """As counted by the public name; whatever it has taught of another public name is another matter."""
    scales = Scales(("gpt-5", {}), ("claude-opus-4-5", {}), ("llama-2-70b", {}))
    plain = own(WORDS * 9, MODEL)
    scales.learn("claude-opus-4-5", 1.5)
    scales.learn("llama-2-70b", 0.8, public="claude-sonnet-4-5")
    assert scales.inputs(call(WORDS * 9)) == [plain, -(-plain * 3 // 2), own(WORDS * 9, "llama-2-70b")]
    scales.learn("llama-2-70b", 2.0)
    assert scales.inputs(call(WORDS * 9))[2] == 2 * plain


def test_between_known_vocabularies_there_is_no_ratio() -> None:
    """It would be one of scripts: digits taught it, and prose would be held to be three times as large. Nobody teaches
    it, and what was taught all the same says nothing.
    """
    scales = Scales(("gpt-5", {}), ("qwen3-32b", {}), ("claude-opus-4-5", {}))
    scales.learn("qwen3-32b", 2.9)
    assert scales.inputs(call(WORDS * 9))[1] == own(WORDS * 9, "qwen3-32b")
    upstreams = scales.sizes._upstreams
    assert not may_teach(upstreams["u0"], "qwen3-32b", MODEL)
    assert may_teach(upstreams["u0"], "claude-opus-4-5", MODEL)
    assert may_teach(upstreams["u0"], "gpt-5", MODEL)
    assert may_teach(upstreams["u1"], "qwen3-32b", MODEL)
    assert not may_teach(upstreams["u1"], "gpt-5", MODEL)


def test_only_who_reads_with_the_vocabulary_that_counted_teaches() -> None:
    """Or whose own nobody published: an upstream that answers in another known one is not learned of."""
    scales = Scales(("gpt-5", {}), ("qwen3-32b", {}), ("claude-opus-4-5", {}))
    policy = Policy(scales.sizes._upstreams, (Route("r", ("*",), scales.chain),), {}, {})
    admission = Admission(policy, HandClock(), Observer(), grace_s=5.0)
    flight = Flight(request(model=MODEL, route="r", counted=100))
    for name in scales.chain * 10:
        admission._learn_size(flight, name, Usage(input=250), complete=False)
    learned = [admission.calibration.learned((own, MODEL)) for own in ("gpt-5", "qwen3-32b", "claude-opus-4-5")]
    assert learned == [pytest.approx(2.5), None, pytest.approx(2.5)]


@pytest.mark.parametrize("text", [WORDS * 9, DIGITS, ARMENIAN * 20])
def test_a_prompt_is_counted_with_the_vocabulary_of_who_reads_it_first(text: str) -> None:
    """Where that is known, whatever callers call it; those behind it are held against their own as ever."""
    scales, counting = Scales(("qwen3-32b", {}), ("gpt-5", {})), Counting()
    asked = call(text)
    assert scales.inputs(asked)[0] == own(text, "qwen3-32b")
    assert scales.counted(asked) == Counted(own(text, "qwen3-32b"), by="qwen3-32b")
    scales.learn("qwen3-32b", 1.5)
    assert scales.inputs(asked)[0] == ceil(own(text, "qwen3-32b") * 1.5)
    edge = Scales(("qwen3-32b", {}), ("gpt-5", window(own(text, MODEL) + 1)), executor=counting)
    assert edge.inputs(replace(asked, output_cap=1)) == [own(text, "qwen3-32b"), own(text, MODEL)]
    unnamed = Scales(("prod5", {}), ("qwen3-32b", {}))
    assert unnamed.counted(asked) == Counted(own(text, MODEL))


@pytest.mark.parametrize(
    ("chain", "taught"),
    [(["gpt-5"], "gpt-5"), (["prod5"], "prod5"), (["qwen3-32b"], "qwen3-32b"), (["gpt-5", "prod5"], "gpt-5")],
)
@pytest.mark.parametrize("cap", [None, 10])
def test_a_ratio_alone_keeps_nobody_out_whose_own_count_would_fit(
    chain: list[str], taught: str, cap: int | None
) -> None:
    """What others' prompts have taught, be it of pictures or of hidden instructions, is no reason to refuse this one:
    neither at a window, a limit, nor at what its tenant may use. As far as the ratio lets it in, it holds.
    """
    read_as = MODEL if chain == ["prod5"] else chain[0]
    plain = own(WORDS * 9, read_as)
    for rules, tpm in (
        (window(plain + 60), None),
        ({"limits": (Limit("*", Kind.INPUT, plain, 1),)}, None),
        ({}, plain + 60),
    ):
        scales = Scales(*((name, rules) for name in chain))
        scales.learn(taught, 2.0)
        asked = call(WORDS * 9, output_cap=cap)
        counted = asyncio.run(scales.sizes.count(asked, scales.chain, 100, tpm))
        assert list(scales.sizes.inputs(asked, scales.chain, counted).values()) == [plain] * len(chain)
        wide = asyncio.run(scales.sizes.count(call(WORDS), scales.chain, 1, tpm))
        assert set(scales.sizes.inputs(call(WORDS), scales.chain, wide).values()) == {2 * own(WORDS, read_as)}


def test_what_does_not_fit_by_its_own_count_is_as_large_as_the_ratio_says() -> None:
    """And where nobody published the vocabulary, the ratio is all that is known."""
    plain = own(WORDS * 9, MODEL)
    scales = Scales(("gpt-5", window(plain)), ("claude-opus-4-5", window(2 * plain)))
    scales.learn("gpt-5", 1.5)
    scales.learn("claude-opus-4-5", 2.5)
    assert scales.inputs(call(WORDS * 9, output_cap=1)) == [ceil(1.5 * plain), ceil(2.5 * plain)]


def test_what_the_first_has_learned_holds_for_who_counts_alike() -> None:
    """Until that one has taught its own: both are probably one model under two names."""
    scales = Scales(("gpt-5", {}), ("prod5", {}), ("claude-opus-4-5", {}))
    plain = own(WORDS * 9, MODEL)
    scales.learn("gpt-5", 2.0)
    assert scales.inputs(call(WORDS * 9)) == [2 * plain, 2 * plain, own(WORDS * 9, "claude-opus-4-5")]
    scales.learn("prod5", 3.0)
    assert scales.inputs(call(WORDS * 9))[:2] == [2 * plain, 3 * plain]


@pytest.mark.parametrize(
    ("rules", "cap", "anew"),
    [
        ({}, 10, False),
        (window(10 + 4 * 108), 10, False),
        (window(9 + 4 * 108), 10, True),
        (window(10 + 27), 10, True),
        (window(9 + 27), 10, False),
        (window(100 + 4 * 108), None, False),
        (window(99 + 4 * 108), None, True),
        (window(1 + 27), None, True),
        (window(27), None, False),
        ({"limits": (Limit("*", Kind.TOTAL, 300, 1),)}, 10, True),
        ({"limits": (Limit("*", Kind.INPUT, 300, 1),)}, 10, True),
        ({"limits": (Limit("*", Kind.TOTAL, 300, 1, shadow=True),)}, 10, False),
        ({"limits": (Limit("*", Kind.OUTPUT, 300, 1),)}, 10, False),
        ({"limits": (Limit("*", Kind.REQUESTS, 1, 1),)}, 10, False),
    ],
)
def test_a_text_is_counted_anew_only_where_it_matters(
    rules: dict[str, Any],
    cap: int | None,
    anew: bool,  # noqa: FBT001
) -> None:
    """Where a window or a limit lies between the least and the most that another vocabulary may make of it."""
    scales = Scales(("gpt-5", rules), ("qwen3-32b", rules))
    asked = call(DIGITS, output_cap=cap)
    assert scales.counted(asked).anew == ({"u1": 308} if anew else {})
    assert scales.inputs(asked) == [107, 308 if anew else 108]


def test_a_script_that_not_everyone_knows_is_counted_anew_from_further_away() -> None:
    """GPT-5 knows Armenian; the vocabulary before it takes several tokens for a word of it."""
    text = ARMENIAN * 20
    plain, spelled = own(text, MODEL), own(text, "gpt-4")
    assert spelled > 5 * plain
    scales = Scales(("gpt-5", {}), ("gpt-4", window(6 * plain)))
    assert scales.inputs(call(text, output_cap=1)) == [plain, spelled]


def test_what_is_learned_spares_the_count() -> None:
    """And holds instead of it, where the vocabulary that counts is none of its own."""
    scales = Scales(("gpt-5", {}), ("llama-2-70b", window(300)))
    assert scales.counted(call(DIGITS, output_cap=1)).anew
    scales.learn("llama-2-70b", 2.0)
    assert scales.counted(call(DIGITS, output_cap=1)).anew == {}
    assert scales.inputs(call(DIGITS, output_cap=1)) == [107, 214]


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """Real ones."""
    with ThreadPoolExecutor(2) as executor:
        yield executor


def test_long_prompts_are_counted_in_a_thread_once_for_each_name(threads: ThreadPoolExecutor) -> None:
    """Anew too, and only for who is near its window."""
    text, executor = DIGITS * 100, Counting()
    near = ("qwen3-32b", window(40_000))
    upstreams = (("gpt-5", {}), near, near, ("llama-3-8b", window(10**7)), ("llama-3-70b", window(20_000)))
    inputs = Scales(*upstreams, executor=executor).inputs(call(text, output_cap=1))
    assert executor.models[0] == MODEL
    assert sorted(executor.models) == sorted([MODEL, "qwen3-32b", "llama-3-70b"])
    assert inputs[1] == inputs[2] == own(text, "qwen3-32b") > 25_000
    assert inputs == Scales(*upstreams, executor=threads).inputs(call(text, output_cap=1))


def test_what_is_not_priced_in_tokens_has_none_anywhere() -> None:
    """Not even an overhead."""
    scales = Scales(("gpt-5", {}), ("qwen3-32b", window(300)))
    asked = replace(call(DIGITS), endpoint=Endpoint.COUNT_TOKENS)
    assert scales.inputs(asked) == [0, 0]


def test_who_generates_nothing_needs_room_for_its_prompt_alone() -> None:
    """An embedding near a window is counted anew by its prompt."""
    scales = Scales(("gpt-5", {}), ("qwen3-32b", window(4 * 100)))
    asked = Call(Endpoint.EMBEDDINGS, MODEL, prompt=Prompt((DIGITS,)))
    assert scales.counted(asked).anew == {}
    scales = Scales(("gpt-5", {}), ("qwen3-32b", window(4 * 100 - 1)))
    assert scales.counted(asked).anew == {"u1": 300}
