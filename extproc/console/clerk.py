"""Who is let in, and how an action is done: proven, written down, done, and written down again."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from extproc.console.answers import problem, shown
from extproc.console.audit import Actor, Audit, NotWrittenError
from extproc.console.guard import from_a_page, unread
from extproc.console.proof import Proof, on_loopback
from extproc.console.sources import Data, Sources
from extproc.console.stream import Overviews

__all__ = ["Clerk", "Denied"]

log = logging.getLogger("tidegate")


class Denied(Exception):  # noqa: N818 - an answer, not an error
    """Somebody is not let in, or asks for what cannot be done. status: of the answer; why: in words for who asked."""

    def __init__(self, status: int, why: str) -> None:
        """A refusal."""
        super().__init__(why)
        self.status, self.why = status, why

    @property
    def answer(self) -> Response:
        """As the console tells it."""
        proof = {"www-authenticate": 'Bearer realm="tidegate"'} if self.status == 401 else None  # noqa: PLR2004
        return problem(self.status, self.why, proof)


class Clerk:
    """What routes share. address: host:port that is listened on. methods: of each path that has routes."""

    def __init__(self, sources: Sources, proof: Proof, audit: Audit, overviews: Overviews | None, address: str) -> None:
        """See the head of this file."""
        self.sources, self.proof, self.audit, self.overviews = sources, proof, audit, overviews
        self.address = address
        self.loopback = on_loopback(address)
        self.methods: dict[str, set[str]] = {}

    def may_read(self, request: Request) -> None:
        """Denied, unless it is on loopback or proven, and no page of another site."""
        self.no_page(request)
        if not self.loopback:
            self._proven(request)

    def still_reads(self, request: Request) -> bool:
        """Whether who was let in to read still would be."""
        try:
            self.may_read(request)
        except Denied:
            return False
        return True

    def acts(self) -> type[APIRoute]:
        """A route that asks for the proof first: whoever has none learns nothing of what its body should be."""
        may_act = self.may_act

        class Acting(APIRoute):
            def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
                handle = super().get_route_handler()

                async def proven(request: Request) -> Response:
                    await may_act(request)
                    return await handle(request)

                return proven

        return Acting

    async def may_act(self, request: Request) -> None:
        """Note who it is. Denied, and written down, where it may not act."""
        try:
            self.no_page(request)
            request.state.who = self._proven(request)
        except Denied as denied:
            await self.audit.refuse(_actor(request, ""), _name(request), dict(request.path_params), denied.why)
            raise
        if wrong := unread(request.scope["state"]):
            raise Denied(*wrong)
        has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
        if has_body and request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Denied(415, "content-type must be application/json")

    async def do(
        self,
        request: Request,
        work: Callable[[], Awaitable[Data | None]],
        arguments: Mapping[str, Any] | None = None,
        reason: str = "",
        *,
        wrong: int = 409,
    ) -> Response:
        """Have something done that can be found later. wrong: status of what makes no sense to whom it is for."""
        told = {**request.path_params, **{name: each for name, each in (arguments or {}).items() if each is not None}}
        try:
            entry = await self.audit.begin(_actor(request, request.state.who), _name(request), told, reason)
        except NotWrittenError as error:
            return problem(503, f"nothing was done, because it could not be written down: {error}")
        try:
            answer = await work()
        except LookupError as error:
            words = _words(error)
            await self.audit.end(entry, "failed", words)
            return problem(404, words)
        except ValueError as error:
            await self.audit.end(entry, "failed", _words(error))
            return problem(wrong, _words(error))
        except Exception as error:
            await self.audit.end(entry, "failed", type(error).__name__)
            raise
        await self.audit.end(entry, "done")
        return shown(answer)

    def no_page(self, request: Request) -> None:
        """Denied to what a browser asks for a page that is not the console's own."""
        if from_a_page(request.headers, self.address, loopback=self.loopback):
            raise Denied(403, "not for web pages of others")

    def _proven(self, request: Request) -> str:
        certificate = request.scope.get("extensions", {}).get("tls", {}).get("client_cert_name")
        who = self.proof.of(request.headers.get("authorization"), certificate)
        if isinstance(who, str):
            return who
        raise Denied(who.status, who.why)


def _actor(request: Request, who: str) -> Actor:
    return Actor(who, request.client.host if request.client else "")


def _name(request: Request) -> str:
    """What a route is called is what its action is called."""
    return str(request.scope["route"].operation_id).removesuffix("_v1")


def _words(error: Exception) -> str:
    return str(error.args[0]) if error.args else type(error).__name__
