"""Both SDKs, answered from memory: what they make of our answers is what our users will see."""

import sys

import anthropic
import openai
import pytest


@pytest.fixture
def openai_answered():
    """Make OpenAI clients to which every request is answered alike; `asked` collects the requests."""
    return lambda *answer, asked=None: openai.OpenAI(
        api_key="k", max_retries=1, http_client=_answered(openai, answer, asked)
    )


@pytest.fixture
def anthropic_answered():
    """Make Anthropic clients to which every request is answered alike; `asked` collects the requests."""
    return lambda *answer, asked=None: anthropic.Anthropic(
        api_key="k", max_retries=1, http_client=_answered(anthropic, answer, asked)
    )


def _answered(sdk, answer, asked):
    # The SDKs are not all built on the same HTTP library; theirs is the one their default client comes from.
    http = sys.modules[sdk.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0]]
    status, headers, body = answer

    def respond(request):
        if asked is not None:
            asked.append(request)
        return http.Response(status, headers=headers, content=body)

    return http.Client(transport=http.MockTransport(respond))
