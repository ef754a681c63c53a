"""What an Envoy configuration that Tidegate is merged into means for it: where its routes go, and what may surprise.

A setting of the connection manager holds for every route of it, so none is changed; where it does not suit what
Tidegate does, a note says what to expect and what to write.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from extproc.render.existing import dig
from extproc.render.parts import LLM_PATHS, paths_taken
from extproc.render.shape import Data
from extproc.settings import Settings

__all__ = ["about_manager", "about_routes", "first_to_take", "named"]

_CONDITIONS = (
    "headers", "query_parameters", "cookies", "grpc", "tls_context",
    "dynamic_metadata", "filter_state", "runtime_fraction",
)  # fmt: skip
_STREAM_IDLE_S = 300.0
_DELAYED_CLOSE_S = 1.0
"""Envoy's defaults."""
_SHOWN = 3
_CLAIMS = "claims"
_SWITCH = "type.googleapis.com/envoy.config.route.v3.FilterConfig"


def named(item: Any) -> str:
    """What messages call a filter."""
    return str(dig(item, "name") or dig(item, "typed_config", "@type")).removeprefix("envoy.filters.http.")


# ---------------------------------------------------------------------------------------------- routes


def first_to_take(routes: list[Data]) -> int:
    """Position of the first route that takes every request for one of the priced paths, else the end."""
    for i, route in enumerate(routes):
        if not _conditions(route) and any(_takes(route, path) for path in LLM_PATHS):
            return i
    return len(routes)


def about_routes(
    place: str, manager: Data, host: Data, routes: list[Data], at: int, settings: Settings
) -> Iterator[str]:
    """Notes on one virtual host whose routes from `at` on stand behind those of Tidegate."""
    for i, route in enumerate(routes):
        taken = [path for path in paths_taken(settings) if _takes(route, path)]
        name = str(dig(route, "name") or f"routes[{i}]")
        some = ", ".join(taken[:_SHOWN]) + (", ..." if len(taken) > _SHOWN else "")
        if taken and i < at:
            when = f" with its {', '.join(_conditions(route))}" if _conditions(route) else ""
            yield f"warning: {place}, route {name}: stands before Tidegate's and keeps requests{when} for {some}"
        elif taken and not _takes(route, "/"):
            yield f"warning: {place}, route {name}: no longer gets {some}, which Tidegate takes"
    for where, config in ((place, host), (place.partition(", virtual host")[0], dig(manager, "route_config"))):
        yield from _about_everybody(where, config)


def _about_everybody(place: str, config: Any) -> Iterator[str]:
    if added := [str(dig(one, "header", "key")) for one in dig(config, "request_headers_to_add") or []]:
        yield f"warning: {place}: request_headers_to_add are sent to LLM providers, too: {', '.join(added)}"
    if dig(config, "request_mirror_policies"):
        yield f"warning: {place}: request_mirror_policies copy LLM requests, too, and nobody counts the copies"
    if dig(config, "hedge_policy"):
        yield f"warning: {place}: hedge_policy may send an LLM request twice, and Tidegate counts one"


def _conditions(route: Data) -> list[str]:
    return [key for key in _CONDITIONS if dig(route, "match", key)]


def _takes(route: Data, path: str) -> bool:
    """Whether a route is for `path`, as far as paths decide."""
    match = dig(route, "match")
    if str(dig(match, "case_sensitive")).lower() == "false":
        match, path = {key: v.lower() if isinstance(v, str) else v for key, v in match.items()}, path.lower()
    if (exact := dig(match, "path")) is not None:
        return bool(path == exact)
    if (start := dig(match, "prefix")) is not None:
        return path.startswith(start)
    if (start := dig(match, "path_separated_prefix")) is not None:
        return path == start or path.startswith(f"{start}/")
    if (pattern := dig(match, "safe_regex", "regex")) is not None:
        return _fits(pattern, path)
    template = dig(match, "path_match_policy", "typed_config", "path_template")
    return template is not None and _fits(_pattern_of(template), path)


def _fits(pattern: str, path: str) -> bool:
    """Envoy's expressions are RE2; one that Python cannot read is taken for another path's."""
    try:
        return re.fullmatch(pattern, path) is not None
    except re.error:
        return False


def _pattern_of(template: str) -> str:
    """A regular expression for `/a/*/{rest=**}`."""
    plain = re.sub(r"\{\w+(?:=([^}]*))?\}", lambda found: found[1] or "*", template)
    return "".join({"**": ".*", "*": "[^/]+"}.get(piece, re.escape(piece)) for piece in re.split(r"(\*\*|\*)", plain))


# -------------------------------------------------------------------------------------------- manager


