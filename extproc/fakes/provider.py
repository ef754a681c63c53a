"""A server that speaks like a real LLM provider: dialects, limits, pace, faults, and a record for tests to read.

`tidegate fake-provider` runs it; tests, replays and benchmarks put it where a provider would be. `_serve` is the story
of one request. Everything that decides is in the modules it names; this one only connects them.

For tests, without a key and not for the open network: `GET|DELETE /admin/record`, `GET|POST|DELETE /admin/fault`,
`GET|POST /admin/settings`. `/health`, `/metrics` and `/server_info` are as those of the engine that it plays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import uvloop
from aiohttp import web

from extproc.fakes import anthropic, openai, others, responses
from extproc.fakes.answer import Answer, Ask, cost_of, planned
from extproc.fakes.delivery import Delivery, reset_connection, send_json, send_stream
from extproc.fakes.engine import Engine, Flight
from extproc.fakes.faults import FAULT_HEADER, Fault, FaultBoard, error_of, parse_fault, prefilled, refusal_by
from extproc.fakes.jsonbytes import dumps, loads
from extproc.fakes.limits import Cost, Limits
from extproc.fakes.metrics import Totals, metrics_page, selected
from extproc.fakes.record import Record, Seen, body_hash, fingerprint, headers_seen, key_of
from extproc.fakes.refusal import Refusal, Refused, bad_request
from extproc.fakes.settings import FakeSettings, changed, shown

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from extproc.fakes.dialect import Dialect, Endpoint

ENDPOINTS: Final = (*openai.ENDPOINTS, *responses.ENDPOINTS, *anthropic.ENDPOINTS, *others.ENDPOINTS)
MAX_BODY_BYTES: Final = 32 * 1024 * 1024

_KEEPALIVE_S = 3600.0
_SHUTDOWN_S = 1.0
_RELIEVE_EVERY_S = 0.05

log = logging.getLogger(__name__)


def make_app(settings: FakeSettings, clock: Callable[[], float] = time.monotonic) -> web.Application:
    """Return the server as an aiohttp application.

    `clock` is a steady clock in seconds, of the same kind as the event loop's. Run the application with
    `handler_cancellation=True`, as `running` does, so that a client that goes away is noticed at once.
    """
    return Provider(settings, clock).app()


async def serve(settings: FakeSettings, ready: Callable[[str], None] = lambda _url: None) -> None:
    """Serve until cancelled. `ready` is called with the base URL when the port is open."""
    async with running(settings) as fake:
        ready(fake.url)
        await asyncio.Event().wait()


def run(settings: FakeSettings, ready: Callable[[str], None] = lambda _url: None) -> None:
    """Serve until interrupted or terminated, on uvloop."""
    uvloop.run(_serve_until_signal(settings, ready))


@dataclass(frozen=True, slots=True)
class Running:
    """A fake provider that is up."""

    url: str
    provider: Provider


@contextlib.asynccontextmanager
async def running(settings: FakeSettings) -> AsyncIterator[Running]:
    """Serve while the block runs; port 0 takes a free one, told in `url`."""
    provider = Provider(settings)
    runner = web.AppRunner(
        provider.app(),
        handler_cancellation=True,
        access_log=None,
        # Longer than any client's: it is never us who closes a connection that is about to be used.
        keepalive_timeout=_KEEPALIVE_S,
        shutdown_timeout=_SHUTDOWN_S,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, settings.host, settings.port, backlog=4096)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield Running(url=f"http://{host}:{port}", provider=provider)
    finally:
        await runner.cleanup()


class Provider:
    """One fake provider: its settings and everything it remembers."""

    def __init__(self, settings: FakeSettings, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with full buckets and an empty record."""
        self.settings = settings
        self.faults = FaultBoard()
        self.record = Record(settings.record_size)
        self.engine = Engine(settings, clock)
        self.limits = Limits(settings, clock())
        self.totals = Totals()
        self.clock = clock
        self._frozen = ""
        self._serials = count(1)

    def app(self) -> web.Application:
        """Return the routes as an aiohttp application."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        for endpoint in ENDPOINTS:
            app.router.add_post(endpoint.path, partial(self._handle, endpoint))
        app.router.add_get("/v1/models", self._get_models)
        app.router.add_get("/v1/models/{model:.+}", self._get_model)
        app.router.add_get("/health", self._get_health)
        app.router.add_get("/metrics", self._get_metrics)
        app.router.add_get("/server_info", self._get_server_info)
        app.router.add_get("/admin/record", self._get_record)
        app.router.add_delete("/admin/record", self._delete_record)
        app.router.add_get("/admin/fault", self._get_faults)
        app.router.add_post("/admin/fault", self._post_fault)
        app.router.add_delete("/admin/fault", self._delete_faults)
        app.router.add_get("/admin/settings", self._get_settings)
        app.router.add_post("/admin/settings", self._post_settings)
        app.router.add_route("*", "/{path:.*}", self._unknown_path)
        app.cleanup_ctx.append(self._relieving)
        return app

    def change(self, changes: Mapping[str, Any]) -> None:
        """Replace settings while running. Raises ValueError as `settings.changed` does."""
        self.settings = changed(self.settings, changes)
        self.engine.change(self.settings)
        self.limits.change(self.settings, self.clock())

    # One request.

    async def _handle(self, endpoint: Endpoint, request: web.Request) -> web.StreamResponse:
        """Serve a request, word what refuses it, and keep the record straight whatever happens."""
        seen = self._arrived(endpoint.path, request)
        try:
            return await self._serve(endpoint, request, seen)
        except Refused as refused:
            return self._refused(endpoint.dialect, refused.refusal, seen)
        except ConnectionError:
            # Nobody listens; the server drops this answer without a word.
            seen.aborted = True
            return web.Response()
        except asyncio.CancelledError:
            seen.aborted = True
            raise
        finally:
            self.record.ended(seen, self.clock())

    async def _serve(self, endpoint: Endpoint, request: web.Request, seen: Seen) -> web.StreamResponse:
        """Read, check, charge, wait, answer, settle."""
        body = await _body_of(request, seen)
        self._check_key(request)
        ask = _asked(endpoint, body, seen)
        fault = self._fault_for(request, ask, seen)
        if fault is not None and (early := await self._fail_early(endpoint, request, ask, fault, seen)) is not None:
            return early
        self._check_model(ask)
        if self.settings.embeds_only and ask.talks:
            raise bad_request("The model does not support Chat Completions API")
        self._check_priority(ask)
        answer = planned(ask, self.settings, fault, seen.id, int(seen.wall))
        flight = Flight(ask.prompt_tokens, answer.tokens, ask.choices if ask.talks else 0, ask.priority)
        stay = _Stay(self, seen, flight, cost_of(ask, self.settings))
        stay.check_in()
        try:
            return await self._deliver(endpoint, request, answer, stay, fault)
        finally:
            stay.check_out()

    async def _deliver(
        self, endpoint: Endpoint, request: web.Request, answer: Answer, stay: _Stay, fault: Fault | None
    ) -> web.StreamResponse:
        streamed = answer.ask.stream and endpoint.script is not None
        content_type = "text/event-stream; charset=utf-8" if streamed else endpoint.content_type
        delivery = Delivery(
            request=request,
            headers=self._headers(endpoint.dialect, stay.seen, content_type),
            engine=self.engine,
            flight=stay.flight,
            fault=fault,
            error=_error_event(endpoint.dialect, fault, stay.seen),
            started=partial(_begin, stay.seen),
            done=stay.check_out,
        )
        if streamed and endpoint.script is not None:
            script = endpoint.script(answer)
            early = self.settings.early_headers
            return await send_stream(delivery, answer, script, self.settings.tokens_per_event, early_headers=early)
        body = endpoint.write(answer)
        if delivery.struck_by("error-first", "error-later"):
            # There is no first or later part of a JSON answer: it is all error.
            body = _error_body(endpoint.dialect, fault, stay.seen)
        return await send_json(delivery, answer, body)

    def _arrived(self, path: str, request: web.Request) -> Seen:
        key = key_of(request.headers)
        seen = Seen(
            time=self.clock(),
            wall=time.time(),
            id=f"{next(self._serials):024x}",
            path=path,
            headers=headers_seen(request.headers),
            key=None if key is None else fingerprint(key),
        )
        self.record.arrived(seen)
        return seen

    def _check_key(self, request: web.Request) -> None:
        if self.settings.key is None:
            return
        key = key_of(request.headers)
        if key != self.settings.key:
            raise Refused(Refusal("no_key" if key is None else "wrong_key"))

    def _check_model(self, ask: Ask) -> None:
        if ask.model and "*" not in self.settings.models and ask.model not in self.settings.models:
            raise Refused(Refusal("unknown_model", detail=ask.model, param="model"))

    def _check_priority(self, ask: Ask) -> None:
        if ask.priority and self.settings.priorities == "refused":
            raise bad_request(f"Got priority {ask.priority} but Priority scheduling is not enabled.", "priority")

    def _fault_for(self, request: web.Request, ask: Ask, seen: Seen) -> Fault | None:
        """Return the fault of this request: its own, if that is meant for us, else one from the board."""
        spelled = request.headers.get(FAULT_HEADER)
        fault = parse_fault(spelled) if spelled else None
        if fault is None or fault.provider not in (None, self.settings.name):
            fault = self.faults.take(ask.model, self.settings.name)
        seen.fault = None if fault is None else fault.name
        return fault

    async def _fail_early(
        self, endpoint: Endpoint, request: web.Request, ask: Ask, fault: Fault, seen: Seen
    ) -> web.StreamResponse | None:
        """Fail before anything is charged; None if this fault strikes later."""
        await asyncio.sleep(fault.seconds("after"))
        if fault.name == "reset":
            reset_connection(request)
            return web.Response()
        if fault.name == "error-200":
            _begin(seen)
            worded = endpoint.dialect.word(error_of(fault), _request_id(seen))
            headers = self._headers(endpoint.dialect, seen, "application/json")
            return web.Response(body=worded.body, headers=headers)
        if fault.name == "html-200":
            _begin(seen)
            headers = self._headers(endpoint.dialect, seen, "text/html; charset=utf-8")
            return web.Response(body=b"<html><body>We are down for maintenance.</body></html>", headers=headers)
        if fault.name == "prefill" and not prefilled(ask.body):
            return None
        if fault.name == "content-filter" and endpoint.dialect.filters_in_answer:
            return None
        if (refusal := refusal_by(fault, self.settings)) is not None:
            raise Refused(refusal)
        return None

    def _refused(self, dialect: Dialect, refusal: Refusal, seen: Seen) -> web.Response:
        worded = dialect.word(refusal, _request_id(seen))
        seen.status = worded.status
        headers = {**self._headers(dialect, seen, "application/json"), **worded.headers}
        return web.Response(status=worded.status, body=worded.body, headers=headers)

    def _headers(self, dialect: Dialect, seen: Seen, content_type: str) -> dict[str, str]:
        now = self.clock()
        return {
            "content-type": content_type,
            "x-fake-provider": self.settings.name,
            dialect.request_id_header: _request_id(seen),
            **dialect.limit_headers(self.limits.levels(now), time.time()),
        }

    # Everything else.

    async def _get_models(self, request: web.Request) -> web.Response:
        anthropic_style = "anthropic-version" in request.headers
        return _json(others.models_body(self.settings.models, self.settings.name, anthropic=anthropic_style))

    async def _get_model(self, request: web.Request) -> web.Response:
        model, anthropic_style = request.match_info["model"], "anthropic-version" in request.headers
        if "*" not in self.settings.models and model not in self.settings.models:
            dialect = anthropic.ANTHROPIC if anthropic_style else openai.OPENAI
            worded = dialect.word(Refusal("unknown_model", detail=model, param="model"), "req_0")
            return _json(worded.body, worded.status)
        return _json(dumps(others.model_members(model, self.settings.name, anthropic=anthropic_style)))

    async def _get_health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _get_metrics(self, request: web.Request) -> web.Response:
        how = self.settings.metrics
        if how == "missing":
            raise web.HTTPNotFound
        if how == "slow":
            await asyncio.sleep(self.settings.metrics_delay_s)
        if how == "garbage":
            return web.Response(text="<html><body>502 Bad Gateway</body></html>", content_type="text/html")
        page = metrics_page(self.engine, self.totals)
        self._frozen = self._frozen or page if how == "frozen" else ""
        names = request.query.getall("name[]", [])
        page = selected(self._frozen or page, names, shared=self.settings.engine == "sglang")
        return web.Response(text=page, content_type="text/plain")

    async def _get_server_info(self, _request: web.Request) -> web.Response:
        ranked = self.settings.priorities == "followed"
        if self.settings.engine == "sglang":
            told: dict[str, Any] = {
                "enable_priority_scheduling": ranked,
                "schedule_low_priority_values_first": False,
                "max_total_num_tokens": self.settings.kv_tokens,
            }
        elif self.settings.server_info:
            told = {"vllm_config": {"scheduler_config": {"policy": "priority" if ranked else "fcfs"}}}
        else:
            raise web.HTTPNotFound
        return _json(dumps(told))

    async def _get_record(self, request: web.Request) -> web.Response:
        last = request.query.get("last")
        if last is not None and not last.isdecimal():
            return _admin_error("last must be a number")
        return _json(dumps(self.record.report(self.clock(), None if last is None else int(last))))

    async def _delete_record(self, _request: web.Request) -> web.Response:
        self.record.reset()
        return _json(b"{}")

    async def _get_faults(self, _request: web.Request) -> web.Response:
        return _json(dumps(self.faults.shown()))

    async def _post_fault(self, request: web.Request) -> web.Response:
        try:
            self.faults.post(_object(await request.read()))
        except Refused as refused:
            return _admin_error(refused.refusal.detail)
        return await self._get_faults(request)

    async def _delete_faults(self, _request: web.Request) -> web.Response:
        self.faults.clear()
        return _json(b"[]")

    async def _get_settings(self, _request: web.Request) -> web.Response:
        return _json(dumps(shown(self.settings)))

    async def _post_settings(self, request: web.Request) -> web.Response:
        try:
            self.change(_object(await request.read()))
        except Refused as refused:
            return _admin_error(refused.refusal.detail)
        except ValueError as error:
            return _admin_error(str(error))
        return await self._get_settings(request)

    async def _unknown_path(self, request: web.Request) -> web.Response:
        dialect = anthropic.ANTHROPIC if "anthropic-version" in request.headers else openai.OPENAI
        refusal = Refusal("unknown_path", detail=f"{request.method} {request.path}")
        seen = self._arrived(request.path, request)
        response = self._refused(dialect, refusal, seen)
        self.record.ended(seen, self.clock())
        return response

    async def _relieving(self, _app: web.Application) -> AsyncIterator[None]:
        """Watch the engine's cache while the server is up."""
        task = asyncio.create_task(self._relieve_for_ever())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _relieve_for_ever(self) -> None:
        while True:
            self.engine.relieve()
            await asyncio.sleep(_RELIEVE_EVERY_S)


