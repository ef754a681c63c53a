"""What a pod's hooks and probes call: `tidegate ready` and `tidegate drain`, for an orchestrator that runs commands.

Draining Envoy takes care of three kinds of callers. New ones still come for some seconds, until everybody knows that
the pod ends: they are served; then the port is closed. Those with an open connection are told with each answer to make
another one next time. And who is waiting or being answered stays until that is done, and Envoy can end without cutting
anybody. Tidegate must outlive it.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request

from extproc.settings import Settings

__all__ = ["NotReadyError", "drain", "envoy_ready", "service_ready"]

ANSWER_S = 5.0
POLL_S = 0.1
QUIET_S = 1.5
"""Envoy keeps records back for up to a second: what ended has been told after this."""
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""What is asked is in this pod: a proxy for what is outside would not find it."""
ACTIVE = "http.tidegate.downstream_rq_active"
"""Requests that wait or are answered, on the gateway's own listener."""


class NotReadyError(Exception):
    """Who was asked does not answer, or not well."""


def service_ready(settings: Settings) -> None:
    """Ask Tidegate's health service. NotReadyError unless it serves."""
    import grpc  # noqa: PLC0415 - takes longer than all the rest, and only this needs it

    from extproc.wire.pb.health_pb2 import HealthCheckRequest, HealthCheckResponse  # noqa: PLC0415
    from extproc.wire.tls import CertificateError, channel  # noqa: PLC0415

    service = settings.service
    address = service.address
    try:
        asked = channel(address, service.tls, service.server_name)
    except CertificateError as error:
        raise NotReadyError(str(error)) from None
    with asked:
        check = asked.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        try:
            answer = check(HealthCheckRequest(), timeout=ANSWER_S)
        except grpc.RpcError as error:
            raise NotReadyError(f"{address}: {error.code().name}") from None
    if answer.status != HealthCheckResponse.SERVING:
        raise NotReadyError(f"{address}: does not serve")


def envoy_ready(settings: Settings) -> None:
    """Ask Envoy's admin page. NotReadyError unless it is ready."""
    _admin(settings, "ready")


def drain(settings: Settings, settle_s: float) -> bool:
    """Take Envoy out of use; returns when nothing is under way, or after `gateway.drain_s` (False: something still is).

    settle_s: how long new callers may still come. NotReadyError when there is no Envoy.
    """
    _admin(settings, "healthcheck/fail", post=True)  # from now on every answer ends its connection
    began = time.monotonic()
    time.sleep(min(settle_s, settings.gateway.drain_s))
    # Gates, which running requests still need, do not count as inbound: see render.listener.
    _admin(settings, "drain_listeners" + ("?inboundonly" if settings.gateway.profile == "classic" else ""), post=True)
    quiet_since = None
    while (now := time.monotonic()) < began + settings.gateway.drain_s:
        if _active(settings):
            quiet_since = None
        elif quiet_since is None:
            quiet_since = now
        elif now - quiet_since >= QUIET_S:
            return True
        time.sleep(POLL_S)
    return False


def _active(settings: Settings) -> int:
    lines = _admin(settings, f"stats?filter=^{ACTIVE}$").splitlines()
    return sum(int(line.rpartition(":")[2]) for line in lines)


def _admin(settings: Settings, path: str, *, post: bool = False) -> str:
    url = f"http://127.0.0.1:{settings.gateway.admin_port}/{path}"
    request = urllib.request.Request(url, method="POST" if post else "GET")
    try:
        with _DIRECT.open(request, timeout=ANSWER_S) as answer:
            return str(answer.read().decode())
    except (OSError, urllib.error.URLError) as error:
        raise NotReadyError(f"{url}: {error}") from None
