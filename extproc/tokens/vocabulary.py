"""Vocabularies: from a name to a function that counts tokens, without ever touching the network.

In order: tiktoken, where its vocabulary file lies in its cache directory with the right checksum; quicktok, which comes
with its vocabularies and gives the same numbers; a number of bytes per token, where neither can be had. tiktoken
downloads what is missing, so its own loader is never called: its encodings are built with a loader that reads the
cache and gives up.

Loading takes up to half a second and happens once; `preload` does it before traffic comes. Counting is safe from any
thread. Special tokens in a prompt (`<|endoftext|>`) are counted as the plain text they are to a provider.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import tempfile
from importlib import import_module
from pathlib import Path
from threading import Lock
from types import FunctionType
from typing import TYPE_CHECKING

from extproc.tokens.encodings import O200K, encoding_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Counter = Callable[[str], int]

__all__ = ["count_bytes", "counter", "preload"]

# English prose has 4.4 bytes per token, code 4, Chinese 3.2, base64 1.5: rather too many tokens than too few.
BYTES_PER_TOKEN = 3.5

_loaded: dict[str, Counter] = {}
_loading = Lock()


def counter(vocabulary: str) -> Counter:
    """Return the function that counts tokens with this vocabulary, loading it the first time."""
    found = _loaded.get(vocabulary)
    if found is None:
        with _loading:
            found = _loaded.get(vocabulary) or _load(vocabulary)
            _loaded[vocabulary] = found
    return found


def preload(models: Iterable[str]) -> None:
    """Load the vocabularies of these models, and the one for models nobody has heard of."""
    for vocabulary in {O200K, *(encoding_for(model).vocabulary for model in models)}:
        counter(vocabulary)


def count_bytes(text: str) -> int:
    """Guess the tokens of a text from its length in bytes."""
    return math.ceil(len(text.encode("utf-8", "replace")) / BYTES_PER_TOKEN)


def _load(vocabulary: str) -> Counter:
    for source in (_from_tiktoken, _from_quicktok):
        try:
            return _lenient(source(vocabulary))
        except (ImportError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError):
            continue
    return count_bytes


def _lenient(count: Counter) -> Counter:
    """Let lone surrogates, which JSON can carry and UTF-8 cannot, count as a replacement character."""

    def counted(text: str) -> int:
        try:
            return count(text)
        except (TypeError, UnicodeEncodeError):
            return count(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))

    return counted


def _from_quicktok(vocabulary: str) -> Counter:
    count: Counter = import_module("quicktok").get_encoding(vocabulary).count
    return count


def _from_tiktoken(vocabulary: str) -> Counter:
    published = import_module("tiktoken_ext.openai_public").ENCODING_CONSTRUCTORS[vocabulary]
    offline = FunctionType(published.__code__, {**published.__globals__, "load_tiktoken_bpe": _ranks_on_disk})
    encode = import_module("tiktoken").Encoding(**offline()).encode_ordinary
    return lambda text: len(encode(text))


def _ranks_on_disk(url: str, expected_hash: str) -> dict[bytes, int]:
    """Read a vocabulary file from tiktoken's cache, where it is named by its address."""
    name = hashlib.sha1(url.encode(), usedforsecurity=False).hexdigest()
    data = (_cache_directory() / name).read_bytes()
    if hashlib.sha256(data).hexdigest() != expected_hash:
        raise LookupError(name)
    return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, data.splitlines())}


def _cache_directory() -> Path:
    for variable in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        named = os.environ.get(variable)
        if named is not None:
            if not named:  # the way to switch the cache off
                raise LookupError(variable)
            return Path(named)
    return Path(tempfile.gettempdir()) / "data-gym-cache"
