"""Estimates: exact where they can be, sampled where they must be, bounded in time always."""

import time
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_texts import KINDS, blanks, halves, make, patchwork, prose, stripes

from extproc.core.request import Prompt
from extproc.tokens import encoding_for, estimate, is_long, preload, recounted, spread
from extproc.tokens.vocabulary import counter

O200K = "gpt-4o"


@pytest.fixture(scope="module", autouse=True)
def _loaded():
    preload(["gpt-4o", "gpt-4", "llama-3.3-70b", "qwen3-32b"])


@pytest.mark.parametrize(
    ("model", "text", "tokens"),
    [
        ("gpt-4o", "Hello, world!", 4),
        ("gpt-4", "Hello, world!", 4),
        ("gpt-4o", "你好,世界!", 4),
        ("gpt-4", "你好,世界!", 7),
        ("gpt-4o", "<|endoftext|>", 7),
        ("gpt-4o", "", 0),
        ("llama-3.3-70b", "12345678", 3),
        ("qwen3-32b", "12345678", 8),
    ],
)
def test_text_is_counted_exactly_with_published_vocabularies(model, text, tokens):
    """A special token in a prompt is plain text."""
    assert estimate(Prompt((text,)), model) == tokens


def test_what_stands_beside_the_text():
    """Messages have frames, the answer a start, tools a preamble, images a price; token ids are tokens."""
    assert estimate(Prompt(messages=3), O200K) == 3 * 4 + 3
    assert estimate(Prompt(tools=2), O200K) == 2 * 3 + 9
    assert estimate(Prompt(images=2), O200K) == 2 * 765
    assert estimate(Prompt(images=1), "gpt-4o-mini") == 25_501
    assert estimate(Prompt(images=1), "claude-sonnet-4-5") == 1_600
    assert estimate(Prompt(tools=1), "claude-sonnet-4-5") == 349
    assert estimate(Prompt(messages=1), "qwen3-32b") == 5 + 3
    assert estimate(Prompt(token_ids=123), O200K) == 123


def test_a_chat_is_near_what_openai_reports():
    """The cookbook's own example: 129 tokens by gpt-4's count."""
    messages = [
        "You are a helpful, pattern-following assistant that translates corporate jargon into plain English.",
        "New synergies will help drive top-line growth.",
        "Things working well together will increase revenue.",
        "Let's circle back when we have more bandwidth to touch base on opportunities for increased leverage.",
        "Let's talk later when we're less busy about how to do better.",
        "This late pivot means we don't have time to boil the ocean for the client deliverable.",
    ]
    assert abs(estimate(Prompt(tuple(messages), messages=6), "gpt-4") - 119) <= 8


def test_other_tokenizers_start_from_a_factor():
    """Claude's text counts 1.2 times as much; what is beside the text does not."""
    text = "The quick brown fox jumps over the lazy dog. " * 20
    plain = estimate(Prompt((text,)), O200K)
    assert estimate(Prompt((text,), token_ids=7), "claude-opus-4") == ceil(plain * 1.2) + 7
    assert estimate(Prompt((text,)), "never-heard-of") == ceil(plain * 1.1)


def test_lone_surrogates_are_counted():
    """JSON can carry them; each is a replacement character or less."""
    assert 0 < estimate(Prompt(("a\ud800b" * 10,)), O200K) < 100
    assert estimate(Prompt(("a \ud800 b" * 10_000,)), O200K) > 10_000


def test_long_prompts_belong_into_a_thread():
    """By the length of the text, or by the number of texts."""
    assert not is_long(Prompt(("x" * 16_000,)))
    assert is_long(Prompt(("x" * 17_000,)))
    assert is_long(Prompt(("x" * 6_000,) * 3))
    assert not is_long(Prompt(("x",) * 900))
    assert is_long(Prompt(("x",) * 1_000))
    assert not is_long(Prompt(token_ids=10**6))


SAMPLED = [*KINDS, patchwork, halves, stripes]


def errors(kind, size, many):
    """Return the relative errors of sampled counts, smallest first."""
    count = counter(encoding_for(O200K).vocabulary)
    texts = [make(kind, seed, size) for seed in range(many)]
    return sorted(abs(estimate(Prompt((text,)), O200K) / count(text) - 1) for text in texts)


@pytest.mark.parametrize("size", [50_000, 150_000])
@pytest.mark.parametrize("kind", SAMPLED, ids=lambda kind: kind.__name__)
def test_sampling_error_on_real_looking_texts(kind, size):
    """Within 6 % on every one of them, half within 3 %."""
    found = errors(kind, size, 9)
    assert found[-1] < 0.06
    assert found[4] < 0.03


def test_sampling_error_over_all_of_them():
    """Within 4 % in 99 of 100."""
    found = sorted(error for kind in SAMPLED for error in errors(kind, 40_000, 15))
    assert found[int(len(found) * 0.99)] < 0.04


def test_sampling_error_on_a_text_made_to_mislead():
    """Within 25 %: what is left over, reported usage puts right."""
    assert errors(blanks, 200_000, 8)[-1] < 0.25


