"""One YAML file and the environment, validated at the door, turned into the frozen rules of `core`.

    load(path) -> Settings        every mistake raises SettingsError: one line each, with its path in the file
    settings.policy() -> Policy   what the core decides by

Order of precedence: environment over file over the defaults below. `TIDEGATE_PORT` sets the gateway's port; any key can
be set as `TIDEGATE__SECTION__KEY=value` (the value is read as YAML). Secrets are never values here: `key_file` names a
file that Envoy reads by itself.

Deliberately not here: how Envoy is configured (render) and whether Envoy agrees (the `check` command).
"""

from extproc.settings.loading import SettingsError, load, parse
from extproc.settings.providers import PROVIDERS, EngineMetrics, Provider
from extproc.settings.sections import (
    AdminSettings,
    BreakerSettings,
    FakeBehaviour,
    FloodSettings,
    GatewaySettings,
    IdentitySettings,
    JwtSettings,
    KvSettings,
    LaneSettings,
    LimitSettings,
    LogSettings,
    OtlpSettings,
    PriceSettings,
    QueueSettings,
    RetrySettings,
    RouteSettings,
    Section,
    ServiceSettings,
    ServiceTlsSettings,
    SessionSettings,
    TelemetrySettings,
    TenantSettings,
    TimeoutSettings,
    TokenSettings,
    UpstreamSettings,
)
from extproc.settings.whole import Settings

__all__ = [
    "PROVIDERS",
    "AdminSettings",
    "BreakerSettings",
    "EngineMetrics",
    "FakeBehaviour",
    "FloodSettings",
    "GatewaySettings",
    "IdentitySettings",
    "JwtSettings",
    "KvSettings",
    "LaneSettings",
    "LimitSettings",
    "LogSettings",
    "OtlpSettings",
    "PriceSettings",
    "Provider",
    "QueueSettings",
    "RetrySettings",
    "RouteSettings",
    "Section",
    "ServiceSettings",
    "ServiceTlsSettings",
    "SessionSettings",
    "Settings",
    "SettingsError",
    "TelemetrySettings",
    "TenantSettings",
    "TimeoutSettings",
    "TokenSettings",
    "UpstreamSettings",
    "load",
    "parse",
]