def about_manager(place: str, manager: Data, settings: Settings) -> Iterator[str]:
    """Notes on one connection manager."""
    yield from _about_times(place, manager, settings)
    if manager.get("upgrade_configs"):
        yield (
            f"warning: {place}: upgrade_configs: a request to an LLM path that asks for an upgrade hangs until "
            f"stream_idle_timeout, for it is read whole before it goes on; LLM APIs have no upgrades"
        )
    if settings.flood.per_address_rps and str(manager.get("use_remote_address")).lower() != "true":
        yield (
            f"warning: {place}: use_remote_address is not true: flood.per_address_rps counts by the address in "
            f"x-forwarded-for, which a caller can write unless a proxy in front of this Envoy does"
        )
    for item in manager.get("http_filters") or []:
        yield from _about_filter(place, item, settings)


def _about_times(place: str, manager: Data, settings: Settings) -> Iterator[str]:
    wait_s = settings.max_message_timeout_s
    idle_s = _seconds(manager.get("stream_idle_timeout"), _STREAM_IDLE_S)
    if 0 < idle_s < wait_s:
        yield (
            f"warning: {place}: stream_idle_timeout is {idle_s:g} s: what Tidegate holds for longer ends with 504; it "
            f"may hold for {wait_s:g} s. Set stream_idle_timeout: {wait_s + 5:g}s, or a shorter max_wait_s of the lanes"
        )
    close_s = _seconds(manager.get("delayed_close_timeout"), _DELAYED_CLOSE_S)
    if close_s:
        yield (
            f"note: {place}: delayed_close_timeout is {close_s:g} s: callers learn that much later that an answer was "
            f"cut, and a slow reader may miss the end of a large one. Set delayed_close_timeout: 0s"
        )
    if not _seconds(manager.get("request_timeout"), 0):
        limit_s = settings.gateway.upload_timeout_s
        yield (
            f"note: {place}: no request_timeout: a caller may take for ever to send a request, which Envoy keeps "
            f"meanwhile. Set request_timeout: {limit_s:g}s if your other routes allow it"
        )
    longest_s = _seconds(dig(manager, "common_http_protocol_options", "max_stream_duration"), 0)
    if longest_s:
        yield (
            f"warning: {place}: max_stream_duration is {longest_s:g} s: waiting and answer together, and a stream that "
            f"runs then is cut"
        )


def _about_filter(place: str, item: Data, settings: Settings) -> Iterator[str]:
    if str(dig(item, "name")).startswith("tidegate."):
        return
    config = dig(item, "typed_config")
    kind = str(dig(config, "@type"))
    if kind.endswith(".cors.v3.Cors"):
        yield (
            f"note: {place}, filter {named(item)}: answers preflights of LLM paths as before, but leaves the "
            f"answers there as they are: if browsers call these paths, set response_headers_to_add of the virtual host"
        )
    replaces = kind.endswith(".CredentialInjector") and _said(config, "overwrite") and not _said(item, "disabled")
    if replaces and _by_key(settings):
        yield (
            f"warning: {place}, filter {named(item)}: puts its key in place of the caller's before Tidegate reads who "
            f"calls (identity.tenant: api_key). Set disabled: true there, and switch it on for your own routes: "
            f'typed_per_filter_config: {{{dig(item, "name")}: {{"@type": {_SWITCH}, config: {{}}}}}}'
        )
    limit = str(dig(config, "max_request_bytes") or "")
    if limit.isdigit() and int(limit) < settings.gateway.max_body_bytes and "Buffer" in kind:
        yield (
            f"warning: {place}, filter {named(item)}: max_request_bytes {limit} is less than gateway.max_body_bytes "
            f"({settings.gateway.max_body_bytes}); larger LLM requests get its 413"
        )
    providers = dig(config, "providers")
    claims = [dig(one, "payload_in_metadata") for one in providers.values()] if isinstance(providers, dict) else []
    if settings.identity.jwt and _CLAIMS in claims:
        yield (
            f"warning: {place}, filter {named(item)}: writes what its tokens say where Tidegate reads it "
            f"(payload_in_metadata: {_CLAIMS}); its callers count as proven: choose another name there"
        )


def _said(item: Any, field: str) -> bool:
    return str(dig(item, field)).lower() == "true"


def _by_key(settings: Settings) -> bool:
    """Whether it matters which key a caller shows."""
    return "api_key" in settings.identity.tenant and any(one.key_sha256 for one in settings.tenants.values())


def _seconds(value: Any, default: float) -> float:
    try:
        return default if value is None else float(str(value).removesuffix("s"))
    except ValueError:
        return default