def test_the_count_does_not_jump_where_sampling_begins():
    """From whole to sampled is a matter of a few per cent."""
    for size in (15_000, 20_000, 32_000, 33_000, 40_000):
        text = make(prose, 7, size)
        assert estimate(Prompt((text,)), O200K) == pytest.approx(counter("o200k_base")(text), rel=0.05)


def test_the_same_prompt_has_the_same_price():
    """Sampling is not a lottery: every replica estimates alike."""
    prompt = Prompt((make(patchwork, 3, 150_000),))
    assert len({estimate(prompt, O200K) for _ in range(3)}) == 1


def test_many_texts_are_sampled_as_one():
    """A conversation of many turns is priced like its text in one piece."""
    text = make(prose, 5, 200_000)
    turns = tuple(text[at : at + 800] for at in range(0, len(text), 800))
    assert estimate(Prompt(turns), O200K) == pytest.approx(counter("o200k_base")(text), rel=0.05)


def test_every_text_is_at_least_a_token():
    """A million single letters do not hide as one long word."""
    assert estimate(Prompt(("a",) * 1_000_000), O200K) >= 1_000_000


HOSTILE = {
    **{letter: letter * 5_000_000 for letter in ("a", " ", "\n", "!", "1", "\x00")},
    **{letter: letter * 1_700_000 for letter in ("漢", "\u200d", "e\u0301", "\ud800")},
    **{letters: letters * 250_000 for letters in ("aB", "👨\u200d👩\u200d👧", "<|endoftext|>")},
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=map(ascii, HOSTILE))
@pytest.mark.parametrize("model", ["gpt-4o", "gpt-4", "llama-3.3-70b", "qwen3-32b"])
def test_hostile_texts_take_no_longer(text, model):
    """Five megabytes without a place to cut are done in no time: the tokenizer sees 32 KB of them."""
    estimate(Prompt(("the first of a model has its vocabulary read",)), model)
    begun = time.thread_time()
    assert estimate(Prompt((text,)), model) > 1_000
    assert time.thread_time() - begun < 0.5


@given(
    st.lists(st.text(max_size=50), max_size=8), st.integers(0, 5), st.sampled_from(["gpt-4o", "claude", "qwen3", "x"])
)
def test_a_longer_prompt_never_costs_less(texts, messages, model):
    """Adding a text or a message adds to the price."""
    prompt = Prompt(tuple(texts), messages=messages)
    more = Prompt((*texts, "and more"), messages=messages + 1)
    assert 0 <= estimate(prompt, model) < estimate(more, model)


MODELS = ("gpt-4o", "gpt-4", "claude-sonnet-4-5", "gemini-2.5-pro", "llama-2-7b", "llama-3-8b", "qwen3-32b", "new")


@given(
    st.text(max_size=300),
    st.integers(0, 3),
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from(MODELS),
    st.sampled_from(MODELS),
)
def test_where_the_vocabulary_is_one_an_estimate_turns_into_another(text, messages, tools, images, first, second):
    """To the token, whatever the factors and overheads; another vocabulary counts as many words."""
    prompt = Prompt((text,), messages=messages, tools=tools, images=images, token_ids=3)
    of, by = encoding_for(first), encoding_for(second)
    found = recounted(estimate(prompt, first), prompt, of, by)
    if of.vocabulary == by.vocabulary:
        assert found == estimate(prompt, second)
    words = counter(of.vocabulary)(text)
    beside = estimate(Prompt(messages=messages, tools=tools, images=images, token_ids=3), second)
    assert found == ceil(words * by.factor) + beside


SCRIPTS = {
    "armenian": "Արհեստական բանականությունը մեքենաների կողմից դրսևորվող բանականությունն է ",
    "georgian": "ხელოვნური ინტელექტი არის მანქანების მიერ გამოვლენილი ინტელექტი. ",
    "malayalam": "യന്ത്രങ്ങൾ പ്രകടിപ്പിക്കുന്ന ബുദ്ധിയാണ് കൃത്രിമബുദ്ധി. ",
    "chinese": "人工智慧是電腦科學的一個分支它企圖瞭解智慧的實質。",
    "russian": "Искусственный интеллект есть свойство интеллектуальных систем. ",
    "digits": "31415926535897932384626433832795028841971693993751058209749445923078164062862089986280",
    "newlines": "\n" * 80,
}


@pytest.mark.parametrize("text", [*SCRIPTS.values(), *(make(kind, 1, 4_000) for kind in KINDS)])
def test_no_vocabulary_makes_more_of_a_text_than_another_beyond_its_spread(text):
    """In scripts that one of them knows and another spells, too."""
    counts = [counter(encoding_for(model).vocabulary)(text * 20) for model in MODELS]
    assert max(counts) / min(counts) < spread(Prompt((text,)))


def test_scripts_differ_more_than_ascii():
    """A letter that is not is enough."""
    assert spread(Prompt()) == spread(Prompt(("a", "b\n"))) == 4
    assert spread(Prompt(("a", "ä"))) == 8
