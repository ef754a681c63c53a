"""`tidegate check`: what the settings alone cannot know, and what is worth saying though it is no mistake."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from extproc import rehearsal
from extproc.console import proof
from extproc.core.orders import MOST, short_of
from extproc.core.request import Dialect
from extproc.core.routing import matches
from extproc.core.spend import is_free
from extproc.probes.inquiry import inquire
from extproc.render.envoy import bootstrap, to_yaml
from extproc.render.envoy import validate as validate_envoy
from extproc.render.upstream import secret_files
from extproc.settings import KvSettings, RouteSettings, Settings, SettingsError, UpstreamSettings

__all__ = ["advice", "ask", "validate"]

USUAL_WINDOW = 200_000
"""Tokens that an upstream is taken to accept where its `window` is not told."""


def validate(settings: Settings) -> None:
    """Files that must be there are, and the real Envoy accepts the rendered config. SettingsError, RenderError."""
    missing = [
        f"upstreams.{name}.{key}: {path} cannot be read, or is empty"
        for name, upstream in settings.upstreams.items()
        for key in ("key_file", "ca_file", "client_cert_file", "client_key_file")
        if (path := getattr(upstream, key)) is not None and not _readable(path)
    ]
    if settings.identity.jwt is not None and not _readable(settings.identity.jwt.jwks_file):
        missing.append(f"identity.jwt.jwks_file: {settings.identity.jwt.jwks_file} cannot be read, or is empty")
    missing += _tls_problems(settings)
    missing += proof.problems(settings.admin)
    missing += _collector_problems(settings)
    if missing:
        raise SettingsError(missing)
    read_at_once = settings.gateway.model_copy(update={"secrets_dir": None})  # what is there may not be written yet
    validate_envoy(to_yaml(bootstrap(settings.model_copy(update={"gateway": read_at_once}))))


def _collector_problems(settings: Settings) -> Iterator[str]:
    """What would keep the service from starting."""
    if settings.telemetry.otlp is not None:
        from extproc.telemetry.otlp import OtlpError, headers_of  # noqa: PLC0415 - only who sends pays for loading it

        try:
            headers_of(settings.telemetry.otlp)
        except OtlpError as error:
            yield str(error)


def _tls_problems(settings: Settings) -> Iterator[str]:
    """What Envoy and Tidegate, or an upstream, would find out when they shake hands."""
    for name, upstream in settings.upstreams.items():
        cert, key = upstream.client_cert_file, upstream.client_key_file
        if cert and key and _readable(cert) and _readable(key) and (problem := rehearsal.pair_problem(cert, key)):
            yield f"upstreams.{name}.client_cert_file: {problem}"
    service = settings.service
    if service.tls:
        gone = [(key, path) for key, path in service.tls.files.items() if not _readable(path)]
        yield from (f"service.tls.{key}: {path} cannot be read, or is empty" for key, path in gone)
        if not gone:
            yield from rehearsal.problems(service.tls, service.server_name)


def ask(settings: Settings) -> list[str]:
    """Ask the engines that can be reached how they run; a line for each thing that is worth knowing.

    SettingsError when one does not do what the settings count on.
    """
    findings = asyncio.run(
        inquire(settings.upstreams, {name: settings.model_of(name) or "default" for name in settings.upstreams})
    )
    if wrong := [f"{finding.where}: {finding.what}" for finding in findings if finding.wrong]:
        raise SettingsError(wrong)
    return [f"note: {finding.where}: {finding.what}" for finding in findings]


def advice(settings: Settings) -> Iterator[str]:
    """One line for each thing that works but may surprise."""
    yield from _dialects(settings)
    yield from _keys(settings)
    yield from _followed(settings)
    yield from _models(settings)
    yield from _engines(settings)
    yield from _prices(settings)
    yield from _bounds(settings)
    yield from _first_tokens(settings)
    yield from _addresses(settings)
    yield from _profile(settings)
    yield from settings.division.notes()
    if not settings.service.state_file:
        yield "note: service.state_file: not set, buckets start empty after a restart"


def _addresses(settings: Settings) -> Iterator[str]:
    """What others on the network reach that is not traffic, and what TLS is about to end."""
    service = settings.service
    yield from (f"note: {line}" for line in proof.notes(settings.admin, service.console))
    gateway = settings.gateway
    if gateway.metrics_port and not _is_private(f"{gateway.address}:{gateway.metrics_port}"):
        yield f"note: gateway.metrics_port: {gateway.metrics_port} can be reached from outside, as gateway.address can"
    if service.tls:
        yield from (f"note: {line}" for line in rehearsal.soon_over(service.tls, service.server_name, time.time()))
        if not service.tls.client_ca_file:
            yield "note: service.tls.client_ca_file: not set, so everybody who reaches the port may play Envoy"
        if not settings.gateway.secrets_dir:
            yield "note: gateway.secrets_dir: not set, Envoy reads its certificates only when it starts"
    elif not service.socket_path and not _is_private(service.address):
        yield f"note: service.address: {service.address} can be reached from outside, without service.tls"


def _is_private(place: str) -> bool:
    """Whether a host:port is on loopback. The console is, too, where it names no host."""
    host = place.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _profile(settings: Settings) -> Iterator[str]:
    if settings.gateway.profile != "classic":
        return
    short = {*short_of(route.chain for route in settings.routes)}
    for i, route in enumerate(settings.routes):
        if tuple(route.chain) in short:
            yield (
                f"note: routes[{i}].chain: the classic profile has no room for all its orders (some {MOST:,} for all "
                "routes): a request goes on to the next two, and not past one that rests"
            )


def _dialects(settings: Settings) -> Iterator[str]:
    upstreams = settings.policy().upstreams
    for i, route in enumerate(settings.routes):
        for dialect in Dialect:
            able = [name for name in route.chain if dialect in upstreams[name].dialects]
            if not able:
                yield f"note: routes[{i}]: callers of the {dialect} API cannot be served"
            elif len(able) < len(route.chain):
                yield f"note: routes[{i}]: callers of the {dialect} API are served by {', '.join(able)} only"


def _keys(settings: Settings) -> Iterator[str]:
    for name, upstream in settings.upstreams.items():
        if upstream.key_file is None and upstream.provider not in ("fake", "vllm", "sglang"):
            yield f"note: upstreams.{name}: no key_file, requests go out without credentials"


def _followed(settings: Settings) -> Iterator[str]:
    folder = settings.gateway.secrets_dir
    for name, text in secret_files(settings).items():
        file = Path(folder or "", name)
        if not _readable(str(file)) or file.read_bytes() != text.encode():
            yield f"note: gateway.secrets_dir: {file} is not as it should be; run tidegate render --write-secrets"


def _models(settings: Settings) -> Iterator[str]:
    served = [model for route in settings.routes for model in route.models]
    for name, tenant in settings.tenants.items():
        for model in tenant.models:
            if model not in served and not any("*" in one for one in (model, *served)):
                yield f"note: tenants.{name}.models: no route serves {model!r}"


def _prices(settings: Settings) -> Iterator[str]:
    everywhere = any(tenant.dollars.limited for tenant in settings.tenants.values())
    everywhere |= any(tenant.sessions.max_usd for tenant in settings.tenants.values() if tenant.sessions)
    everywhere |= settings.sessions.max_usd is not None
    limited = {name for route in settings.routes if route.dollars.limited for name in route.chain}
    for name, upstream in settings.upstreams.items():
        if not upstream.prices and upstream.dollars.limited:
            yield f"note: upstreams.{name}.prices: not set, so its dollars are never spent"
        elif not upstream.prices and not upstream.owned and (everywhere or name in limited):
            yield f"note: upstreams.{name}.prices: not set, what it serves counts against nobody's dollars"
        for model in upstream.prices:
            if model not in ("*", upstream.canary_model) and not _is_served(settings, name, model):
                yield f"note: upstreams.{name}.prices: no route sends {model!r} there"
    yield from _steering(settings)


def _is_served(settings: Settings, name: str, own: str) -> bool:
    """Whether a route sends to this upstream what it calls `own`."""
    models = settings.upstreams[name].models
    public = [each for each, its in models.items() if its == own] + ([] if own in models else [own])
    return any(matches(each, route.models) for route in settings.routes if name in route.chain for each in public)


def _steering(settings: Settings) -> Iterator[str]:
    for i, route in enumerate(settings.routes):
        upstreams = {name: settings.upstreams[name] for name in route.chain}
        free = any(upstream.owned or _is_free(upstream) for upstream in upstreams.values())
        for name in (name for name, upstream in upstreams.items() if upstream.dollars.limited and not free):
            yield f"note: routes[{i}].chain: nothing in it is free, so it refuses when the dollars of {name} are spent"


def _is_free(upstream: UpstreamSettings) -> bool:
    prices = [one.rules() for each in upstream.prices.values() for one in each]
    return bool(prices) and all(map(is_free, prices))


def _bounds(settings: Settings) -> Iterator[str]:
    for name, lane in settings.lanes.items():
        for bound in ("max_requests", "max_tokens", "max_bytes"):
            mine, all_lanes = getattr(lane, bound), getattr(settings.queue, bound)
            if mine > all_lanes:
                yield f"note: lanes.{name}.{bound}: {mine:,} is never reached, queue.{bound} is {all_lanes:,}"


def _first_tokens(settings: Settings) -> Iterator[str]:
    """A silence can be told from first tokens that are late only where those must all come before it (see Dispatch)."""
    stall_s, idle_s = settings.timeouts.stall_s, settings.gateway.idle_timeout_s
    for i, route in enumerate(settings.routes):
        first_s = settings.first_token_s_of(route)
        tries = max(2, len(route.chain))  # an only upstream may be asked again
        late = f"note: routes[{i}]: {tries} first tokens may take {tries * first_s:g} s"
        if tries * first_s > idle_s:
            yield f"{late}, but after gateway.idle_timeout_s ({idle_s:g} s) Envoy ends it, whoever could still be asked"
        elif tries * first_s > stall_s:
            yield (
                f"{late}, longer than timeouts.stall_s ({stall_s:g} s): its streams may fall silent "
                f"for gateway.idle_timeout_s ({idle_s:g} s)"
            )
        elif (found := _silent_from(settings, route)) is not None:
            tries, tokens = found
            yield (
                f"note: routes[{i}]: {tries} first tokens of a prompt of more than {tokens:,} tokens may take longer "
                f"than timeouts.stall_s ({stall_s:g} s): its stream may fall silent for gateway.idle_timeout_s "
                f"({idle_s:g} s)"
            )


def _silent_from(settings: Settings, route: RouteSettings) -> tuple[int, int] | None:
    """How many are asked, and the tokens of a prompt beyond which all that may take longer than a stall.

    None where no window is large enough for such a prompt.
    """
    windows = sorted((settings.upstreams[name].window or USUAL_WINDOW for name in route.chain), reverse=True)
    first_s, timeouts = settings.first_token_s_of(route), settings.timeouts
    for able in range(len(windows), 0, -1):
        tries = max(2, able)
        tokens = int((timeouts.stall_s / tries - first_s) * timeouts.prompt_tokens_per_s)
        if tokens < windows[able - 1]:
            return tries, tokens
    return None


def _engines(settings: Settings) -> Iterator[str]:
    for name, upstream in settings.upstreams.items():
        where = f"note: upstreams.{name}"
        if upstream.provider in ("vllm", "sglang") and not (upstream.kv or upstream.concurrency):
            yield f"{where}: an engine without kv or concurrency; nothing keeps its cache from overflowing"
        if upstream.engine_priority and Dialect.ANTHROPIC in (upstream.dialects or upstream.engine.dialects):
            yield f"{where}.engine_priority: engines read none from callers of the anthropic API"
        if upstream.kv:
            yield from _marks(f"{where}.kv", upstream.kv, list(settings.lanes))


def _marks(where: str, kv: KvSettings, lanes: list[str]) -> Iterator[str]:
    if kv.prometheus and not kv.tokens:
        yield f"{where}.tokens: not set, and Prometheus does not tell; a few requests will go per reading"
    marks = {lane: kv.lanes[lane].high if lane in kv.lanes else kv.high for lane in lanes}
    for better, worse in pairwise(lanes):
        if marks[worse] > marks[better]:
            yield f"{where}.lanes: {worse} may fill the cache to {marks[worse]:g}, {better} only to {marks[better]:g}"


def _readable(path: str) -> bool:
    try:
        with Path(path).open("rb") as file:
            return bool(file.read(1))
    except OSError:
        return False
