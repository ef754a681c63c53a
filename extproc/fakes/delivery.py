"""Sending one answer: as JSON or as a stream, at the engine's pace, and going wrong where a fault says so.

Several events that are due at once leave in one write, so a stream costs little when the provider is fast or the
machine is busy, and its pace does not drift. Events are due with their first token; the end is due with the last one.

Whoever serves gets its slot back (`done`) just before the last write of an answer, never after it.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from extproc.fakes.answer import Answer, Script
    from extproc.fakes.engine import Engine, Flight
    from extproc.fakes.faults import Fault

# Faults after which a stream is over.
_FATAL = frozenset({"cut", "early-end", "error-later"})
# Between writes others get their turn.
_EVENTS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Delivery:
    """Everything one answer needs on its way out."""

    request: web.Request
    headers: Mapping[str, str]
    engine: Engine
    flight: Flight
    fault: Fault | None
    error: bytes | None
    """The fault's error event, where it is not the script's own."""
    started: Callable[[], None]
    """To be called when the status leaves."""
    done: Callable[[], None]
    """To be called just before the last write. May be called twice."""

    def struck_by(self, *names: str) -> bool:
        """Return whether the fault of this request is one of these."""
        return self.fault is not None and self.fault.name in names

    async def hold(self) -> None:
        """Make every token to come as late as the fault says."""
        await self.flight.running.wait()
        self.flight.delay(self.hold_s)

    @property
    def hold_s(self) -> float:
        """How late that is."""
        return 0.0 if self.fault is None else self.fault.seconds("s")


async def send_json(delivery: Delivery, answer: Answer, body: bytes) -> web.StreamResponse:
    """Send the whole answer when its last token is there."""
    await _first_token(delivery, answer)
    if answer.tokens:
        await delivery.engine.until_token(delivery.flight, answer.tokens - 1)
    if delivery.struck_by("cut", "stall"):
        return await _send_half(delivery, body)
    if delivery.struck_by("malformed"):
        body = body[: len(body) // 2]
    delivery.done()
    delivery.started()
    return web.Response(body=body, headers=delivery.headers)


async def send_stream(
    delivery: Delivery, answer: Answer, script: Script, tokens_per_event: int, *, early_headers: bool
) -> web.StreamResponse:
    """Send the answer as server-sent events while it is generated."""
    stream = _Stream(delivery, answer, script, tokens_per_event)
    if early_headers or (delivery.fault is not None and delivery.fault.flag("early-headers")):
        await stream.open()
    await _first_token(delivery, answer)
    if delivery.struck_by("error-first"):
        return await stream.fail()
    return await stream.play()


def reset_connection(request: web.Request) -> None:
    """Close the connection with a TCP reset."""
    if (transport := request.transport) is None:
        return
    connection = transport.get_extra_info("socket")
    if connection is not None:
        # Lingering for no time at all is how a reset is asked for.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


class _Stream:
    """One stream of events on its way out."""

    def __init__(self, delivery: Delivery, answer: Answer, script: Script, tokens_per_event: int) -> None:
        self._delivery = delivery
        self._answer = answer
        self._script = script
        self._step = tokens_per_event
        self._response = web.StreamResponse(headers=delivery.headers)
        # What has to leave with the next write.
        self._held = script.opening

    async def open(self) -> None:
        """Send the headers."""
        if not self._response.prepared:
            self._delivery.started()
            await self._response.prepare(self._delivery.request)

    async def play(self) -> web.StreamResponse:
        """Send all events, up to the end or the fault."""
        visible = self._answer.visible_tokens
        fault = self._delivery.fault
        at = visible if fault is None or "at" not in fault.params else fault.at(visible)
        await self._tokens(0, at)
        if fault is not None and fault.name in _FATAL:
            return await self._fall(fault, at)
        if fault is not None and at < visible:
            await self._stumble(fault, at)
        await self._tokens(at, visible)
        if self._answer.tokens:
            await self._delivery.engine.until_token(self._delivery.flight, self._answer.tokens - 1)
        closing = self._script.closing()
        return await self.end(closing if self._delivery.struck_by("no-done") else closing + self._script.end())

    async def fail(self) -> web.StreamResponse:
        """Send an error and nothing else."""
        self._delivery.flight.tokens = 0
        self._held = b""
        return await self.end(self._error())

    def _error(self) -> bytes:
        said = self._delivery.error
        return self._script.error() if said is None else said

    async def end(self, last: bytes) -> web.StreamResponse:
        """Give the slot back, and send the last bytes."""
        self._delivery.done()
        await self.open()
        held, self._held = self._held, b""
        await self._response.write_eof(held + last)
        return self._response

    async def _tokens(self, first: int, last: int) -> None:
        """Send visible tokens `first` to `last`, as they come."""
        flight, engine, hidden = self._delivery.flight, self._delivery.engine, self._answer.reasoning_tokens
        sent = first
        while sent < last:
            await engine.until_token(flight, hidden + sent)
            ready = min(last, max(sent + 1, engine.done(flight) - hidden), sent + self._step * _EVENTS_AT_ONCE)
            starts = range(sent, ready, self._step)
            # The last event may carry tokens that are not quite there: events have their full size.
            events = [self._script.delta(start, min(last, start + self._step)) for start in starts]
            sent = min(last, starts[-1] + self._step)
            self._held += b"".join(events)
            if engine.done(flight) < self._answer.tokens or len(starts) == _EVENTS_AT_ONCE:
                await self._flush()

    async def _flush(self) -> None:
        if self._held:
            await self.open()
            held, self._held = self._held, b""
            await self._response.write(held)

    async def _fall(self, fault: Fault, at: int) -> web.StreamResponse:
        """End the stream before its time. The tokens that did not leave were never generated."""
        self._delivery.flight.tokens = self._answer.reasoning_tokens + at
        if fault.name == "error-later":
            return await self.end(self._error())
        if fault.name == "early-end":
            return await self.end(b"")
        self._delivery.done()
        await self._flush()
        await self.open()
        _hang_up(self._delivery.request)
        return self._response

    async def _stumble(self, fault: Fault, at: int) -> None:
        """Do something in the middle of the stream that does not end it."""
        if fault.name == "stall":
            await self._flush()
            await self._delivery.hold()
        if fault.name == "malformed":
            event = self._script.delta(at, at + 1)
            self._held += event[: event.rindex(b"}") - 2] + b"\n\n"


async def _first_token(delivery: Delivery, answer: Answer) -> None:
    """Wait for the first token of the text, for ever if the provider is silent."""
    if delivery.struck_by("silence"):
        delivery.flight.tokens = 0
        await asyncio.Event().wait()
    if delivery.struck_by("slow-first-token"):
        await delivery.hold()
    await delivery.engine.until_token(delivery.flight, min(answer.reasoning_tokens, max(0, answer.tokens - 1)))


async def _send_half(delivery: Delivery, body: bytes) -> web.StreamResponse:
    """Announce the whole body, send half of it, then hang up or go on late."""
    response = web.StreamResponse(headers={**delivery.headers, "content-length": str(len(body))})
    half = len(body) // 2
    if delivery.struck_by("cut"):
        delivery.done()
    delivery.started()
    await response.prepare(delivery.request)
    await response.write(body[:half])
    if delivery.struck_by("cut"):
        _hang_up(delivery.request)
        return response
    await asyncio.sleep(delivery.hold_s)
    delivery.done()
    await response.write_eof(body[half:])
    return response


def _hang_up(request: web.Request) -> None:
    """Close the connection in the middle of an answer; what was written before still leaves."""
    if request.transport is not None:
        request.transport.close()