@dataclass(slots=True)
class _Stay:
    """One request's time in the provider: what it takes is given back exactly once."""

    provider: Provider
    seen: Seen
    flight: Flight
    cost: Cost
    _inside: bool = field(default=False)

    def check_in(self) -> None:
        """Take a place in the engine and tokens from the account. Raises `Refused` if there is none."""
        provider = self.provider
        now = provider.clock()
        if provider.engine.full(self.flight):
            raise Refused(Refusal("queue_full"))
        if (shortage := provider.limits.take(self.cost, now)) is not None:
            raise Refused(Refusal("rate", shortage=shortage))
        provider.record.admitted(self.seen, self.cost.tokens, now)
        provider.totals.prompt_tokens += self.cost.input
        provider.engine.enter(self.flight)
        self._inside = True

    def check_out(self) -> None:
        """Give the place back and settle the account; only the first call does anything."""
        if not self._inside:
            return
        self._inside = False
        provider = self.provider
        now = provider.clock()
        self.seen.output_tokens = self.flight.done(now) * self.flight.choices
        provider.engine.leave(self.flight)
        provider.totals.generation_tokens += self.seen.output_tokens
        real = Cost(self.cost.input, self.seen.output_tokens)
        provider.record.settled(self.seen, provider.limits.settle(self.cost, real, now), now)
        provider.record.finished(self.seen, now)


