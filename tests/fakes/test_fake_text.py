"""Text of a given size, and its count."""

import pytest
import quicktok
from hypothesis import given
from hypothesis import strategies as st

from extproc.fakes import count_tokens, text_of_tokens
from extproc.fakes.text import ANSWER_TOKENS, answer_text

ENGLISH = """
Congress shall make no law respecting an establishment of religion, or prohibiting the free exercise thereof; or
abridging the freedom of speech, or of the press; or the right of the people peaceably to assemble, and to petition
the Government for a redress of grievances. Four score and seven years ago our fathers brought forth, on this
continent, a new nation, conceived in liberty, and dedicated to the proposition that all men are created equal. Now we
are engaged in a great civil war, testing whether that nation, or any nation so conceived, and so dedicated, can long
endure. We are met on a great battle field of that war. We have come to dedicate a portion of that field, as a final
resting place for those who here gave their lives, that that nation might live.
"""


@given(st.integers(0, 3000), st.integers(0, 50))
def test_text_has_exactly_the_tokens_asked_for(n: int, seed: int) -> None:
    """`text_of_tokens` and `count_tokens` agree, and the seed decides the text."""
    text = text_of_tokens(n, seed)
    assert count_tokens(text) == n
    assert text == text_of_tokens(n, seed)


def test_seeds_give_different_texts() -> None:
    """Prompts of the same size need not be the same prompt, long or short."""
    for n in (8, 40, 1000):
        assert len({text_of_tokens(n, seed) for seed in range(50)}) > 45


@pytest.mark.parametrize("encoding", ["o200k_base", "cl100k_base", "llama3", "qwen3"])
@pytest.mark.parametrize("text", [text_of_tokens(2000, 1), text_of_tokens(32_000, 2), "word " * 2000, ENGLISH])
def test_count_is_close_to_real_tokenizers(encoding: str, text: str) -> None:
    """A gateway that counts with a byte-pair tokenizer and keeps 5 % in reserve is never surprised."""
    ratio = count_tokens(text) / quicktok.get_encoding(encoding).count(text)
    assert 0.95 <= ratio <= 1.0


def test_other_text_is_not_free() -> None:
    """Digits, unbroken letters and other scripts cost about what they cost elsewhere."""
    assert count_tokens("") == 0
    assert count_tokens("a" * 7000) == 1000
    assert count_tokens("12345678") == 3
    chinese = "请给我写一段关于数据库连接池的说明,并解释为什么需要限流。" * 20
    real = quicktok.get_encoding("o200k_base").count(chinese)
    assert 0.75 * real < count_tokens(chinese) <= real


@given(st.integers(0, 9000), st.integers(1, 4000))
def test_answers_are_cut_from_one_text(start: int, step: int) -> None:
    """Slices of the answer text have the tokens they say, and add up, also where the text goes round."""
    first, second = answer_text(start, start + step), answer_text(start + step, start + 2 * step)
    assert count_tokens(first) == step
    assert first + second == answer_text(start, start + 2 * step)


def test_answer_text_needs_no_escaping() -> None:
    """It is put between quotes as it is."""
    text = answer_text(0, ANSWER_TOKENS)
    assert text.isascii()
    assert text.isprintable()
    assert not set('"\\') & set(text)
