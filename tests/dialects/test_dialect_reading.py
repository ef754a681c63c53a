"""Reading request bodies: what is priced, what is refused, what is let through."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Ability, Endpoint, Prompt
from extproc.dialects import hides_usage, read, without_prompt

HELLO = [{"role": "user", "content": "hello"}]
MEMBERS = [
    "model",
    "messages",
    "input",
    "prompt",
    "system",
    "tools",
    "stream",
    "n",
    "max_tokens",
    "metadata",
    "stream_options",
    "conversation",
    "instructions",
    "response_format",
    "functions",
    "text",
    "best_of",
]
ENDPOINTS = [Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.EMBEDDINGS, Endpoint.RESPONSES, Endpoint.MESSAGES]


def call(endpoint, **members):
    """Read a body of these members for model m."""
    return read(endpoint, json.dumps({"model": "m", **members}).encode()).call


def chat(**members):
    """Read a chat completion."""
    return call(Endpoint.CHAT, **{"messages": HELLO, **members})


def refused(endpoint, body):
    """Return the detail of the refusal that reading this body ends in."""
    with pytest.raises(Rejected) as caught:
        read(endpoint, body if isinstance(body, bytes) else json.dumps(body).encode())
    assert caught.value.reason is Reason.BAD_REQUEST
    return caught.value.detail


class TestBody:
    """The body as a whole."""

    @pytest.mark.parametrize("endpoint", ENDPOINTS)
    @pytest.mark.parametrize(
        ("body", "detail"),
        [
            (b"", "the body is empty"),
            (b"\xff\xfe", "the body is not UTF-8 at byte 0"),
            (b'{"model":"\xed\xa0\x80"}', "the body is not UTF-8 at byte 10"),
            (b"[]", "the body is not a JSON object"),
            (b"null", "the body is not a JSON object"),
            (b'\xef\xbb\xbf{"model":"m"}', "the body is not a JSON object"),
            (b"{", "the body is not JSON: Expecting a key in double quotes (character 1)"),
            (b'{"model"', "the body is not JSON: Expecting ':' (character 8)"),
            (b'{"model":', "the body is not JSON: Expecting value (character 9)"),
            (b'{"model":"m"', "the body is not JSON: Expecting ',' or '}' (character 12)"),
            (b'{"model":"m",}', "the body is not JSON: Expecting a key in double quotes (character 13)"),
            (b'{"model":"m"}x', "the body is not JSON: Extra data (character 13)"),
            (b'{model:"m"}', "the body is not JSON: Expecting a key in double quotes (character 1)"),
            (b'{"model":"a\nb"}', "the body is not JSON: Invalid control character at (character 11)"),
            (b'{"model":"m","x":01}', "the body is not JSON: Expecting ',' or '}' (character 18)"),
            (b'{"model":"m","x":NaN}', "the body is not JSON: NaN is not a number"),
            (b'{"model":"m","x":[-Infinity]}', "the body is not JSON: -Infinity is not a number"),
            (b'{"x":' + b"9" * 5000 + b"}", "the body holds a number that is too long"),
            (b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "the body is nested too deeply"),
            (b'{"x":' + b'{"a":' * 50_000, "the body is nested too deeply"),
            (b'{"x":' + b'{"a":' * 100_000, "the body holds too many values"),
            (b'{"x":[' + b"1," * 700_000 + b"1]}", "the body holds too many values"),
            (b'{"x":[' + b'"",' * 400_000 + b"1]}", "the body holds too many values"),
            (b'{"x":"' + b'\\"' * 1_000_000, "the body is not JSON: Unterminated string starting at (character 5)"),
            (b"{" + b'"a":1,' * 2000 + b'"b":1}', "the body has more than 1000 members"),
            (b"{}", None),
            (b' \r\n\t{ "model" : "" } ', None),
        ],
    )
    def test_what_is_no_request_is_refused_with_a_safe_detail(self, endpoint, body, detail):
        """Each fault has its own sentence, without a word of the body in it."""
        said = refused(endpoint, body)
        assert said == detail or detail is None

    @pytest.mark.parametrize(
        "extra",
        [
            b'"temperature":1e400',
            b'"x":"\\ud800"',
            b'"x":{"deep":[{"er":null}]}',
            b'"vendor_\\u0066ield":[1,2.5,-0]',
            b'"x":12345678901234567890123',
            b'"stream":null,"max_tokens":null,"n":null,"tools":null,"metadata":null',
            b'"":""',
        ],
    )
    def test_vendor_members_and_odd_values_pass(self, extra):
        """What is not read is not judged."""
        body = b'{"model":"m","messages":[{"role":"user","content":"hi"}],' + extra + b"}"
        assert read(Endpoint.CHAT, body).call.prompt.texts == ("hi",)

    def test_nesting_is_refused_however_deep_the_stack_already_is(self):
        """A body that only just parses may be too deep for what follows: that is the same refusal."""
        for depth in range(50, 1200, 50):
            part = b'{"type":"tool_result","content":[' * depth + b"]}" * depth
            body = b'{"model":"m","messages":[{"content":[' + part + b"]}]}"
            try:
                read(Endpoint.MESSAGES, body)
            except Rejected as rejected:
                assert rejected.detail == "the body is nested too deeply"  # noqa: PT017

    @given(st.binary(max_size=200))
    def test_no_bytes_make_it_fall_over(self, body):
        """Whatever the bytes, reading ends in a document or in a refusal."""
        for endpoint in Endpoint:
            try:
                read(endpoint, body)
            except Rejected as rejected:
                assert rejected.reason is Reason.BAD_REQUEST  # noqa: PT017

    @settings(suppress_health_check=[HealthCheck.too_slow])
    @given(
        st.dictionaries(
            st.sampled_from(MEMBERS),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
                lambda inner: (
                    st.lists(inner, max_size=3)
                    | st.dictionaries(
                        st.sampled_from(
                            ["type", "text", "content", "role", "image_url", "source", "file", "tool_calls"]
                        )
                        | st.sampled_from(
                            ["function", "input", "output", "input_audio", "id", "arguments", "include_usage"]
                        ),
                        inner
                        | st.sampled_from(["text", "image_url", "input_audio", "file", "document", "tool_result"]),
                        max_size=4,
                    )
                ),
                max_leaves=8,
            ),
        )
    )
    def test_no_shape_makes_it_fall_over(self, body):
        """Whatever the types, reading ends in a document or in a refusal."""
        for endpoint in Endpoint:
            try:
                read(endpoint, json.dumps({"model": "m", "messages": HELLO, **body}).encode())
            except Rejected as rejected:
                assert rejected.reason is Reason.BAD_REQUEST  # noqa: PT017


class TestMembers:
    """Members that every family shares."""

    @pytest.mark.parametrize("model", [None, "", 7, ["m"], "a\nb", "\ud800", "x" * 257, "a\x00"])
    def test_model_must_be_a_plain_name(self, model):
        """A model's name reaches metrics and headers, so it has to be printable and short."""
        assert refused(Endpoint.CHAT, {"model": model, "messages": HELLO}).startswith("model ")

    def test_model_may_be_any_printable_name(self):
        """Slashes, colons, quotes and Chinese are fine."""
        assert call(Endpoint.CHAT, model='org/m:"1"模型', messages=HELLO).model == 'org/m:"1"模型'

    @pytest.mark.parametrize("value", [-1, 1.0, 1e400, True, "10", [1], 100_000_001, 10**30])
    @pytest.mark.parametrize("key", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
    def test_caps_must_be_whole_numbers_in_range(self, key, value):
        """A cap that is negative, a float, a boolean or absurd is refused by name."""
        detail = refused(
            Endpoint.CHAT,
            json.dumps({"model": "m", "messages": HELLO, key: value}).encode().replace(b"Infinity", b"1e400"),
        )
        assert detail == f"{key} must be a whole number from 0 to 100000000"

    @pytest.mark.parametrize("value", [0, -1, True, 2.0, "2", 10_001])
    @pytest.mark.parametrize("key", ["n", "best_of"])
    def test_choices_must_be_whole_numbers_in_range(self, key, value):
        """So is a number of choices."""
        assert refused(Endpoint.CHAT, {"model": "m", "messages": HELLO, key: value}).startswith(f"{key} must be")

    @pytest.mark.parametrize("value", [1, "true", [], {}])
    def test_stream_must_be_a_boolean(self, value):
        """Truthy is not true."""
        assert refused(Endpoint.MESSAGES, {"model": "m", "messages": HELLO, "stream": value}) == (
            "stream must be a boolean"
        )

    @pytest.mark.parametrize(
        ("members", "cap", "choices"),
        [
            ({}, None, 1),
            ({"max_tokens": 0}, 0, 1),
            ({"max_tokens": 1, "max_completion_tokens": 100}, 100, 1),
            ({"max_tokens": 100, "max_completion_tokens": 1}, 100, 1),
            ({"max_output_tokens": 7, "max_tokens_to_sample": 9}, 9, 1),
            ({"max_tokens": 10, "n": 3}, 30, 3),
            ({"max_tokens": 10, "n": 2, "best_of": 5}, 50, 5),
            ({"n": 4}, None, 4),
        ],
    )
    def test_output_cap_is_the_largest_times_the_choices(self, members, cap, choices):
        """An upstream may obey any of the caps, so the largest is reserved, once for each choice."""
        read_call = chat(**members)
        assert (read_call.output_cap, read_call.choices) == (cap, choices)

    def test_every_prompt_of_a_batch_has_its_choices(self):
        """Two prompts with n=3 generate six answers."""
        batch = call(Endpoint.COMPLETIONS, prompt=["a", "b"], n=3, max_tokens=10)
        assert (batch.output_cap, batch.choices) == (60, 6)

    @pytest.mark.parametrize(
        ("members", "stops"),
        [
            ({}, False),
            ({"stop": None}, False),
            ({"stop": []}, False),
            ({"stop": ""}, False),
            ({"stop": "\n"}, True),
            ({"stop": ["a", "b"]}, True),
            ({"stop_sequences": ["a"]}, True),
            ({"stop_token_ids": [7]}, True),
        ],
    )
    def test_words_that_end_an_answer_are_seen(self, members, stops):
        """In both dialects, where something is generated."""
        assert chat(**members).stops is stops
        assert call(Endpoint.MESSAGES, messages=HELLO, **members).stops is stops
        assert call(Endpoint.EMBEDDINGS, input="a", **members).stops is False

    @pytest.mark.parametrize(
        ("content", "results"),
        [
            ("a", False),
            ([], False),
            ([{"type": "text", "text": "tool_result"}], False),
            ([{"type": "tool_result", "tool_use_id": "t", "content": "4"}], True),
            ([{"type": "tool_result", "tool_use_id": "t"}, {"type": "text", "text": "go on"}], True),
            (["a", {"type": "tool_result", "tool_use_id": "t"}], True),
        ],
    )
    def test_what_tools_answered_is_seen_in_the_last_message(self, content, results):
        """Not in an earlier one, nor where nothing is generated."""
        asked = [{"role": "user", "content": content}]
        assert call(Endpoint.MESSAGES, messages=[*HELLO, *asked]).results is results
        assert call(Endpoint.MESSAGES, messages=[*asked, *HELLO]).results is False
        assert call(Endpoint.COUNT_TOKENS, messages=asked).results is False

    def test_embeddings_and_counting_reserve_no_output(self):
        """What generates nothing has no cap, whatever the body says."""
        assert call(Endpoint.EMBEDDINGS, input="a", max_tokens=9).output_cap is None
        assert call(Endpoint.COUNT_TOKENS, messages=HELLO, max_tokens=9).output_cap is None

    @pytest.mark.parametrize(
        ("options", "asked"),
        [(None, False), ({}, False), ({"include_usage": False}, False), ({"include_usage": True}, True)],
    )
    def test_usage_is_hidden_only_from_those_who_did_not_ask(self, options, asked):
        """`include_usage` is the client's wish; without it the extra chunk must not reach it."""
        streaming = chat(stream=True, stream_options=options)
        assert streaming.wants_usage is asked
        assert hides_usage(streaming) is not asked
        assert hides_usage(chat(stream_options=options)) is False

    def test_usage_is_never_hidden_where_it_comes_unasked(self):
        """Anthropic and Responses streams always carry usage."""
        assert not hides_usage(call(Endpoint.MESSAGES, messages=HELLO, stream=True))
        assert not hides_usage(call(Endpoint.RESPONSES, input="x", stream=True))
        assert hides_usage(call(Endpoint.COMPLETIONS, prompt="x", stream=True))

    @pytest.mark.parametrize("options", [[], "x", {"include_usage": 1}])
    def test_stream_options_must_make_sense(self, options):
        """Options of the wrong type are refused, because they would have to be merged with ours."""
        refused(Endpoint.CHAT, {"model": "m", "messages": HELLO, "stream": True, "stream_options": options})

    @pytest.mark.parametrize("options", [b'{"x":1e400}', b'{"x":"' + b"y" * 2000 + b'"}'])
    def test_stream_options_that_cannot_be_merged_are_refused(self, options):
        """A number out of range cannot be written again, and a head has to stay small."""
        body = b'{"model":"m","stream":true,"messages":[{"content":"a"}],"stream_options":' + options + b"}"
        assert refused(Endpoint.CHAT, body).startswith("stream_options ")

    def test_the_last_of_a_repeated_key_counts(self):
        """As every JSON reader of note has it."""
        body = b'{"model":"a","max_tokens":1,"messages":[{"content":"x"}],"mod\\u0065l":"b","max_tokens":2}'
        document = read(Endpoint.CHAT, body)
        assert (document.call.model, document.call.output_cap, document.repeated) == ("b", 2, True)

    def test_a_waiting_request_can_let_go_of_its_prompt(self):
        """Everything but the text stays."""
        document = read(Endpoint.CHAT, json.dumps({"model": "m", "messages": HELLO}).encode())
        lean = without_prompt(document)
        assert lean.call.prompt == Prompt()
        assert (lean.body, lean.members, lean.call.model) == (document.body, document.members, "m")


class TestChat:
    """Prompts of OpenAI chat completions."""

    @pytest.mark.parametrize(
        "messages",
        [
            None,
            "hi",
            {},
            [],
            ["hi"],
            [None],
            [{"content": 3}],
            [{"content": {}}],
            [{"content": [3]}],
            [{"content": [[]]}],
        ],
    )
    def test_wrongly_typed_messages_are_refused(self, messages):
        """The detail says which message."""
        assert refused(Endpoint.CHAT, {"model": "m", "messages": messages}).startswith("messages")

    def test_all_text_of_all_roles_is_read(self):
        """Strings, parts, names, tool calls, tool results, refusals and reasoning."""
        prompt = chat(
            messages=[
                {"role": "system", "content": "sys"},
                {"role": "user", "name": "bob", "content": [{"type": "text", "text": "one"}, "two"]},
                {"role": "assistant", "content": None, "refusal": "no", "reasoning_content": "hm"},
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
                        {"id": "2", "type": "custom", "custom": {"name": "g", "input": "raw"}},
                    ],
                },
                {"role": "assistant", "content": "", "function_call": {"name": "h", "arguments": "{}"}},
                {"role": "tool", "tool_call_id": "1", "content": "result"},
            ]
        ).prompt
        assert prompt.texts == (
            *("sys", "one", "two", "bob", "no", "hm", "f", '{"a":1}', "g", "raw", "", "h", "{}", "result"),
        )
        assert prompt.messages == 6

    def test_tools_and_schemas_are_read_as_their_json(self):
        """As the client wrote them, without an encoder's escapes and indentation."""
        tools = [
            {"type": "function", "function": {"name": "f", "description": "天气", "parameters": {"type": "object"}}}
        ]
        schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object", "properties": {}}}}
        compact = json.dumps(tools, ensure_ascii=False, separators=(",", ":"))
        for indent in (None, 2):
            body = json.dumps(
                {"model": "m", "messages": HELLO, "tools": tools, "response_format": schema}, indent=indent
            )
            prompt = read(Endpoint.CHAT, body.encode()).call.prompt
            assert prompt.tools == 1
            assert compact in prompt.texts
            assert any('"json_schema"' in text for text in prompt.texts)
        raw = json.dumps({"model": "m", "messages": HELLO, "functions": [{"name": "a"}, {"name": "b"}]}).encode()
        assert read(Endpoint.CHAT, raw).call.prompt.tools == 2
        assert len(chat(response_format={"type": "json_object"}).prompt.texts) == 1

    def test_images_are_counted_not_read(self):
        """Base64 is never text; low detail has OpenAI's fixed price."""
        data = "data:image/png;base64," + "A" * 100_000
        prompt = chat(
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": data}},
                        {"type": "image_url", "image_url": {"url": data, "detail": "low"}},
                        {"type": "image_url", "image_url": data},
                        {"image_url": {"url": data}},
                        {"text": "look"},
                    ],
                }
            ]
        ).prompt
        assert prompt == Prompt(texts=("look",), messages=1, images=3, token_ids=85)

    @pytest.mark.parametrize(
        ("part", "tokens"),
        [
            ({"type": "input_audio", "input_audio": {"data": "A" * 50_000, "format": "mp3"}}, 50),
            ({"type": "audio_url", "audio_url": {"url": "https://x/y.mp3"}}, 3_000),
            ({"type": "file", "file": {"file_data": "A" * 40_000}}, 1_000),
            ({"type": "file", "file": {"file_id": "file-1"}}, 3_000),
            ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64," + "A" * 49_978}}, 100),
            ({"type": "video_url", "video_url": {"url": "https://x/y.mp4"}}, 10_000),
        ],
    )
    def test_media_are_priced_by_size(self, part, tokens):
        """Sound, files and video cost tokens by their length, and a fixed price when only their address is known."""
        prompt = chat(messages=[{"role": "user", "content": [part]}]).prompt
        assert (prompt.token_ids, prompt.texts) == (tokens, ())

    def test_an_unknown_part_is_counted_as_its_json(self):
        """Too much rather than nothing."""
        prompt = chat(messages=[{"role": "user", "content": [{"type": "hologram", "lines": ["a", "b"]}]}]).prompt
        assert prompt.texts == ('{"type":"hologram","lines":["a","b"]}',)
        assert chat(messages=[{"content": [{"type": ["odd"], "x": 1}]}]).prompt.texts == ('{"type":["odd"],"x":1}',)

    def test_text_that_engines_take_from_other_members_is_read(self):
        """Documents and chat templates end up in the prompt."""
        prompt = chat(documents=[{"text": "doc"}], chat_template="tpl").prompt
        assert sorted(prompt.texts) == ['[{"text":"doc"}]', "hello", "tpl"]

    def test_wrongly_typed_text_is_counted_all_the_same(self):
        """Refusing it is the upstream's business."""
        assert chat(messages=[{"content": [{"type": "text", "text": ["a"]}]}]).prompt.texts == ('["a"]',)
        assert chat(messages=[{"content": "x", "tool_calls": ["odd"]}]).prompt.texts == ("x", "odd")
        assert chat(messages=[{"content": "x", "tool_calls": "odd", "role": "assistant"}]).prompt.texts == ("x",)
        calls = [{"type": "function", "function": "odd"}]
        assert chat(messages=[{"role": "a", "content": "x", "tool_calls": calls}]).prompt.texts == ("x", "odd")

    def test_a_prompt_of_countless_parts_is_refused(self):
        """Each part costs time to look at, and the body is the client's to fill."""
        many = [{"content": [{}] * 1_000}] * 101
        assert refused(Endpoint.CHAT, {"model": "m", "messages": many}) == "the prompt has more than 100000 parts"
        many = [1] * 100_001
        assert refused(Endpoint.CHAT, {"model": "m", "messages": many}) == "messages must hold from 1 to 100000 items"
        assert refused(Endpoint.RESPONSES, {"model": "m", "input": many}) == "input must hold at most 100000 items"

    def test_sealed_reasoning_and_odd_reasoning(self):
        """OpenRouter's reasoning details: text is read, encrypted text is priced, nonsense is nothing."""
        details = [
            {"type": "reasoning.text", "text": "hm"},
            {"type": "reasoning.encrypted", "data": "x" * 60},
            {"type": "reasoning.encrypted", "data": None},
        ]
        prompt = chat(messages=[{"role": "assistant", "content": None, "reasoning_details": details}]).prompt
        assert (prompt.texts, prompt.token_ids) == (("hm",), 10)


