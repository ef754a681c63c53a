"""Which vocabulary counts a model's tokens, and what a prompt costs beside its text.

OpenAI, Llama 3 and Qwen publish their vocabularies, so their counts are exact but for the chat template. Anthropic,
Google, DeepSeek and others are counted with `o200k_base` times a factor. A large byte-pair vocabulary splits prose,
code and Chinese at much the same places as another one does, so its count times a constant is far nearer than any
number of bytes per token, which differs threefold between prose and base64. The factors come from published
comparisons, rounded up; an unknown model gets 1.1. They are where the learned calibration starts, no more.

Overheads: a chat message costs its frame (4 tokens at OpenAI, role included; 5 in the templates of Llama and Qwen), and
the start of the answer 3. Tools cost their JSON text, 3 tokens each, and a preamble once. An image costs what its
provider takes for a picture of about a megapixel in full detail.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

__all__ = ["CL100K", "LLAMA3", "O200K", "QWEN3", "Encoding", "encoding_for", "encoding_of", "measured_as"]

O200K, CL100K, LLAMA3, QWEN3 = "o200k_base", "cl100k_base", "llama3", "qwen3"


@dataclass(frozen=True, slots=True)
class Encoding:
    """How to count for a model: tokens of text are counted by `vocabulary` and multiplied by `factor`.

    message, tool, image: tokens for each; answer: tokens to start the answer; tools: tokens once where there are tools.
    known: that is the model's own vocabulary, and not merely one that is like it.
    """

    vocabulary: str
    factor: float = 1.0
    message: int = 4
    answer: int = 3
    tool: int = 3
    tools: int = 9
    image: int = 765
    known: bool = False

    def strange_to(self, by: Encoding) -> bool:
        """Whether it is known that what was counted by another one says little of it: texts differ too much."""
        return self.known and self.vocabulary != by.vocabulary


_OPENAI = Encoding(O200K, known=True)
_PATCHED = replace(_OPENAI, image=1_700)  # models that cut an image into patches of 32 pixels
_OPEN = Encoding(O200K, message=5)
_LLAMA = Encoding(LLAMA3, message=5, tools=60, image=1_600, known=True)
_QWEN = Encoding(QWEN3, message=5, tools=60, image=1_370, known=True)

# First match wins. A name matches from its start or after any character that is no letter or digit, so that
# "azure/gpt-4o", "ft:gpt-4o:org" and "us.anthropic.claude-..." are recognised.
_TABLE: tuple[tuple[str, Encoding], ...] = (
    (r"gpt-4o-mini", replace(_OPENAI, image=25_501)),
    (r"gpt-(?:4\.1|[5-9][0-9.]*)-(?:mini|nano)|o4-mini", _PATCHED),
    (r"gpt-oss", replace(_OPEN, known=True)),
    (r"gpt-?4o|gpt-4\.[1-9]|gpt-[5-9]|gpt-[12][0-9](?![0-9])|chatgpt|o[1-9](?![a-z0-9])|codex", _OPENAI),
    (r"gpt-?4|gpt-3\.?5|text-embedding-|davinci-002|babbage-002", Encoding(CL100K, known=True)),
    (r"gpt", _OPENAI),
    (r"claude", Encoding(O200K, factor=1.2, tools=346, image=1_600)),
    (r"gemini|gemma", Encoding(O200K, factor=1.05, image=1_120)),
    (r"llama-?4", replace(_OPEN, image=1_600)),
    (r"llama-?2|codellama|vicuna|mixtral|mistral-7b", replace(_LLAMA, factor=1.25, known=False)),
    (r"(?:meta-)?llama", _LLAMA),
    (r"qwen|qwq|qvq|tongyi", _QWEN),
    (r"deepseek", replace(_OPEN, factor=1.05)),
    (r"(?:mi|mini|code|magi|dev|vox)stral|pixtral", replace(_OPEN, factor=1.1, image=1_600)),
    (r"kimi|moonshot", _OPEN),
    (r"glm|command|minimax", replace(_OPEN, factor=1.05)),
)
_PATTERNS = tuple((re.compile(rf"(?<![a-z0-9])(?:{pattern})"), encoding) for pattern, encoding in _TABLE)
_UNKNOWN = replace(_OPEN, factor=1.1)


@lru_cache(maxsize=1_024)
def encoding_for(model: str) -> Encoding:
    """Return how to count for a model, by its name alone."""
    name = model.lower()
    return next((encoding for pattern, encoding in _PATTERNS if pattern.search(name)), _UNKNOWN)


@lru_cache(maxsize=1_024)
def encoding_of(own: str, public: str) -> Encoding:
    """Return how to count for a model that its upstream calls `own`.

    Where that says nothing, as the name of a deployment, it is taken to be what callers call it: `public`.
    """
    found = encoding_for(own)
    return encoding_for(public) if found is _UNKNOWN else found


@lru_cache(maxsize=1_024)
def measured_as(own: str, public: str) -> str:
    """Return as which model a prompt for `public` is counted that goes to one called `own` first.

    By the vocabulary of who will read it, where that is known; else by what callers call it.
    """
    return own if encoding_of(own, public).strange_to(encoding_for(public)) else public