async def _serve_until_signal(settings: FakeSettings, ready: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with running(settings) as fake:
        log.info("fake provider %s at %s", settings.name, fake.url)
        ready(fake.url)
        await stop.wait()


async def _body_of(request: web.Request, seen: Seen) -> bytes:
    try:
        body = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise Refused(Refusal("too_large_body")) from error
    seen.body_bytes = len(body)
    seen.body_sha256 = body_hash(body)
    return body


def _asked(endpoint: Endpoint, body: bytes, seen: Seen) -> Ask:
    if endpoint.read is None:
        return Ask(model="", talks=False)
    ask = endpoint.read(_object(body))
    seen.model = ask.model
    seen.stream = ask.stream
    seen.include_usage = ask.include_usage
    seen.priority = ask.priority
    seen.prompt_tokens = ask.prompt_tokens
    seen.max_tokens = ask.cap
    return ask


def _object(body: bytes) -> dict[str, Any]:
    try:
        parsed = loads(body)
    except ValueError as error:
        raise bad_request("We could not parse the JSON body of your request.") from error
    if not isinstance(parsed, dict):
        raise bad_request("The JSON body of your request must be an object.")
    return parsed


def _begin(seen: Seen) -> None:
    seen.status = 200


def _error_event(dialect: Dialect, fault: Fault | None, seen: Seen) -> bytes | None:
    """A fault's error as an event, None where it is one that every stream of the dialect has."""
    if fault is None or not (fault.flag("billing") or fault.flag("flat")):
        return None
    name = b"" if fault.flag("flat") else b"event: error\n"
    return b"%bdata: %b\n\n" % (name, _error_body(dialect, fault, seen))


def _error_body(dialect: Dialect, fault: Fault | None, seen: Seen) -> bytes:
    told = Refusal("server_error") if fault is None else error_of(fault)
    body = dialect.word(told, _request_id(seen)).body
    if fault is None or not fault.flag("flat"):
        return body
    return dumps({"object": "error", **loads(body)["error"]})


def _request_id(seen: Seen) -> str:
    return f"req_{seen.id}"


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


def _admin_error(message: str) -> web.Response:
    return _json(dumps({"error": message}), 400)
