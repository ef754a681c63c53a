"""What Envoy reports to the service: one outcome for each request, and each attempt that failed.

Records are gathered for 20 ms or 16 KiB, so that one message carries many. A long answer also reports every few seconds
while it runs, which keeps its slot taken over a restart of the service.

An outcome carries the request's metadata (as long as one namespace of it is untyped, which `llm.route` is). The record
of an attempt carries none, nor the attempt's number: it is joined to its request by the request id.
"""

from __future__ import annotations

from extproc.dialects.rates import NAMES
from extproc.render.names import (
    ATTEMPTS_LOG,
    ERROR_HEADER,
    LAST_RESORT_HEADER,
    OUTCOMES_LOG,
    ROUTE,
    SERVICE_CLUSTER,
    STATUS_HEADER,
    WAIT_HEADER,
    one_service,
)
from extproc.render.shape import Data, extension
from extproc.settings import Settings

__all__ = ["attempts", "outcomes"]

_KIND = "envoy.extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig"


def outcomes(settings: Settings) -> list[Data]:
    """The log of the HTTP connection manager: how each request ended, told to the Tidegate that let it go."""
    tags = {
        "ttft_us": "%COMMON_DURATION(US_TX_BEG:US_RX_BODY_BEG:us)%",
        "ticket": f"%DYNAMIC_METADATA({ROUTE}:ticket)%",
    }
    logs = _logs(settings, OUTCOMES_LOG, tags, ["retry-after", LAST_RESORT_HEADER])
    if not settings.service.addresses:
        return logs
    return [{**log, "filter": _let_go_by(rank)} for rank, log in enumerate(logs)]


def attempts(settings: Settings, *also: str) -> list[Data]:
    """The log of the router: each attempt that failed. also: more response headers to tell. Of several Tidegates all
    are told, for an attempt carries no ticket; breakers of others learn from it, too.
    """
    failed = {"comparison": {"op": "GE", "value": {"default_value": 400, "runtime_key": "tidegate.attempts.from"}}}
    conditions = [{"status_code_filter": failed}, {"response_flag_filter": {}}]
    logs = _logs(settings, ATTEMPTS_LOG, {}, [ERROR_HEADER, STATUS_HEADER, WAIT_HEADER, *also, *sorted(NAMES)])
    return [{**log, "filter": {"or_filter": {"filters": conditions}}} for log in logs]


def _let_go_by(rank: int) -> Data:
    ticket = {"filter": ROUTE, "path": [{"key": "ticket"}], "value": {"string_match": {"prefix": f"{rank}-"}}}
    return {"metadata_filter": {"matcher": ticket, "match_if_key_not_found": False}}


def _logs(settings: Settings, name: str, tags: dict[str, str], response_headers: list[str]) -> list[Data]:
    """One to the only Tidegate, or one to each."""
    ranks = range(len(settings.service.addresses))
    return [_log(f"{name}.{rank}", name, one_service(rank), tags, response_headers) for rank in ranks] or [
        _log(name, name, SERVICE_CLUSTER, tags, response_headers)
    ]


def _log(called: str, name: str, cluster: str, tags: dict[str, str], response_headers: list[str]) -> Data:
    return extension(
        f"tidegate.{called}",
        _KIND,
        common_config={
            "log_name": name,
            "transport_api_version": "V3",
            "grpc_service": {"envoy_grpc": {"cluster_name": cluster}},
            "buffer_flush_interval": "0.020s",
            "buffer_size_bytes": 16384,
            "custom_tags": [{"tag": tag, "value": value} for tag, value in tags.items()],
        },
        additional_response_headers_to_log=response_headers,
    )
