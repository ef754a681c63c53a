"""Where vocabularies come from, and that none ever comes from the network."""

import base64
import hashlib
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import quicktok
from token_texts import KINDS, make

from extproc.tokens import vocabulary
from extproc.tokens.vocabulary import count_bytes, counter, preload

URL = "https://openaipublic.blob.core.windows.net/encodings/cl100k_base.tiktoken"
NAME = hashlib.sha1(URL.encode(), usedforsecurity=False).hexdigest()


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Nothing loaded yet, an empty cache directory, and no network to fall back on."""

    def no_network(*_):
        raise AssertionError

    monkeypatch.setattr(vocabulary, "_loaded", {})
    monkeypatch.setattr(socket, "socket", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    return tmp_path


def published():
    """Rebuild the file that OpenAI publishes from quicktok's copy of the vocabulary."""
    known = quicktok.get_encoding("cl100k_base")
    special = {known.encode_single_token(token) for token in known.special_tokens_set}
    ranks = [rank for rank in range(100_256) if rank not in special]
    lines = [base64.b64encode(known.decode_single_token_bytes(rank)) + b" %d\n" % rank for rank in ranks]
    return b"".join(lines)


def missing(name):
    """Stand in for a source that is not installed."""
    raise ImportError(name)


@pytest.mark.usefixtures("fresh")
def test_quicktok_serves_where_tiktoken_has_no_file():
    """An empty cache is no reason to download."""
    assert counter("cl100k_base")("Hello, world!") == 4


def test_tiktoken_comes_first_where_its_file_is_on_disk(fresh, monkeypatch):
    """And it counts the same."""
    (fresh / NAME).write_bytes(published())
    quick = quicktok.get_encoding("cl100k_base").count
    monkeypatch.setattr(vocabulary, "_from_quicktok", missing)
    count = counter("cl100k_base")
    for kind in KINDS:
        text = make(kind, 1, 4_000)
        assert count(text) == quick(text)
    assert count("a\ud800b") == 3
    assert count("<|endoftext|>") == 7


@pytest.mark.parametrize("content", [b"", b"aGk= 0\n", b"not a vocabulary"])
def test_a_damaged_file_is_passed_over(fresh, content):
    """It is neither used, nor deleted, nor replaced from the network."""
    (fresh / NAME).write_bytes(content)
    assert counter("cl100k_base")("Hello, world!") == 4
    assert (fresh / NAME).read_bytes() == content


@pytest.mark.parametrize("variables", [{"TIKTOKEN_CACHE_DIR": ""}, {"DATA_GYM_CACHE_DIR": "/nowhere"}, {}])
@pytest.mark.usefixtures("fresh")
def test_every_setting_of_the_cache_is_understood(variables, monkeypatch):
    """Switched off, elsewhere, or the default place."""
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert counter("o200k_base")("Hello, world!") == 4


@pytest.mark.usefixtures("fresh")
def test_bytes_are_the_last_resort(monkeypatch):
    """Without any vocabulary there is still a number."""
    monkeypatch.setattr(vocabulary, "_from_quicktok", missing)
    assert counter("o200k_base") is count_bytes
    assert counter("no such vocabulary") is count_bytes
    assert count_bytes("x" * 35) == 10
    assert count_bytes("") == 0
    assert count_bytes("\ud800") == 1


@pytest.mark.usefixtures("fresh")
def test_a_vocabulary_is_loaded_once(monkeypatch):
    """However many threads ask for it at the same moment."""
    loads = []

    def load(name):
        loads.append(name)
        return len

    monkeypatch.setattr(vocabulary, "_load", load)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(counter, ["o200k_base"] * 64)) == {len}
    assert loads == ["o200k_base"]


@pytest.mark.usefixtures("fresh")
def test_preload_covers_the_models_and_the_unknown():
    """What is not preloaded would be loaded in the middle of a request."""
    preload(["gpt-4", "claude-opus-4"])
    assert set(vocabulary._loaded) == {"cl100k_base", "o200k_base"}