class TestBarePrompts:
    """Prompts of completions and inputs of embeddings."""

    @pytest.mark.parametrize(("endpoint", "key"), [(Endpoint.COMPLETIONS, "prompt"), (Endpoint.EMBEDDINGS, "input")])
    @pytest.mark.parametrize(
        ("value", "texts", "ids"),
        [
            ("a b", ("a b",), 0),
            (["a", "b"], ("a", "b"), 0),
            ([1, 2, 3], (), 3),
            ([[1, 2], [3]], (), 3),
        ],
    )
    def test_text_and_token_ids(self, endpoint, key, value, texts, ids):
        """One prompt or many, as text or as numbers."""
        prompt = call(endpoint, **{key: value}).prompt
        assert (prompt.texts, prompt.token_ids, prompt.messages) == (texts, ids, 0)

    @pytest.mark.parametrize(("endpoint", "key"), [(Endpoint.COMPLETIONS, "prompt"), (Endpoint.EMBEDDINGS, "input")])
    @pytest.mark.parametrize("value", [None, [], 3, {}, ["a", 1], [True], [1.5], [[1], ["a"]], [[]], [None]])
    def test_anything_else_is_refused(self, endpoint, key, value):
        """By the member's name."""
        assert refused(endpoint, {"model": "m", key: value}).startswith(f"{key} ")

    def test_the_suffix_is_part_of_the_prompt(self):
        """Fill-in-the-middle reads both ends."""
        assert call(Endpoint.COMPLETIONS, prompt="a", suffix="z").prompt.texts == ("a", "z")

    def test_embeddings_of_images_and_chats(self):
        """Engines embed content parts and whole chats."""
        image = {"type": "image_url", "image_url": {"url": "data:,"}}
        assert call(Endpoint.EMBEDDINGS, input=[image]).prompt.images == 1
        assert call(Endpoint.EMBEDDINGS, messages=HELLO).prompt == Prompt(("hello",), messages=1)


