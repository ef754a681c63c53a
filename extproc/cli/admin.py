"""`tidegate admin`: look at a running Tidegate's levers and move them, from a terminal.

Everything goes through the admin API, so what may be done, and what is written down, is the same as from the page.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from extproc.cli.reaching import CODES, AsJson, Reached, reaching, show
from extproc.console.terminal import harmless

__all__ = ["admin", "levers_told", "seconds"]

admin = typer.Typer(
    no_args_is_help=True, help="Look at what operators have moved in a running Tidegate, and move it.", epilog=CODES
)

V1 = "/api/v1"
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}

Reason = Annotated[str, typer.Option(help="Why, for the audit log.")]
For = Annotated[
    str | None, typer.Option("--for", metavar="TIME", help="As 90s, 15m or 2h, or seconds; until it is undone without.")
]
Lane = Annotated[str, typer.Argument(metavar="LANE")]
Upstream = Annotated[str, typer.Argument(metavar="UPSTREAM")]


def seconds(text: str | None) -> float | None:
    """As people write it: 90, 90s, 15m, 2h, 1d."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", text.strip())
    if not found or not (wanted := float(found[1]) * UNITS[found[2]]):
        raise typer.BadParameter(f"{text!r} is no time as 90s, 15m or 2h", param_hint="--for")
    return wanted


def levers_told(levers: Mapping[str, Any]) -> str:
    """What operators have moved, in words."""
    lines = ["BYPASS: no limit holds anybody" + _until(levers["bypass"])] if levers["bypass"] else []
    lines += ["draining: nobody new gets in"] if levers["draining"] else []
    lines += [f"lane {name} is paused{_until(lane)}" for name, lane in levers["lanes"].items() if lane["paused"]]
    lines += [f"upstream {name} is out{_until(each)}" for name, each in levers["upstreams"].items() if each["out"]]
    lines += [
        f"{each['place']} is {each['value']}, not {each['was']}{_until(each)} (id {each['id']})"
        for each in levers["changes"]
    ]
    return "\n".join(map(harmless, lines)) or "nothing is moved"


def _until(lever: Mapping[str, Any]) -> str:
    until = lever.get("until")
    return ", until undone" if until is None else f", until {_clock(until)}"


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _audit_told(page: Mapping[str, Any]) -> str:
    return "\n".join(map(_entry_told, page["actions"])) or "nothing was done"


def _entry_told(entry: Mapping[str, Any]) -> str:
    arguments = " ".join(f"{name}={each}" for name, each in entry["arguments"].items())
    words = [
        _clock(entry["at"]),
        entry["result"],
        entry["action"],
        arguments,
        f"by {entry['who'] or 'nobody'} from {entry['from']}",
        f"({entry['why']})" if entry.get("why") else "",
        f'"{entry["reason"]}"' if entry["reason"] else "",
        f"[{entry['unlisted']} more attempts before it]" if entry.get("unlisted") else "",
    ]
    return harmless("  ".join(filter(None, words)))


def _log_told(log: Mapping[str, Any]) -> str:
    return f"level {log['level']}, waits from {log['slow_s']:g} s on, {log['sample']:.0%} of such lines"


def _body(reason: str, for_: str | None = None, **more: Any) -> dict[str, Any]:
    told = {"reason": reason, "for_s": seconds(for_), **more}
    return {name: each for name, each in told.items() if each not in (None, "")}


def _ask(reached: Reached, method: str, *path: str, body: Mapping[str, Any] | None = None, query: str = "") -> Any:
    """What the admin API answers. path: its parts, as they are; ConsoleError tells why not."""
    from extproc.console.asking import ask, quoted  # noqa: PLC0415

    return ask(reached.access, method, "/".join((V1, *map(quoted, path))) + query, body)


def _move(reached: Reached, method: str, *path: str, body: Mapping[str, Any] | None = None, as_json: bool) -> None:
    """Ask for it, and print where all levers are then."""
    show(_ask(reached, method, *path, body=body), levers_told, as_json=as_json)


@admin.command("show")
@reaching
def show_levers(reached: Reached, *, as_json: AsJson = False) -> None:
    """Show what operators have moved."""
    _move(reached, "GET", "levers", as_json=as_json)


@admin.command()
@reaching
def pause(reached: Reached, lane: Lane, *, for_: For = None, reason: Reason = "", as_json: AsJson = False) -> None:
    """Let nobody of a lane go; who waits goes on waiting."""
    _move(reached, "POST", "lanes", lane, "pause", body=_body(reason, for_), as_json=as_json)


