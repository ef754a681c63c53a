"""Rewriting a body: a head of fixed width per upstream, every other byte as it came."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.request import Endpoint
from extproc.dialects import read, rewrite

MESSAGES = b'"messages":[{"role":"user","content":"hi"}]'


def document(body, endpoint=Endpoint.CHAT):
    """Read a body given as bytes."""
    return read(endpoint, body)


def test_nothing_to_change_leaves_the_body_alone():
    """The client's own bytes pass where every upstream has the same name for the model."""
    read_body = document(b'{"model":"m",' + MESSAGES + b"}")
    assert rewrite(read_body, {"a": "m"}, ("a", "b")) is None
    assert rewrite(read_body, {}, ()) is None
    asked = b'{"model":"m","stream":true,"stream_options":{"include_usage":true},' + MESSAGES + b"}"
    assert rewrite(document(asked), {}, ("a",)) is None
    streaming = b'{"model":"m","stream":true,"max_tokens":1,' + MESSAGES + b"}"
    assert rewrite(document(streaming, Endpoint.MESSAGES), {}, ("a",)) is None
    assert rewrite(document(b'{"model":"m","input":"x","stream":true}', Endpoint.RESPONSES), {}, ("a",)) is None


def test_heads_share_one_width_and_the_rest_is_untouched():
    """The first upstream's head is in the body; any other can be laid over it."""
    body = b'{ "temperature" : 1e400 , "model" : "gpt-4o" ,\n "x":"\\ud800 \xe6\xbc\xa2",' + MESSAGES + b" }"
    changed = rewrite(document(body), {"azure": "prod", "vllm": "org/qwen3-32b"}, ("azure", "openai", "vllm"))
    assert (
        changed.body == b'{"model":"prod"         ,"temperature" : 1e400,"x":"\\ud800 \xe6\xbc\xa2",' + MESSAGES + b"}"
    )
    assert changed.heads == {
        "azure": '{"model":"prod"         ',
        "openai": '{"model":"gpt-4o"       ',
        "vllm": '{"model":"org/qwen3-32b"',
    }
    assert changed.width == 24


def test_one_head_for_all_needs_no_list():
    """Where the upstreams agree, only the body is given."""
    changed = rewrite(document(b'{"model":"m",' + MESSAGES + b"}"), {"a": "x", "b": "x"}, ("a", "b"))
    assert (changed.heads, changed.body) == (None, b'{"model":"x",' + MESSAGES + b"}")
    assert changed.width == len('{"model":"x"')


@pytest.mark.parametrize(
    ("options", "merged"),
    [
        (b"", {"include_usage": True}),
        (b'"stream_options":null,', {"include_usage": True}),
        (b'"stream_options":{"include_usage":false},', {"include_usage": True}),
        (b'"stream_options":{"x":"\xc3\xa9","y":[1]},', {"x": "é", "y": [1], "include_usage": True}),
    ],
)
def test_usage_is_asked_for_and_the_clients_options_stay(options, merged):
    """Streams of the OpenAI family report usage only when asked."""
    body = b'{"model":"m","stream":true,' + options + MESSAGES + b"}"
    changed = rewrite(document(body), {}, ("a",))
    assert json.loads(changed.body) == {**json.loads(body), "stream_options": merged}
    assert changed.body[: changed.width].isascii()


@pytest.mark.parametrize("key", [b"model", b"stream", b"max_tokens", b"messages", b"m\\u006fdel", b"anything"])
def test_a_repeated_key_is_left_once(key):
    """A caller cannot be priced on one value and served on another."""
    values = {b"stream": (b"true", b"false"), b"max_tokens": (b"1", b"2"), b"messages": (b"[]", b'[{"content":"a"}]')}
    first, last = values.get(key, (b'"a"', b'"b"'))
    body = b'{"model":"m",%s,"%s":%s,"%s":%s}' % (MESSAGES, key, first, key, last)
    changed = rewrite(document(body), {}, ("a",))
    pairs = json.loads(changed.body, object_pairs_hook=lambda pairs: pairs)
    assert len(dict(pairs)) == len(pairs)
    assert json.loads(changed.body) == json.loads(body)