class TestResponses:
    """Prompts of OpenAI responses."""

    def test_string_input_with_instructions(self):
        """Both are text, each a message."""
        prompt = call(Endpoint.RESPONSES, input="hi", instructions="be brief").prompt
        assert prompt == Prompt(("be brief", "hi"), messages=2)

    def test_items_of_every_kind(self):
        """Messages, calls, outputs, reasoning; ids and encrypted text are no prose."""
        prompt = call(
            Endpoint.RESPONSES,
            input=[
                {"role": "user", "content": "a"},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]},
                {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "data:,x"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "d"},
                {"type": "function_call_output", "output": [{"type": "input_text", "text": "e"}]},
                {
                    "type": "reasoning",
                    "summary": [{"type": "summary_text", "text": "g"}],
                    "encrypted_content": "x" * 600,
                },
                {"type": "computer_call_output", "output": {"type": "computer_screenshot", "image_url": "data:,"}},
                {"type": "image_generation_call", "id": "i", "result": "A" * 1000},
                {"type": "item_reference", "id": "msg_1"},
                {"type": "code_interpreter_call", "code": "1+1", "outputs": None},
                {"type": "web_search_call", "action": {"type": "search", "query": "q"}},
            ],
        ).prompt
        assert prompt.texts == ("a", "b", "c", "f", "{}", "d", "e", "g", "1+1", '{"type":"search","query":"q"}')
        assert (prompt.messages, prompt.images, prompt.token_ids) == (13, 3, 100)

    def test_structured_output_and_template_variables(self):
        """A schema in `text` and the variables of a stored prompt are read by the model."""
        schema = {"format": {"type": "json_schema", "name": "s", "schema": {"type": "object", "properties": {}}}}
        prompt = call(Endpoint.RESPONSES, prompt={"id": "p", "variables": {"v": "x"}}, text=schema).prompt
        assert prompt.texts[0] == '{"v":"x"}'
        assert '"json_schema"' in prompt.texts[1]

    @pytest.mark.parametrize("value", [None, 3, {}, [3], ["a"], [{"content": 3}]])
    def test_wrongly_typed_input_is_refused(self, value):
        """Unless something else stands in for it."""
        assert refused(Endpoint.RESPONSES, {"model": "m", "input": value}).startswith("input")

    @pytest.mark.parametrize("member", [{"previous_response_id": "r"}, {"conversation": "c"}, {"prompt": {"id": "p"}}])
    def test_input_may_be_missing_where_state_stands_in(self, member):
        """A stored conversation, response or prompt has its own text."""
        assert call(Endpoint.RESPONSES, **member).prompt.texts == ()

    @pytest.mark.parametrize(
        ("members", "state"),
        [
            ({}, None),
            ({"previous_response_id": None, "conversation": None}, None),
            ({"previous_response_id": "resp_1"}, "resp_1"),
            ({"conversation": "conv_1"}, "conv_1"),
            ({"conversation": {"id": "conv_2"}}, "conv_2"),
            ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "file-9"}]}]}, "file-9"),
            ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "file-8"}]}]}, "file-8"),
        ],
    )
    def test_state_that_binds_to_one_account(self, members, state):
        """Responses, conversations and files live at one account."""
        assert call(Endpoint.RESPONSES, **{"input": "x", **members}).state == state

    @pytest.mark.parametrize(
        "member", [{"previous_response_id": 7}, {"conversation": 7}, {"conversation": {"id": "a\n"}}]
    )
    def test_unreadable_state_is_refused(self, member):
        """Dropping it would send the request to the wrong account."""
        refused(Endpoint.RESPONSES, {"model": "m", "input": "x", **member})


