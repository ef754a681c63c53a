"""`tidegate admin`: look at a running Tidegate's levers and move them, from a terminal.

Everything goes through the admin API, so what may be done, and what is written down, is the same as from the page.
"""

from __future__ import annotations

import inspect
import json
import re
import time
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from extproc.console.terminal import harmless
from extproc.settings import load

__all__ = [
    "CaFile", "ClientCertFile", "ClientKeyFile", "Console", "TokenFile", "admin", "levers_told", "seconds",
]  # fmt: skip

admin = typer.Typer(no_args_is_help=True, help="Look at what operators have moved in a running Tidegate, and move it.")

V1 = "/api/v1"
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}

Reason = Annotated[str, typer.Option(help="Why, for the audit log.")]
For = Annotated[
    str | None, typer.Option("--for", metavar="TIME", help="As 90s, 15m or 2h, or seconds; until it is undone without.")
]
Console = Annotated[str | None, typer.Option(help="host:port or URL of its console, where the config does not say it.")]
TokenFile = Annotated[
    str | None,
    typer.Option(
        help="The token that proves who asks; else TIDEGATE_TOKEN, that of the config, or what `tidegate up` made here."
    ),
]
CaFile = Annotated[str | None, typer.Option(help="Whose certificates to trust, for https.")]
ClientCertFile = Annotated[str | None, typer.Option(help="Certificate that proves who asks.")]
ClientKeyFile = Annotated[str | None, typer.Option(help="The key that belongs to it.")]
Lane = Annotated[str, typer.Argument(metavar="LANE")]
Upstream = Annotated[str, typer.Argument(metavar="UPSTREAM")]


def _common(
    *,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Of the Tidegate that runs: its console and its token.")
    ] = None,
    console: Console = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    client_cert_file: ClientCertFile = None,
    client_key_file: ClientKeyFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> tuple[Any, bool]:
    """How to reach the console, and whether its answer is to be printed as it is."""
    from extproc.console.asking import access  # noqa: PLC0415

    place = Path("tidegate.yaml") if config is None and Path("tidegate.yaml").exists() else config
    reached = access(
        load(place),
        console=console,
        token_file=token_file,
        ca_file=ca_file,
        client_cert_file=client_cert_file,
        client_key_file=client_key_file,
    )
    return reached, as_json


Asking = Callable[..., Any]


def _command(name: str, told: Callable[[Any], str]) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """A command that has all options of `_common`. The function gets what asks for it, and returns the answer."""
    shared = inspect.signature(_common, eval_str=True).parameters

    def made(function: Callable[..., Any]) -> Callable[..., None]:
        own = [*inspect.signature(function, eval_str=True).parameters.values()][1:]

        @wraps(function)
        def command(**given: Any) -> None:
            from extproc.console.asking import ConsoleError, ask  # noqa: PLC0415

            try:
                reached, as_json = _common(**{key: given.pop(key) for key in shared})
                answer = function(lambda method, path, body=None: ask(reached, method, V1 + path, body), **given)
            except ConsoleError as error:
                typer.echo(harmless(str(error)), err=True)
                raise typer.Exit(1) from None
            typer.echo(json.dumps(answer, indent=2) if as_json else told(answer))

        parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *shared.values())]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        admin.command(name)(command)
        return command

    return made


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


def _quoted(name: str) -> str:
    return quote(name, safe="")


def _body(reason: str, for_: str | None = None, **more: Any) -> dict[str, Any]:
    told = {"reason": reason, "for_s": seconds(for_), **more}
    return {name: each for name, each in told.items() if each not in (None, "")}


@_command("show", levers_told)
def show(asks: Asking) -> Any:
    """Show what operators have moved."""
    return asks("GET", "/levers")


@_command("pause", levers_told)
def pause(asks: Asking, lane: Lane, *, for_: For = None, reason: Reason = "") -> Any:
    """Let nobody of a lane go; who waits goes on waiting."""
    return asks("POST", f"/lanes/{_quoted(lane)}/pause", _body(reason, for_))


