"""Which requests are metered, and as what."""

import pytest

from extproc.core.request import Endpoint
from extproc.dialects import endpoint_of


@pytest.mark.parametrize(
    ("method", "path", "endpoint"),
    [
        ("POST", "/v1/chat/completions", Endpoint.CHAT),
        ("POST", "/v1/chat/completions?api-version=2", Endpoint.CHAT),
        ("POST", "/v1/chat/completions?", Endpoint.CHAT),
        ("POST", "/v1/completions", Endpoint.COMPLETIONS),
        ("POST", "/v1/embeddings", Endpoint.EMBEDDINGS),
        ("POST", "/v1/responses", Endpoint.RESPONSES),
        ("POST", "/v1/messages", Endpoint.MESSAGES),
        ("POST", "/v1/messages?beta=true", Endpoint.MESSAGES),
        ("POST", "/v1/messages/count_tokens", Endpoint.COUNT_TOKENS),
        ("GET", "/v1/models", Endpoint.MODELS),
        ("GET", "/v1/models/gpt-4o", Endpoint.MODELS),
        ("GET", "/v1/models/ft:gpt-4o:org::id", Endpoint.MODELS),
        ("GET", "/v1/models/meta-llama/Llama-3", Endpoint.MODELS),
        ("GET", "/v1/models/meta-llama%2FLlama-3", Endpoint.MODELS),
    ],
)
def test_known_endpoint(method, path, endpoint):
    """The endpoints of both families are recognised, with or without a query string."""
    assert endpoint_of(method, path) is endpoint


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/images/generations"),
        ("POST", "/v1/audio/transcriptions"),
        ("POST", "/v1/files"),
        ("GET", "/v1/files/file-abc/content"),
        ("POST", "/v1/batches"),
        ("POST", "/v1/moderations"),
        ("POST", "/v1/fine_tuning/jobs"),
        ("POST", "/v1/uploads/upload_1/parts"),
        ("GET", "/v1/vector_stores"),
        ("POST", "/v1/threads/t_1/runs"),
        ("POST", "/v1/assistants"),
        ("GET", "/v1/realtime?model=gpt-realtime"),
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("POST", "/v1/responses/compact"),
        ("GET", "/v1/chat/completions/chatcmpl-1"),
        ("POST", "/v1/messages/batches"),
        ("GET", "/v1/messages/batches/b_1/results"),
        ("DELETE", "/v1/models/ft:gpt-4o"),
        ("POST", "/v1/complete"),
        ("POST", "/v1/engines/davinci/completions"),
        ("POST", "/v1/rerank"),
    ],
)
def test_other_llm_endpoint(method, path):
    """Every other LLM endpoint is metered by requests, never overlooked."""
    assert endpoint_of(method, path) is Endpoint.OTHER


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/chat/completions"),
        ("PUT", "/v1/messages"),
        ("OPTIONS", "/v1/chat/completions"),
        ("HEAD", "/v1/models"),
        ("POST", "/v1/models"),
        ("post", "/v1/messages"),
        ("TRACE", "/v1/files"),
        ("GET", "/"),
        ("GET", "/healthz"),
        ("POST", "/v2/chat/completions"),
        ("POST", "/openai/v1/chat/completions"),
        ("POST", ""),
        ("POST", "*"),
    ],
)
def test_not_ours(method, path):
    """A wrong method on a priced endpoint and a path that is no LLM's are nobody's."""
    assert endpoint_of(method, path) is None


@pytest.mark.parametrize(
    "path",
    [
        "/v1//chat/completions",
        "//v1/chat/completions",
        "/v1/chat/completions/",
        "/v1/chat/completions;x=1",
        "/v1/chat/completions#x",
        "/v1/chat/%63ompletions",
        "/v1/chat%2fcompletions",
        "/v1/./chat/completions",
        "/v1/files/../chat/completions",
        "/v1/files/..;/chat/completions",
        "/v1/files/%2e%2e/chat/completions",
        "/v1/files/..%2fchat/completions",
        "/v1/files/..",
        "/v1/files/.",
        "/v1/files/",
        "/v1/files//x",
        "/v1/models/../chat/completions",
        "/v1/models/..%2Fchat%2Fcompletions",
        "/v1/models/%2e%2e%2fchat",
        "/v1/Chat/Completions",
        "/V1/chat/completions",
        "/v1/chat/completions\n",
        "/v1/files\n",
        "/v1/chat\\completions",
        "/v1/chat/completions%00",
        " /v1/chat/completions",
        "http://x/v1/chat/completions",
        "/v1/filesystem",
    ],
)
def test_spelling_tricks_are_unknown(path):
    """A path that some server might read as a priced one is not taken for anything."""
    assert endpoint_of("POST", path) is None
    if "models" not in path:
        assert endpoint_of("GET", path) is None


def test_a_model_may_contain_dots_but_not_climb():
    """`..` is refused in a model's name in any spelling that is decoded later."""
    assert endpoint_of("GET", "/v1/models/gpt-4.1") is Endpoint.MODELS
    assert endpoint_of("GET", "/v1/models/..") is None
    assert endpoint_of("GET", "/v1/models/a/../b") is None
    assert endpoint_of("GET", "/v1/models/") is None
    assert endpoint_of("GET", "/v1/models/a%2F..%2F..%2Fb") is None
