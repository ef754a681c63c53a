"""One request of a replay: sent as an OpenAI chat completion, and read to its end without parsing every event.

A stream is looked at twice: for its first word, and at its end for `[DONE]` and usage. Everything between is only read.
There are no retries: what a client's own back-off would do to the load is another experiment.

Deliberately not here: when requests are sent (`replay`), and what the results mean (`figures`).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from extproc.fakes import text_of_tokens
from extproc.sim.figures import End, Result
from extproc.sim.plan import Planned

__all__ = ["Client", "body_of"]

CHAT_TOKENS = 7
"""What a chat template adds to a prompt of one message."""
TAIL_BYTES = 4096
OUR_FAILURES = frozenset({"upstream_failed", "admission_unavailable"})
"""Reasons that are no shedding: the request was let go and nobody served it, or nobody decided about it."""

_FIRST_WORD = re.compile(rb'"(?:content|reasoning_content|text)":\s*"[^"]')
_USAGE = re.compile(rb'"usage":\s*(?=\{)')
_HALF_A_MATCH = 40
_OK = 200
_ERROR = 400


def body_of(request: Planned, model: str) -> bytes:
    """The JSON body: a prompt and a cap of exactly the trace's lengths, by the fake provider's count."""
    text = text_of_tokens(max(1, request.prompt_tokens - CHAT_TOKENS), request.number)
    stream = '"stream":true,"stream_options":{"include_usage":true},' if request.stream else ""
    return (
        f'{{"model":{json.dumps(model)},"max_tokens":{request.output_tokens},{stream}'
        f'"messages":[{{"role":"user","content":"{text}"}}]}}'
    ).encode()


@dataclass(slots=True)
class Client:
    """Sends through `session` to `url`. key: presented as a bearer token. tenant_header: names the tenant."""

    session: aiohttp.ClientSession
    url: str
    key: str | None
    tenant_header: str

    async def send(self, request: Planned, body: bytes, due: float) -> Result:
        """Send now and read to the end; `due` is when it should have been sent. Raises only cancellation."""
        began = time.monotonic()
        reading = _Reading()
        status, failure = 0, ""
        headers: Mapping[str, str] = {}
        try:
            async with self.session.post(self.url, data=body, headers=self._headers(request)) as response:
                status, headers = response.status, response.headers
                failure = await reading.read(response)
        except TimeoutError:
            failure = "timeout"
        except aiohttp.ClientConnectorError:
            failure = "not connected"
        except (aiohttp.ClientError, OSError):
            failure = "cut" if status else "connection lost"
        reason = headers.get("x-tidegate-reason", "")
        if not failure and status >= _ERROR and not reason:
            failure = f"http {status}"
        end = End.SERVED if status == _OK and not failure else End.SHED if reason else End.FAILED
        if reason in OUR_FAILURES:
            end, failure = End.FAILED, reason
        return Result(
            number=request.number,
            lane=request.lane,
            end=end,
            lag_s=began - due,
            word=reason if end is End.SHED else failure,
            status=status,
            upstream=headers.get("x-tidegate-upstream", ""),
            waited_s=_seconds(headers.get("x-tidegate-queue-ms")),
            first_token_s=reading.first_at - began if reading.first_at else None,
            total_s=time.monotonic() - began,
            prompt_tokens=_count(reading.usage, "prompt_tokens"),
            output_tokens=_count(reading.usage, "completion_tokens"),
        )

    def _headers(self, request: Planned) -> dict[str, str]:
        headers = {"content-type": "application/json", "x-tidegate-priority": request.lane}
        if request.tenant is not None:
            headers[self.tenant_header] = request.tenant
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"
        return headers


class _Reading:
    """What was seen of one answer. first_at: when a stream's first word was there, 0 before."""

    def __init__(self) -> None:
        self.first_at = 0.0
        self.usage: dict[str, Any] = {}

    async def read(self, response: aiohttp.ClientResponse) -> str:
        """Read the answer. Returns what is wrong with it, or nothing."""
        if response.status != _OK or not response.content_type.startswith("text/event-stream"):
            tail = (await response.read())[-TAIL_BYTES:]
            self.usage = _usage(tail)
            return "malformed" if response.status == _OK and not tail.rstrip().endswith(b"}") else ""
        tail = await self._stream(response)
        self.usage = _usage(tail)
        if b"data: [DONE]" in tail:
            return ""
        return "error event" if b'"error"' in tail else "cut"

    async def _stream(self, response: aiohttp.ClientResponse) -> bytes:
        seen = tail = b""
        async for chunk in response.content.iter_any():
            if not self.first_at:
                seen += chunk
                if _FIRST_WORD.search(seen):
                    self.first_at = time.monotonic()
                seen = seen[-_HALF_A_MATCH:]
            tail = chunk if len(chunk) >= TAIL_BYTES else (tail + chunk)[-TAIL_BYTES:]
        return tail


def _usage(tail: bytes) -> dict[str, Any]:
    """The last usage object in the end of an answer; empty when there is none."""
    for found in reversed(list(_USAGE.finditer(tail))):
        try:
            usage = json.JSONDecoder().raw_decode(tail[found.end() :].decode("utf-8", "replace"))[0]
        except ValueError:
            continue
        if isinstance(usage, dict):
            return usage
    return {}


def _count(usage: dict[str, Any], name: str) -> int:
    value = usage.get(name)
    return value if isinstance(value, int) else 0


def _seconds(millis: str | None) -> float | None:
    return int(millis) / 1000 if millis and millis.isdigit() else None