@admin.command()
@reaching
def resume(reached: Reached, lane: Lane, *, reason: Reason = "", as_json: AsJson = False) -> None:
    """Let a lane go on."""
    _move(reached, "POST", "lanes", lane, "resume", body=_body(reason), as_json=as_json)


@admin.command()
@reaching
def trip(reached: Reached, upstream: Upstream, *, reason: Reason = "", as_json: AsJson = False) -> None:
    """Open the breaker of an upstream; it closes again by its own rules."""
    _move(reached, "POST", "upstreams", upstream, "trip", body=_body(reason), as_json=as_json)


@admin.command()
@reaching
def reset(reached: Reached, upstream: Upstream, *, reason: Reason = "", as_json: AsJson = False) -> None:
    """Close the breaker of an upstream at once."""
    _move(reached, "POST", "upstreams", upstream, "reset", body=_body(reason), as_json=as_json)


@admin.command()
@reaching
def out(
    reached: Reached, upstream: Upstream, *, for_: For = None, reason: Reason = "", as_json: AsJson = False
) -> None:
    """Send nothing to an upstream."""
    _move(reached, "POST", "upstreams", upstream, "out", body=_body(reason, for_), as_json=as_json)


@admin.command("in")
@reaching
def in_(reached: Reached, upstream: Upstream, *, reason: Reason = "", as_json: AsJson = False) -> None:
    """Let an upstream be asked again."""
    _move(reached, "POST", "upstreams", upstream, "in", body=_body(reason), as_json=as_json)


@admin.command("set")
@reaching
def set_(
    reached: Reached,
    place: Annotated[str, typer.Argument(metavar="PLACE", help="As upstreams.primary.limits.0.tpm.")],
    value: Annotated[float, typer.Argument(metavar="VALUE")],
    *,
    for_: For = None,
    reason: Reason = "",
    as_json: AsJson = False,
) -> None:
    """Give a limit another value, for a while or until it is reverted."""
    number = int(value) if value.is_integer() else value
    _move(reached, "POST", "changes", body={"place": place, "value": number, **_body(reason, for_)}, as_json=as_json)


@admin.command()
@reaching
def revert(
    reached: Reached,
    id_: Annotated[str, typer.Argument(metavar="ID")],
    *,
    reason: Reason = "",
    as_json: AsJson = False,
) -> None:
    """Take a change of a limit back; `show` tells its id."""
    _move(reached, "DELETE", "changes", id_, body=_body(reason), as_json=as_json)


@admin.command()
@reaching
def bypass(
    reached: Reached,
    *,
    end: Annotated[bool, typer.Option("--end", help="Let limits hold again.")] = False,
    for_: For = None,
    reason: Reason = "",
    as_json: AsJson = False,
) -> None:
    """Let everybody go at once, also who waits: no limit holds anybody. Books are still kept."""
    _move(reached, "DELETE" if end else "POST", "bypass", body=_body(reason, None if end else for_), as_json=as_json)


@admin.command()
@reaching
def drain(
    reached: Reached,
    *,
    end: Annotated[bool, typer.Option("--end", help="Take requests again.")] = False,
    reason: Reason = "",
    as_json: AsJson = False,
) -> None:
    """Take no new requests; what waits or runs is finished."""
    _move(reached, "POST", "undrain" if end else "drain", body=_body(reason), as_json=as_json)


@admin.command()
@reaching
def log(
    reached: Reached,
    *,
    level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    slow_s: Annotated[
        float | None, typer.Option(min=0, help="A wait so long leaves a line, as a refusal does.")
    ] = None,
    sample: Annotated[float | None, typer.Option(min=0, max=1, help="Share of those lines that is written.")] = None,
    reason: Reason = "",
    as_json: AsJson = False,
) -> None:
    """Show what is written to the log, or change it until the next reload or start."""
    wanted = {
        name: each for name, each in (("level", level), ("slow_s", slow_s), ("sample", sample)) if each is not None
    }
    answer = _ask(reached, "PUT", "log", body={**wanted, **_body(reason)}) if wanted else _ask(reached, "GET", "log")
    show(answer, _log_told, as_json=as_json)


@admin.command()
@reaching
def audit(
    reached: Reached,
    *,
    limit: Annotated[int, typer.Option(min=1, max=500, help="So many of the last ones.")] = 50,
    as_json: AsJson = False,
) -> None:
    """Show what was done and by whom, the newest first."""
    show(_ask(reached, "GET", "audit", query=f"?limit={limit}"), _audit_told, as_json=as_json)
