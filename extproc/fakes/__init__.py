"""The fake provider: a server that speaks like a real LLM provider, for tests, replays and benchmarks.

Stands alone: it imports nothing of the rest of this package, so that it cannot share its mistakes.
"""

from extproc.fakes.provider import Provider, Running, make_app, run, running, serve
from extproc.fakes.settings import FakeSettings
from extproc.fakes.text import count_tokens, text_of_tokens

__all__ = [
    "FakeSettings",
    "Provider",
    "Running",
    "count_tokens",
    "make_app",
    "run",
    "running",
    "serve",
    "text_of_tokens",
]
