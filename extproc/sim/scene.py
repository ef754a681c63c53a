"""The stage of `--overload`: settings of a private stack whose first upstream is too small for the trace by a factor.

The account limit that the fake provider enforces is the offered tokens per second divided by the factor, and the
gateway is told the same number; it keeps its usual headroom below it, in rate and in burst. So a gateway that lets too
much through meets a real 429. Behind it stands a small upstream of our own, as a chain should end: lanes that spill
use it, lanes that hold do not, and both are shed by what they cannot wait for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from pydantic import ValidationError

from extproc.core.policy import WhenBusy
from extproc.settings import (
    FakeBehaviour,
    FloodSettings,
    GatewaySettings,
    IdentitySettings,
    LaneSettings,
    LimitSettings,
    RouteSettings,
    ServiceSettings,
    Settings,
    SettingsError,
    TenantSettings,
    UpstreamSettings,
)

__all__ = ["PORTS", "Scene", "settings_of", "told"]

PORTS = 8
"""How many free ports `settings_of` needs."""
TENANT_HEADER = "x-tidegate-tenant"
KNOWN = ("primary", "backup", "local")
HEADROOM = 0.05


@dataclass(frozen=True, slots=True)
class Scene:
    """What a private stack is made of.

    overload: offered tokens per second over the primary's limit. chain: of primary, backup, local, in that order or
    another. backup_share: the backup's limit as a share of the primary's. local_concurrency: answers at a time.
    waits_s: longest waits of P0, P1 and P2, short enough that one minute shows requests go, wait, and be shed.
    """

    overload: float = 2.0
    chain: tuple[str, ...] = ("primary", "local")
    backup_share: float = 0.5
    local_concurrency: int = 4
    waits_s: tuple[float, float, float] = (4.0, 12.0, 30.0)
    local_tokens_per_s: float = 100.0
    output_tokens_per_s: float = 400.0
    tokens_per_event: int = 16
    burst_s: float = 10.0


def settings_of(scene: Scene, offered: float, model: str, tenants: Sequence[str], ports: Sequence[int]) -> Settings:
    """Settings for `offered` tokens per second on `ports`. SettingsError when they do not fit together."""
    if unknown := [name for name in scene.chain if name not in KNOWN]:
        raise SettingsError([f"chain: {unknown[0]!r} is not one of {', '.join(KNOWN)}"])
    try:
        settings = _settings(scene, offered, model, tenants, ports)
    except ValidationError as error:
        raise SettingsError([f"private stack: {e['loc'][-1]}: {e['msg']}" for e in error.errors()]) from None
    if problems := list(settings.problems()):
        raise SettingsError([f"private stack: {problem}" for problem in problems])
    return settings


def told(scene: Scene, settings: Settings, offered: float) -> Iterator[str]:
    """A line for each thing about the stage that a reader of the figures must know."""
    yield f"private stack, chain {' -> '.join(scene.chain)}; offered {offered:,.0f} tokens/s (prompt + max_tokens)"
    for name in scene.chain:
        upstream = settings.upstreams[name]
        for limit in upstream.limits:
            assert limit.tpm is not None  # noqa: S101 - every limit here is one of tokens
            yield (
                f"{name}: the provider allows {limit.tpm / 60:,.0f} tokens/s and {limit.burst_s:g} s of burst, counts "
                f"its own way, charges prompt + max_tokens on arrival; the gateway keeps {upstream.headroom:.0%} below"
            )
        if upstream.concurrency:
            yield f"{name}: owned, {upstream.concurrency} answers at a time"
        if upstream.fake:
            fake = upstream.fake
            yield (
                f"{name}: first token after {fake.first_token_s:g} s + prompt at {fake.prompt_tokens_per_s:,.0f} "
                f"tokens/s, then {fake.output_tokens_per_s:g} tokens/s, {fake.tokens_per_event} to an event"
            )
    lanes = (f"{name} {lane.max_wait_s:g} s, {lane.when_busy}" for name, lane in settings.lanes.items())
    yield f"lanes: longest wait and what a busy first choice means: {'; '.join(lanes)}"


def _settings(scene: Scene, offered: float, model: str, tenants: Sequence[str], ports: Sequence[int]) -> Settings:
    gateway, admin, probe, service, console, *fakes = ports
    p0, p1, p2 = scene.waits_s
    return Settings(
        gateway=GatewaySettings(port=gateway, admin_port=admin, probe_port=probe),
        service=ServiceSettings(address=f"127.0.0.1:{service}", console=f"127.0.0.1:{console}", restart_ramp_s=0),
        identity=IdentitySettings(tenant=(f"header:{TENANT_HEADER}",)),
        upstreams={
            name: _upstream(scene, name, offered, port)
            for name, port in zip(KNOWN, fakes, strict=False)
            if name in scene.chain
        },
        routes=(RouteSettings(models=(model,), chain=scene.chain, acknowledge_unowned=True),),
        lanes={
            "P0": LaneSettings(max_wait_s=p0),
            "P1": LaneSettings(max_wait_s=p1),
            "P2": LaneSettings(max_wait_s=p2, when_busy=WhenBusy.HOLD),
        },
        tenants={name: TenantSettings() for name in tenants},
        flood=FloodSettings(per_key_rps=None, per_address_rps=None),
    )


def _upstream(scene: Scene, name: str, offered: float, port: int) -> UpstreamSettings:
    pace = scene.local_tokens_per_s if name == "local" else scene.output_tokens_per_s
    url = f"http://127.0.0.1:{port}"
    behaviour = FakeBehaviour(output_tokens_per_s=pace, tokens_per_event=scene.tokens_per_event, burst_s=scene.burst_s)
    if name == "local":
        return UpstreamSettings(
            provider="fake", url=url, owned=True, concurrency=scene.local_concurrency, fake=behaviour
        )
    share = scene.backup_share if name == "backup" else 1.0
    limit = LimitSettings(tpm=ceil(offered * 60 / scene.overload * share), burst_s=scene.burst_s)
    return UpstreamSettings(provider="fake", url=url, limits=(limit,), headroom=HEADROOM, fake=behaviour)