class TestAnthropic:
    """Prompts of Anthropic messages."""

    def test_all_text_is_read(self):
        """System, blocks, tool use and results, thinking without its signature, documents."""
        pdf = {"type": "base64", "media_type": "application/pdf", "data": "A" * 4_000}
        prompt = call(
            Endpoint.MESSAGES,
            max_tokens=5,
            system=[{"type": "text", "text": "sys", "cache_control": {"type": "ephemeral"}}],
            messages=[
                {"role": "user", "content": "a"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "S" * 5_000},
                        {"type": "redacted_thinking", "data": "R" * 60},
                        {"type": "tool_use", "id": "1", "name": "f", "input": {"q": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "1", "content": "r1"},
                        {"type": "tool_result", "content": [{"type": "text", "text": "r2"}, {"type": "image"}]},
                        {"type": "image", "source": {"type": "base64", "data": "A" * 9_000}},
                        {"type": "document", "title": "t", "source": {"type": "text", "data": "plain"}},
                        {
                            "type": "document",
                            "source": {"type": "content", "content": [{"type": "text", "text": "in"}]},
                        },
                        {"type": "document", "context": "c", "source": "odd"},
                        {"type": "document", "source": pdf},
                        {"type": "document", "source": {"type": "url", "url": "https://x/y.pdf"}},
                    ],
                },
            ],
            tools=[{"name": "f", "input_schema": {"type": "object"}}],
        ).prompt
        tools = '[{"name": "f", "input_schema": {"type": "object"}}]'
        assert prompt.texts == ("sys", "a", "hm", "f", '{"q":1}', "r1", "r2", "t", "plain", "in", "c", "odd", tools)
        assert (prompt.messages, prompt.tools, prompt.images) == (4, 1, 2)
        assert prompt.token_ids == 10 + 100 + 3_000

    def test_max_tokens_may_be_missing(self):
        """Some engines do without; the others refuse it themselves."""
        assert call(Endpoint.MESSAGES, messages=HELLO).output_cap is None
        assert call(Endpoint.MESSAGES, messages=HELLO, max_tokens=9, stream=True).output_cap == 9

    @pytest.mark.parametrize(
        "members", [{"messages": None}, {"messages": []}, {"messages": [3]}, {"system": 3}, {"system": [3]}]
    )
    def test_wrongly_typed_members_are_refused(self, members):
        """By name."""
        assert refused(Endpoint.MESSAGES, {"model": "m", "messages": HELLO, **members}).startswith(next(iter(members)))

    def test_output_schema_is_read(self):
        """Structured output puts the schema before the model."""
        schema = {"format": {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {}}}}}
        assert any(
            "json_schema" in text for text in call(Endpoint.MESSAGES, messages=HELLO, output_config=schema).prompt.texts
        )

    def test_a_stored_file_binds_to_its_account(self):
        """Whether it is an image or a document."""
        for kind in ("image", "document"):
            block = {"type": kind, "source": {"type": "file", "file_id": "file_7"}}
            assert call(Endpoint.MESSAGES, messages=[{"role": "user", "content": [block]}]).state == "file_7"

    def test_counting_reads_the_same_prompt(self):
        """`count_tokens` never streams."""
        counted = call(Endpoint.COUNT_TOKENS, messages=HELLO, stream=True)
        assert (counted.prompt.texts, counted.stream) == (("hello",), False)


