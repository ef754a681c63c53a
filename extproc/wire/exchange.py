"""One ext_proc stream as the conversation that ports.Exchange promises.

Fed by `read` and `write` of message bytes, so that nothing here knows which server is underneath. Envoy asks one
question at a time (headers, then body) and each gets exactly one answer; `hold` may come before it. Once the request is
on its way the stream stays open until the response has ended: that end is what releases a slot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from google.protobuf.message import DecodeError

from extproc.ports import Departure, Gone, Head, Record
from extproc.wire import codec
from extproc.wire.pb.ext_proc_pb2 import ProcessingRequest

__all__ = ["StreamExchange"]

Read = Callable[[], Awaitable[bytes | None]]
Write = Callable[[bytes], Awaitable[None]]


class StreamExchange:
    """See ports.Exchange. `read` gives None at the end of the stream; either may raise Gone."""

    _go_on = codec.CONTINUE
    """What lets the body of a request come."""
    trace = ""
    """`traceparent` that came with the stream: Envoy's span for asking us. Empty where Envoy does not trace."""

    def __init__(self, read: Read, write: Write) -> None:
        """Nothing is read before `head` is asked for."""
        self._read = read
        self._write = write
        self._asked = ""
        self._bodiless = False
        self._departed = False
        self._released = False
        self._last_words = b""
        self._aborted = False
        self._waiting: asyncio.Task[None] | None = None

    async def head(self) -> Head:
        """See ports.Exchange."""
        message = await self._expect("request_headers")
        head = codec.head(message, self.trace)
        self._bodiless = head.bodiless
        return head

    async def body(self) -> bytes:
        """See ports.Exchange."""
        if self._bodiless:
            return b""
        await self._write(self._go_on)
        self._asked = ""
        return (await self._expect("request_body")).request_body.body

    async def hold(self, seconds: float) -> None:
        """See ports.Exchange."""
        await self._write(codec.patience(seconds))

    async def forward(self, departure: Departure) -> None:
        """See ports.Exchange."""
        self._departed = True
        await self._write(codec.departure(departure, self._asked))
        self._asked = ""

    async def answer(self, status: int, headers: Sequence[tuple[str, str]], body: bytes, details: str) -> None:
        """See ports.Exchange."""
        if self._asked:
            await self._write(codec.immediate(status, headers, body, details))
            self._asked = ""

    async def ended(self) -> None:
        """See ports.Exchange. Also returns when `release` let it go."""
        task = asyncio.current_task()
        try:
            while not self._may_end():
                if self._last_words and not self._aborted:
                    self._aborted = True
                    await self._write(self._last_words)
                self._waiting = task  # only while it reads may it be stopped, or another task speak
                data = await self._read()
                self._waiting = None
                if data is None:
                    return
                reply = self._heed(_parse(data))
                if not self._aborted:
                    await self._write(reply)
        except asyncio.CancelledError:
            if not self._released or self._waiting is None:
                raise
            self._waiting.uncancel()
        finally:
            self._waiting = None

    async def abort(self, status: int, headers: Sequence[tuple[str, str]], body: bytes, details: str) -> None:
        """See ports.Exchange. Called from any task, at most once: what `forward` still writes is not disturbed.

        Envoy takes an immediate response at any time. It ends the upstream's stream and ours within milliseconds; an
        error or an orderly end on our side would be ignored instead, because admission fails open for running answers.
        """
        self._last_words = codec.immediate(status, headers, body, details)
        if self._waiting is not None:
            self._aborted = True
            await self._write(self._last_words)

    def release(self) -> bool:
        """Stop watching a response that is under way, from now or from when it is begun to; it goes on without us.

        False when there is none.
        """
        if not self._departed:
            return False
        self._released = True
        if self._waiting is not None:
            self._waiting.cancel()
        return True

    @property
    def doubt(self) -> tuple[str, ...]:
        """Where `final` cannot say who ended it: the upstreams that could be asked for it, one after the other."""
        return ()

    def final(self) -> Record | None:
        """How it ended, where Envoy's log does not say so. Asked once, at the end of the stream."""
        return None

    def _may_end(self) -> bool:
        """Whether nothing that is still to come needs us."""
        return self._released

    def _heed(self, message: ProcessingRequest) -> bytes:
        """The answer to a message that comes once the request is on its way."""
        if message.WhichOneof("request") != "response_trailers":
            raise Gone
        return codec.TRAILERS_PASS

    async def _expect(self, kind: str) -> ProcessingRequest:
        data = await self._read()
        if data is None:
            raise Gone
        message = _parse(data)
        if message.WhichOneof("request") != kind:
            raise Gone
        self._asked = kind
        return message


def _parse(data: bytes) -> ProcessingRequest:
    try:
        return ProcessingRequest.FromString(data)
    except DecodeError as error:
        raise Gone from error
