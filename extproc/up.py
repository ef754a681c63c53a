"""`tidegate up`: the whole stack on this machine, and one line per second that says how it goes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from extproc.reloading import Watch
from extproc.settings import Settings, SettingsError, changes, load
from extproc.stack import Stack, StackError

__all__ = ["follow", "restart", "run", "summary"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(settings: Settings, workdir: Path, path: Path | None = None) -> None:
    """Start everything, show a line per second, stop everything on Ctrl-C or SIGTERM. StackError when it cannot run.

    path: the file that the settings are from, which is followed.
    """
    for name in _SIGNALS:
        signal.signal(name, _stop)
    workers = settings.gateway.workers or max(1, min(4, os.cpu_count() or 1))
    stack = Stack(settings, workdir, workers=workers)
    _say("starting ...")
    try:
        with stack:
            _greet(stack)
            _watch(stack, None if path is None else Watch(path))
    except KeyboardInterrupt:
        _say("\nstopped")


def _stop(_: int, __: FrameType | None) -> None:
    """The first signal ends the stack; any more must not keep it from ending in order."""
    for name in _SIGNALS:
        signal.signal(name, signal.SIG_IGN)
    raise KeyboardInterrupt


def summary(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """One line about the second between two states of the service."""
    then, tally = before["tally"], now["tally"]

    def per_second(name: str) -> int:
        return int(sum(tally[name].values()) - sum(then[name].values()))

    waiting = " ".join(f"{lane} {backlog['requests']}" for lane, backlog in now["waiting"].items())
    served = {name: tally["served"].get(name, 0) - then["served"].get(name, 0) for name in tally["served"]}
    by = " ".join(f"{name} {count}" for name, count in served.items() if count)
    refused = {name: tally["refused"][name] - then["refused"].get(name, 0) for name in tally["refused"]}
    shed = " ".join(f"{name} {count}" for name, count in refused.items() if count)
    room = [_room(key, counter) for key, counter in now["counters"].items() if key.startswith("upstream/")]
    failed = {name: tally["failed"][name] - then["failed"].get(name, 0) for name in tally["failed"]}
    lost = " ".join(f"{name} {count}" for name, count in failed.items() if count)
    running = now["flying"] - sum(backlog["requests"] for backlog in now["waiting"].values())
    sick = [f"{name} {breaker['state']}" for name, breaker in now["breakers"].items() if breaker["state"] != "closed"]
    parts = [
        f"waiting {waiting}",
        f"running {max(0, running)}",
        f"admitted {per_second('admitted')}/s",
        f"served {by or 0}",
        f"shed {shed or 0}",
        f"failed {lost}" if lost else "",
        f"free {' '.join(filter(None, room))}",
        f"breakers {' '.join(sick)}" if sick else "",
    ]
    return time.strftime("%H:%M:%S  ") + " | ".join(part for part in parts if part)


def _room(key: str, counter: Mapping[str, Any]) -> str:
    """How much is left of a token bucket or a cache, or how many slots; nothing of requests, nor of what is endless."""
    upstream = key.split("/")[1]
    if "fill" in counter:
        return f"{upstream} {max(0.0, 1.0 - counter['fill']):.0%} of its cache"
    if counter.get("limit", 0) is None:
        return ""
    if "limit" in counter:
        return f"{upstream} {counter['limit'] - counter['used']:g}/{counter['limit']} slots"
    if key.endswith("/requests"):
        return ""
    return f"{upstream} {max(0.0, counter['level'] / counter['capacity']):.0%}"


def _greet(stack: Stack) -> None:
    model = next((m for route in stack.settings.routes for m in route.models if "*" not in m), "MODEL")
    _say(f"Tidegate listens on {stack.url}; logs and the rendered envoy.yaml are in {stack.workdir}/")
    for name in stack.fakes:
        _say(f"  fake provider {name}: pid {stack.processes[name].pid} (kill it to see a failover)")
    _say(f"What goes on: {stack.console}/ (to act on it, the token is in {stack.token_file})")
    known_only = stack.settings.identity.unknown == "reject"
    _say(f"Try it{', as a caller that the config knows' if known_only else ''}:")
    _say(
        f"  curl {stack.url}/v1/chat/completions -H 'content-type: application/json' "
        f'-d \'{{"model":"{model}","max_tokens":32,"messages":[{{"role":"user","content":"hello"}}]}}\''
    )


def _watch(stack: Stack, file: Watch | None) -> None:
    before = stack.state()
    while True:
        time.sleep(1.0)
        _look_after(stack)
        if file is not None and file.changed():
            follow(stack, file.path)
        now = stack.state()
        if before and now:
            _say(summary(before, now))
        else:
            _say(time.strftime("%H:%M:%S  ") + "the service does not answer")
        before = now


def follow(stack: Stack, path: Path) -> None:
    """Have the service read the settings anew, from the file that it follows; a mistake is told, no more."""
    try:
        stack.write_config(load(path))
    except SettingsError as error:
        _say(f"{path} is not followed:\n{error}")
    else:
        _say(f"{path} has changed; what the service makes of it is in {stack.workdir}/service.log")


def _look_after(stack: Stack) -> None:
    """A dead service is started again, as a supervisor would; a dead Envoy is the end; a dead fake stays dead."""
    if stack.processes["envoy"].poll() is not None:
        raise StackError(f"envoy ended; see {stack.workdir / 'envoy.log'}")
    if stack.processes["service"].poll() is not None:
        _say("the service ended; starting it again")
        restart(stack)


def restart(stack: Stack) -> None:
    """Start the service again, with as much of what it followed as fits the Envoy that runs."""
    try:
        held, _ = changes.follow(stack.settings, load(stack.workdir / "tidegate.yaml", {}))
    except SettingsError:
        held = stack.settings
    stack.write_config(held)
    stack.start_service()


def _say(line: str) -> None:
    print(line, file=sys.stdout, flush=True)  # noqa: T201