class TestOtherEndpoints:
    """Bodies that are not priced in tokens."""

    @pytest.mark.parametrize(
        ("body", "model"),
        [
            (b"", ""),
            (b"--boundary\r\n\x00\xff", ""),
            (b"[1]", ""),
            (b'{"model":7}', ""),
            (b'{"model":"dall-e-3","prompt":3}', "dall-e-3"),
            (b'{"x":' + b"[" * 100_000, ""),
        ],
    )
    def test_any_body_is_taken(self, body, model):
        """The model is known only where a JSON object names it."""
        document = read(Endpoint.OTHER, body)
        assert (document.call.model, document.body) == (model, body)

    def test_models_have_no_body(self):
        """Listing models reads nothing."""
        assert read(Endpoint.MODELS, b"").call.model == ""


class TestSessions:
    """Session ids that clients already send."""

    @pytest.mark.parametrize(
        ("members", "sessions"),
        [
            ({}, ()),
            ({"conversation": "c1"}, ("c1",)),
            ({"conversation": {"id": "c2"}}, ("c2",)),
            ({"metadata": {"session_id": "s", "trace_id": "t", "other": "o"}}, ("s", "t")),
            ({"metadata": {"thread_id": "th"}, "prompt_cache_key": "k"}, ("th", "k")),
            ({"metadata": {"user_id": "user_ab_account__session_0d1e2f3a-0000"}}, ("0d1e2f3a-0000",)),
            ({"metadata": {"user_id": '{"device_id":"d","session_id":"s9"}'}}, ("s9",)),
            ({"metadata": {"user_id": "just-a-user"}}, ()),
            ({"metadata": {"user_id": "{not json"}}, ()),
            ({"metadata": {"user_id": "[" * 3000}}, ()),
            ({"metadata": {"user_id": '{"session_id":7}'}}, ()),
            ({"metadata": {"session_id": 7, "thread_id": "a\nb", "chat_id": "x" * 300}}, ()),
            ({"metadata": "odd"}, ()),
            ({"user": "u", "safety_identifier": "i"}, ()),
            ({"session_id": "s", "metadata": {"session_id": "s"}}, ("s",)),
            ({"prompt_cache_key": "k", "previous_response_id": "r"}, ("k", "r")),
        ],
    )
    def test_ids_in_the_body(self, members, sessions):
        """Best first, each once, never an id of a user."""
        assert call(Endpoint.RESPONSES, input="x", **members).sessions == sessions


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SKETCH = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}}
BEGUN = {"role": "assistant", "content": "Sure:"}
JSON = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}