@_command("resume", levers_told)
def resume(asks: Asking, lane: Lane, *, reason: Reason = "") -> Any:
    """Let a lane go on."""
    return asks("POST", f"/lanes/{_quoted(lane)}/resume", _body(reason))


@_command("trip", levers_told)
def trip(asks: Asking, upstream: Upstream, *, reason: Reason = "") -> Any:
    """Open the breaker of an upstream; it closes again by its own rules."""
    return asks("POST", f"/upstreams/{_quoted(upstream)}/trip", _body(reason))


@_command("reset", levers_told)
def reset(asks: Asking, upstream: Upstream, *, reason: Reason = "") -> Any:
    """Close the breaker of an upstream at once."""
    return asks("POST", f"/upstreams/{_quoted(upstream)}/reset", _body(reason))


@_command("out", levers_told)
def out(asks: Asking, upstream: Upstream, *, for_: For = None, reason: Reason = "") -> Any:
    """Send nothing to an upstream."""
    return asks("POST", f"/upstreams/{_quoted(upstream)}/out", _body(reason, for_))


@_command("in", levers_told)
def in_(asks: Asking, upstream: Upstream, *, reason: Reason = "") -> Any:
    """Let an upstream be asked again."""
    return asks("POST", f"/upstreams/{_quoted(upstream)}/in", _body(reason))


@_command("set", levers_told)
def set_(
    asks: Asking,
    place: Annotated[str, typer.Argument(metavar="PLACE", help="As upstreams.primary.limits.0.tpm.")],
    value: Annotated[float, typer.Argument(metavar="VALUE")],
    *,
    for_: For = None,
    reason: Reason = "",
) -> Any:
    """Give a limit another value, for a while or until it is reverted."""
    number = int(value) if value.is_integer() else value
    return asks("POST", "/changes", {"place": place, "value": number, **_body(reason, for_)})


@_command("revert", levers_told)
def revert(asks: Asking, id_: Annotated[str, typer.Argument(metavar="ID")], *, reason: Reason = "") -> Any:
    """Take a change of a limit back; `show` tells its id."""
    return asks("DELETE", f"/changes/{_quoted(id_)}", _body(reason))


@_command("bypass", levers_told)
def bypass(
    asks: Asking,
    *,
    end: Annotated[bool, typer.Option("--end", help="Let limits hold again.")] = False,
    for_: For = None,
    reason: Reason = "",
) -> Any:
    """Let everybody go at once, also who waits: no limit holds anybody. Books are still kept."""
    return asks("DELETE" if end else "POST", "/bypass", _body(reason, None if end else for_))


@_command("drain", levers_told)
def drain(
    asks: Asking,
    *,
    end: Annotated[bool, typer.Option("--end", help="Take requests again.")] = False,
    reason: Reason = "",
) -> Any:
    """Take no new requests; what waits or runs is finished."""
    return asks("POST", "/undrain" if end else "/drain", _body(reason))


@_command("log", _log_told)
def log(
    asks: Asking,
    *,
    level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    slow_s: Annotated[
        float | None, typer.Option(min=0, help="A wait so long leaves a line, as a refusal does.")
    ] = None,
    sample: Annotated[float | None, typer.Option(min=0, max=1, help="Share of those lines that is written.")] = None,
    reason: Reason = "",
) -> Any:
    """Show what is written to the log, or change it until the next reload or start."""
    wanted = {
        name: each for name, each in (("level", level), ("slow_s", slow_s), ("sample", sample)) if each is not None
    }
    return asks("PUT", "/log", {**wanted, **_body(reason)}) if wanted else asks("GET", "/log")


@_command("audit", _audit_told)
def audit(
    asks: Asking, *, limit: Annotated[int, typer.Option(min=1, max=500, help="So many of the last ones.")] = 50
) -> Any:
    """Show what was done and by whom, the newest first."""
    return asks("GET", f"/audit?limit={limit}")
