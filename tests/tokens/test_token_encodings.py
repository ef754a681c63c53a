"""Which vocabulary counts which model."""

import pytest

from extproc.tokens import encoding_for, encoding_of


@pytest.mark.parametrize(
    ("vocabulary", "models"),
    [
        ("o200k_base", "gpt-4o gpt-4o-2024-08-06 gpt-4o-mini gpt-4.1 gpt-4.1-nano gpt-4.5-preview gpt-5 gpt-5.1-codex"),
        (
            "o200k_base",
            "gpt-5-mini o1 o1-mini o3 o3-pro o4-mini chatgpt-4o-latest gpt-oss-120b codex-mini-latest gpt-10",
        ),
        ("o200k_base", "openai/gpt-4o azure/gpt-5 ft:gpt-4o:org::id GPT-4O"),
        ("cl100k_base", "gpt-4 gpt-4-turbo gpt-4-0613 gpt-3.5-turbo gpt-35-turbo text-embedding-3-small"),
        ("cl100k_base", "text-embedding-ada-002 davinci-002"),
        ("llama3", "llama-3.3-70b-instruct meta-llama/Llama-3.1-8B meta-llama-3-8b llama3 Llama-2-7b mixtral-8x7b"),
        ("qwen3", "qwen3-32b Qwen/Qwen2.5-Coder-7B qwq-32b qwen-max"),
        ("o200k_base", "claude-opus-4-5 anthropic/claude-3-haiku us.anthropic.claude-sonnet-4 gemini-2.5-pro"),
        ("o200k_base", "deepseek-chat mistral-large kimi-k2 glm-4.6 llama-4-scout command-r somebody/new-1 foo1 "),
    ],
)
def test_models_by_name(vocabulary, models):
    """With prefixes of gateways, dates, fine-tunes and in any case."""
    for model in models.split():
        assert encoding_for(model).vocabulary == vocabulary, model


def test_published_vocabularies_have_no_factor():
    """A factor is for those that are only like another; an unknown model is counted rather too dear."""
    for model in ("gpt-4o", "gpt-4", "llama-3.3-70b", "qwen3-32b"):
        assert encoding_for(model).factor == 1.0
    for model in ("claude-opus-4-5", "gemini-2.5-pro", "mistral-large", "unheard-of", "", "\ud800"):
        assert 1.0 < encoding_for(model).factor < 1.5


def test_a_name_within_a_name_is_not_that_name():
    """`turbo1` is no o1, `photo3` no o3."""
    unknown = encoding_for("unheard-of")
    for model in ("turbo1", "photo3", "xgpt-4o", "o12x", "aqwen"):
        assert encoding_for(model) == unknown


def test_an_upstreams_own_name_of_a_model_says_how_it_counts():
    """Unless nobody has heard of it: then it is a deployment of what callers ask for."""
    assert encoding_of("qwen3-32b", "gpt-5") is encoding_for("qwen3-32b")
    assert encoding_of("prod5", "gpt-5") is encoding_for("gpt-5")
    assert encoding_of("prod5", "our-best") is encoding_for("our-best")
    assert encoding_of("gpt-5", "our-best") is encoding_for("gpt-5")