class TestNeeds:
    """What not every model can do."""

    @pytest.mark.parametrize(
        ("endpoint", "members", "needs"),
        [
            (Endpoint.CHAT, {"messages": HELLO}, ""),
            (Endpoint.CHAT, {"messages": HELLO, "tools": [], "response_format": {"type": "text"}}, ""),
            (Endpoint.CHAT, {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
            (Endpoint.CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}, "json"),
            (Endpoint.CHAT, {"messages": HELLO, "response_format": JSON}, "json"),
            (Endpoint.CHAT, {"messages": HELLO, "response_format": {"format": "text", "type": {}}}, ""),
            (Endpoint.CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "images"),
            (Endpoint.CHAT, {"messages": [{"role": "user", "content": [SKETCH]}]}, "images"),
            (Endpoint.RESPONSES, {"input": [{"type": "image_generation_call", "result": "AAAA"}]}, "images"),
            (Endpoint.RESPONSES, {"input": [{"type": "image_generation_call", "result": None}]}, ""),
            (Endpoint.CHAT, {"messages": [*HELLO, BEGUN]}, "prefill"),
            (Endpoint.CHAT, {"messages": [*HELLO, BEGUN, *HELLO]}, ""),
            (Endpoint.RESPONSES, {"input": "x", "text": {"format": JSON}}, "json"),
            (Endpoint.MESSAGES, {"messages": [*HELLO, BEGUN], "tools": [{"name": "f"}]}, "prefill tools"),
            (Endpoint.MESSAGES, {"messages": HELLO, "output_config": {"format": JSON}}, "json"),
            (Endpoint.COMPLETIONS, {"prompt": "x"}, ""),
        ],
    )
    def test_a_request_says_what_it_needs(self, endpoint, members, needs):
        """By its tools, its images, the form of its answer, and who spoke last."""
        assert " ".join(sorted(call(endpoint, **members).needs)) == needs
        assert all(isinstance(one, Ability) for one in call(endpoint, **members).needs)
