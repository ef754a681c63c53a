"""What happens to a request on its way to one upstream, per attempt.

All attempts of a request share one header map: what one upstream's filters set is still there for the next. So every
chain sets or removes each header that any other chain sets, and in any order of upstreams each sees only its own.

Credentials: the caller's never leave the gateway, and each upstream sees its own only. They are read by Envoy itself
from `key_file` and are in no rendered text. Envoy reads a key once, at its start; with `gateway.secrets_dir` it watches
the folder of the key, and a key that is replaced there by a rename (`mv`, or what Kubernetes does) is in use at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from extproc.core.request import Dialect
from extproc.render.hold import hold_headers
from extproc.render.lua import upstream_script
from extproc.render.shape import Data, extension, set_header, source
from extproc.render.tls import tls_secret_files
from extproc.render.tracing import TRACE_HEADERS, hides_traces
from extproc.settings import PROVIDERS, Provider, Settings, UpstreamSettings

__all__ = ["attempt_filters", "secret_files", "secrets", "upstream_filters"]

_ANTHROPIC_VERSION = "2023-06-01"

_CREDENTIALS = (
    "authorization",
    "x-api-key",
    "api-key",
    "x-goog-api-key",
    "proxy-authorization",
    "cookie",
    "openai-organization",
    "openai-project",
)
"""What callers prove themselves with, and what binds a call to an account. An upstream gets its own key only."""


_BARE_KEY = "x-tg-key"
"""Classic profile: header that holds a key for a moment."""
_OUR_NAMES = ("x-tidegate-", "x-envoy-")
"""Headers of an answer by which a caller knows that it is ours: no upstream may use them."""


def secrets(settings: Settings) -> list[Data]:
    """The keys, as secrets that Envoy reads from their files at its start; none where they are watched."""
    return [] if settings.gateway.secrets_dir else [_secret_of(name, file) for name, file in _key_files(settings)]


def secret_files(settings: Settings) -> dict[str, str]:
    """What has to be in `gateway.secrets_dir`: file name -> text. It tells Envoy where each key is, not the key."""
    if not settings.gateway.secrets_dir:
        return {}
    kind = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"
    keys = {
        f"{name}.json": {"resources": [{"@type": kind, **_secret_of(name, file)}]}
        for name, file in _key_files(settings)
    }
    return {name: json.dumps(told) for name, told in (keys | tls_secret_files(settings)).items()}


def _key_files(settings: Settings) -> Iterator[tuple[str, str]]:
    return ((name, upstream.key_file) for name, upstream in settings.upstreams.items() if upstream.key_file)


def _secret_of(name: str, file: str) -> Data:
    return {"name": _secret(name), "generic_secret": {"secret": {"filename": file}}}


def upstream_filters(settings: Settings, name: str) -> list[Data]:
    """The HTTP filters of one upstream's cluster."""
    codec = "envoy.extensions.filters.http.upstream_codec.v3.UpstreamCodec"
    return [*attempt_filters(settings, name), extension("envoy.filters.http.upstream_codec", codec)]


def attempt_filters(settings: Settings, name: str) -> list[Data]:
    """What happens to each attempt at one upstream, wherever these filters stand."""
    upstream = settings.upstreams[name]
    script = source(upstream_script(settings, name))
    return [
        *_own_key(settings, name),
        *([hold_headers()] if upstream.hold_headers else []),
        extension(
            "envoy.filters.http.header_mutation",
            "envoy.extensions.filters.http.header_mutation.v3.HeaderMutation",
            mutations={
                "request_mutations": list(_header_mutations(settings, upstream)),
                "response_mutations": [_remove_all(prefix) for prefix in _OUR_NAMES],
            },
        ),
        extension("tidegate.upstream", "envoy.extensions.filters.http.lua.v3.Lua", default_source_code=script),
    ]


def _own_key(settings: Settings, name: str) -> Iterator[Data]:
    upstream, folder = settings.upstreams[name], settings.gateway.secrets_dir
    if upstream.key_file:
        watched = {
            "path": f"{folder}/{name}.json",
            "watched_directory": {"path": str(Path(upstream.key_file).parent)},
        }
        provider = PROVIDERS[upstream.provider]
        credential = extension(
            "envoy.http.injected_credentials.generic",
            "envoy.extensions.http.injected_credentials.generic.v3.Generic",
            credential={
                "name": _secret(name),
                **({"sds_config": {"path_config_source": watched}} if folder else {}),
            },
            **_placed(settings, provider),
        )
        kind = "envoy.extensions.filters.http.credential_injector.v3.CredentialInjector"
        yield extension("envoy.filters.http.credential_injector", kind, overwrite=True, credential=credential)


def _placed(settings: Settings, provider: Provider) -> Data:
    """Where a key goes. Older Envoys put no word before it: there it goes into a header of ours first."""
    if not provider.key_prefix:
        return {"header": provider.key_header}
    if settings.gateway.profile == "classic":
        return {"header": _BARE_KEY}
    return {"header": provider.key_header, "header_value_prefix": provider.key_prefix}


def _header_mutations(settings: Settings, upstream: UpstreamSettings) -> Iterator[Data]:
    provider = PROVIDERS[upstream.provider]
    if hides_traces(settings, upstream):
        yield from ({"remove": header} for header in TRACE_HEADERS)
    own = provider.key_header if upstream.key_file else None
    jwt = (settings.identity.jwt.header,) if settings.identity.jwt else ()
    yield from ({"remove": header} for header in dict.fromkeys((*_CREDENTIALS, *jwt)) if header != own)
    if own and provider.key_prefix and settings.gateway.profile == "classic":
        yield {"append": set_header(own, f"{provider.key_prefix}%REQ({_BARE_KEY})%")}
        yield {"remove": _BARE_KEY}
    if Dialect.ANTHROPIC in (upstream.dialects or provider.dialects):
        yield {"append": set_header("anthropic-version", _ANTHROPIC_VERSION, only_if_absent=True)}


def _remove_all(prefix: str) -> Data:
    return {"remove_on_match": {"key_matcher": {"prefix": prefix, "ignore_case": True}}}


def _secret(name: str) -> str:
    return f"tidegate:key:{name}"