def test_priority_is_ours_once_it_is_given():
    """Engines that sort by priority get it; a client cannot set its own there."""
    plain = document(b'{"model":"m",' + MESSAGES + b"}")
    claimed = document(b'{"priority":-99,"model":"m",' + MESSAGES + b"}")
    assert rewrite(plain, {}, ("a",), priorities={}) is None
    assert rewrite(claimed, {}, ("a",)) is None
    assert "priority" not in json.loads(rewrite(claimed, {}, ("a",), priorities={}).body)
    changed = rewrite(claimed, {}, ("a", "b", "c"), priorities={"a": 0, "b": -7})
    assert {name: json.loads(head + "}").get("priority") for name, head in changed.heads.items()} == {
        "a": 0,
        "b": -7,
        "c": None,
    }
    assert json.loads(changed.body)["priority"] == 0


def test_a_body_of_nothing_but_a_model():
    """No other member, no comma."""
    changed = rewrite(document(b'{"model":"m"}', Endpoint.OTHER), {"a": "n"}, ("a",))
    assert changed.body == b'{"model":"n"}'


def test_a_body_without_a_model_is_never_rewritten():
    """Forms and files pass as they are."""
    assert rewrite(document(b"\x00\x01", Endpoint.OTHER), {"a": "n"}, ("a",)) is None
    assert rewrite(document(b'{"x":1,"x":2}', Endpoint.OTHER), {"a": "n"}, ("a",)) is None


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
# Keys that reading looks at have types to keep to; here they would only make bodies that are refused.
KEYS = st.text(max_size=8).map(lambda key: f"x{key}") | st.sampled_from(
    ["user", "Model", "model ", "priority", "\\", '"']
)
OPTIONS = st.dictionaries(st.text(max_size=4).map(lambda key: f"x{key}"), VALUES, max_size=2)
SPACES = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n\t", " :\r\n ")])


@given(
    extra=st.dictionaries(KEYS, VALUES, max_size=5),
    own=st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=4),
    options=st.none() | OPTIONS.filter(lambda options: len(json.dumps(options)) < 900),
    stream=st.booleans(),
    repeat=st.booleans(),
    escape=st.booleans(),
    spaces=SPACES,
)
def test_every_head_makes_the_same_body_with_its_own_name(extra, own, options, stream, repeat, escape, spaces):
    """Whatever the members: the parsed body differs in model and stream_options only, and the rest in no byte."""
    comma, colon = spaces
    members = {**extra, "messages": [{"role": "user", "content": "hi \u00e9 😀"}], "stream": stream, "model": "asked"}
    if options is not None:
        members["stream_options"] = options
    texts = {
        key: (json.dumps(key) + colon + json.dumps(value, ensure_ascii=escape, separators=spaces)).encode()
        for key, value in members.items()
    }
    written = [b'"model":"cheap"', *texts.values()] if repeat else list(texts.values())
    body = b"{ " + comma.encode().join(written) + b"\n}"
    order = [f"u{index}" for index in range(len(own))]
    changed = rewrite(document(body), dict(zip(order, own, strict=True)), order)
    if changed is None:
        assert all(name == "asked" for name in own)
        assert not repeat
        assert not stream
        return
    expected = {**members, "stream_options": {**(options or {}), "include_usage": True}} if stream else members
    ours = {"model", "stream_options"} if stream else {"model"}
    rest = b"".join(b"," + text for key, text in texts.items() if key not in ours) + b"}"
    for upstream, name in zip(order, own, strict=True):
        head = changed.heads[upstream].encode() if changed.heads else changed.body[: changed.width]
        assert len(head) == changed.width
        laid_over = head + changed.body[changed.width :]
        assert json.loads(laid_over) == {**expected, "model": name}
        assert laid_over[changed.width :] == rest
