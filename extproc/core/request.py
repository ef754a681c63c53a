"""What is known of one request, from what the client said to what admission may decide on.

Read top to bottom: `Call` is what a dialect read from the body; `Size` is its price before it ran; `Request` is what
admission knows; `Usage` is what the upstream reported afterwards. All frozen: a request never changes, only its
`Flight` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum

from extproc.core.value import value

__all__ = ["Ability", "Call", "Dialect", "Endpoint", "Prompt", "Request", "Session", "Size", "Usage"]


class Dialect(StrEnum):
    """The API family a client speaks; it decides error bodies and which upstreams can serve."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


class Endpoint(StrEnum):
    """What a path asks for. `OTHER` are LLM endpoints that are limited by requests and concurrency only."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    RESPONSES = "responses"
    MESSAGES = "messages"
    COUNT_TOKENS = "count_tokens"
    MODELS = "models"
    OTHER = "other"

    @property
    def dialect(self) -> Dialect:
        """The family that this endpoint belongs to."""
        return Dialect.ANTHROPIC if self in _ANTHROPIC else Dialect.OPENAI

    @property
    def generates(self) -> bool:
        """Whether the answer is generated token by token, so that output has to be reserved."""
        return self in _GENERATING


_ANTHROPIC = frozenset({Endpoint.MESSAGES, Endpoint.COUNT_TOKENS})
_GENERATING = frozenset({Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES, Endpoint.MESSAGES})


class Ability(StrEnum):
    """What a request may need of a model that not every model has. PREFILL: it goes on with an answer begun for it."""

    TOOLS = "tools"
    IMAGES = "images"
    JSON = "json"
    PREFILL = "prefill"


@value
class Prompt:
    """The parts of a prompt that cost tokens.

    texts: every piece of text the model will read, tool schemas included (as JSON text).
    messages: number of chat messages; tools: number of tool definitions; images: number of images.
    token_ids: prompt tokens given as numbers, which cost exactly their count.
    """

    texts: tuple[str, ...] = ()
    messages: int = 0
    tools: int = 0
    images: int = 0
    token_ids: int = 0


@value
class Session:
    """The agent session or task a request belongs to. `derived` when nothing in the request named it."""

    id: str
    derived: bool = False


@value
class Call:
    """What the client asked for, as its dialect says it.

    output_cap: tokens, the largest cap named times the number of choices; None when the client named none.
    wants_usage: the client itself asked for usage in its stream.
    state: an id of state that binds to one account (`previous_response_id`, `conversation`), or None.
    sessions: session ids found in the body, best first. needs: what not every upstream can do. stops: the client named
    words at which the answer is to end. results: its last message brings what tools answered.
    """

    endpoint: Endpoint
    model: str
    stream: bool = False
    prompt: Prompt = field(default_factory=Prompt)
    choices: int = 1
    output_cap: int | None = None
    wants_usage: bool = False
    state: str | None = None
    sessions: tuple[str, ...] = ()
    needs: frozenset[Ability] = frozenset()
    stops: bool = False
    results: bool = False


@value
class Size:
    """Price of a request in tokens before it ran: estimated prompt, and the output reserved for it."""

    input: int
    output: int

    @property
    def total(self) -> int:
        """Input plus output, in tokens."""
        return self.input + self.output


@value
class Usage:
    """Tokens an upstream reported, normalised across dialects. None is unknown, which is not zero.

    input counts the whole prompt (cached and cache-written tokens included); output counts all that was generated
    (reasoning included).
    """

    input: int | None = None
    output: int | None = None
    cached: int | None = None
    cache_write: int | None = None
    reasoning: int | None = None

    @property
    def total(self) -> int:
        """Input and output together, as far as they are known."""
        return (self.input or 0) + (self.output or 0)


@value
class Request:
    """What admission knows of one request.

    arrived, deadline: seconds on the event loop's clock; deadline is the latest time of the first response byte.
    wait_until: when it has waited its max (lane's max wait or deadline, the earlier).
    counted: input tokens as the tokenizer counted them, before the learned correction. bytes: body held in memory.
    weight, vip: its tenant's standing inside the lane. fingerprint: equal for a request and its retries, empty when it
    cannot be told. retries: how often its client has sent it before. fresh: its session was never served. observed: it
    is decided upon, but neither held nor refused. choices: answers asked for. capped: the client itself limits output.
    stops: it named words at which the answer ends. results: its last message brings what tools answered. trace: its
    `traceparent` header, as it came, or empty. size: at the first upstream that could serve it; sizes: at those whose
    tokenizers count otherwise.
    """

    id: str
    ticket: str
    tenant: str
    lane: str
    route: str
    model: str
    endpoint: Endpoint
    stream: bool
    size: Size
    session: Session
    arrived: float
    deadline: float | None
    wait_until: float
    counted: int = 0
    bytes: int = 0
    weight: float = 1.0
    vip: bool = False
    fingerprint: str = ""
    retries: int = 0
    fresh: bool = False
    observed: bool = False
    choices: int = 1
    capped: bool = False
    stops: bool = False
    results: bool = False
    trace: str = ""
    sizes: Mapping[str, Size] = field(default_factory=dict, hash=False)

    def size_at(self, upstream: str) -> Size:
        """Its size at `upstream`."""
        return self.sizes.get(upstream, self.size)

    @property
    def dialect(self) -> Dialect:
        """The family the caller speaks."""
        return self.endpoint.dialect
