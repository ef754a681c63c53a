"""What is wrong with a connection manager that Tidegate's routes or filters stand in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from extproc.against.comparing import Difference, differences, same, short
from extproc.against.dump import Manager, Running, managers
from extproc.against.expected import Expected, admits, names
from extproc.against.finding import Finding, findings_of
from extproc.render.existing import dig
from extproc.render.parts import NO_UPGRADES
from extproc.render.shape import Data
from extproc.render.surroundings import first_to_take, named
from extproc.settings import Settings

__all__ = ["about_managers"]

_ANSWERS_CHANGED = ("Compressor", "Decompressor")
_ASKED_FIRST = ("JwtAuthentication", "ExtAuthz", "RBAC", "OAuth2", "BasicAuth", "ApiKeyAuth", "RateLimit", "CSRF")
"""Filters, by the end of their type, that turn requests away."""
_SHOWN = 4


def about_managers(running: Running, expected: Expected, settings: Settings) -> Iterator[Finding]:
    """Of every manager that has to do with Tidegate; and that there is one."""
    ours = [one for one in managers(running) if _is_ours(one, expected)]
    if not ours:
        told = ", ".join(dict.fromkeys(one.place for one in managers(running))) or "none that serves HTTP"
        do = expected.mend("all")
        yield Finding("listeners", "Tidegate's filters and routes", "one that has them", told, do)
    for manager in ours:
        away = str(dig(manager.listener, "name")) in running.from_control_plane
        yield from _filters(manager, expected, away)
        yield from _routes(manager, expected, running)
        yield from _logs(manager, expected, away)
        yield from _replies(manager, expected, away)
        yield from _times(manager, expected, settings)
        yield from _buffers(manager, expected, settings)
        yield from _own(manager, expected)


def _is_ours(manager: Manager, expected: Expected) -> bool:
    if manager.listener is not None and dig(manager.listener, "name") in ("probe", *names(expected.listeners)):
        return False
    if any(name.startswith("tidegate.") for name in names(_filters_in(manager))):
        return True
    return any(map(admits, _filters_in(manager))) or any(_our_hosts(manager, expected))


def _filters_in(manager: Manager) -> list[Data]:
    return [one for one in manager.config.get("http_filters") or [] if isinstance(one, dict)]


# -------------------------------------------------------------------------------------------- filters


def _filters(manager: Manager, expected: Expected, away: bool) -> Iterator[Finding]:  # noqa: FBT001 - one of two
    do, place = expected.mend("http_filters", control_plane=away), manager.place
    there = _filters_in(manager)
    at = {item["name"]: _positions(item, there) for item in expected.filters}
    if missing := [name for name, found in at.items() if not found]:
        yield Finding(place, "http_filters", ", ".join(missing), "none of that name" + "s" * (len(missing) > 1), do)
    for name, found in at.items():
        if len(found) > 1:
            yield Finding(place, f"filter {name}", "it once", f"it {len(found)} times", f"take the others out: {do}")
    present = [name for name, found in at.items() if found]
    order = sorted(present, key=lambda name: at[name][0])
    if order != present:
        yield Finding(place, "order of http_filters", ", ".join(present), ", ".join(order), do)
    for item in expected.filters:
        for i in at[item["name"]][:1]:
            named_so = {**there[i], "name": item["name"]}
            yield from findings_of(place, differences(item, named_so), do, f"filter {item['name']}")
    for name in names(there):
        if expected.is_ours(name) and name not in at:
            yield Finding(place, f"filter {name}", "nothing", "it", f"rendered for other settings: {do}")
    if present:
        yield from _foreign(place, there, at, expected)


def _positions(item: Data, there: list[Data]) -> list[int]:
    """Where a filter stands. What asks Tidegate may be called otherwise."""
    found = [i for i, one in enumerate(there) if dig(one, "name") == item["name"]]
    return found or [i for i, one in enumerate(there) if admits(item) and admits(one)]


def _foreign(place: str, there: list[Data], at: dict[str, list[int]], expected: Expected) -> Iterator[Finding]:
    """Filters of others that stand where they do harm; a request meets them in order, an answer in reverse."""
    first = min(found[0] for found in at.values() if found)
    admission = next((at[one["name"]][0] for one in expected.filters if admits(one) and at[one["name"]]), len(there))
    for i, item in enumerate(there):
        kind = str(dig(item, "typed_config", "@type")).rsplit(".", 1)[-1]
        if i in {index for found in at.values() for index in found}:
            continue
        if i > first and kind.startswith(_ANSWERS_CHANGED):
            why = f"answers reach Tidegate's filters changed: move it before {there[first]['name']}"
            yield Finding(place, f"filter {named(item)}", "before Tidegate's", "behind them", why)
        elif i > admission and kind.endswith(_ASKED_FIRST):
            why = f"Tidegate admits what it turns away: move it before {there[first]['name']}"
            yield Finding(
                place, f"filter {named(item)}", "before Tidegate's", f"behind {there[admission]['name']}", why
            )


# --------------------------------------------------------------------------------------------- routes


def _our_hosts(manager: Manager, expected: Expected) -> Iterator[tuple[Data, Data]]:
    """Route table and virtual host of each host that has any route of ours."""
    wanted = set(names(expected.routes))
    for table in manager.tables:
        for host in table.get("virtual_hosts") or []:
            there = names(host.get("routes") or [])
            if any(name.startswith("tidegate.") for name in there) or len(wanted & set(there)) > 1:
                yield table, host


def _routes(manager: Manager, expected: Expected, running: Running) -> Iterator[Finding]:
    if manager.awaited is not None:
        do = "see why the control plane does not send it"
        yield Finding(manager.place, f"route table {manager.awaited}", "it, by RDS", "that it has not arrived", do)
        return
    hosts = list(_our_hosts(manager, expected))
    if not hosts:
        tables = ", ".join(names(manager.tables)) or "no route table"
        told = f"none of them in {tables}"
        yield Finding(manager.place, "routes", _some(names(expected.routes)), told, expected.mend("routes"))
    for table, host in hosts:
        away = "rds" in manager.config and str(dig(table, "name")) in running.routes
        do = expected.mend("routes", control_plane=away and "path_config_source" not in str(manager.config["rds"]))
        place = f"{manager.place}, virtual host {dig(host, 'name')}"
        called = {name: item["name"] for item in expected.filters for name in _other_names(item, manager)}
        yield from _routes_of(place, [_renamed(one, called) for one in host["routes"]], expected, do)
        yield from findings_of(place, _asked(expected.own_host, host), do)


def _other_names(item: Data, manager: Manager) -> list[str]:
    """How a filter of ours is called here, where that is otherwise."""
    there = _filters_in(manager)
    return [name for name in (str(there[i].get("name")) for i in _positions(item, there)) if name != item["name"]]


def _renamed(route: Data, called: dict[str, str]) -> Data:
    """A route whose settings of filters stand under the names that we gave those."""
    own = dig(route, "typed_per_filter_config")
    if not called or not isinstance(own, dict):
        return route
    return {**route, "typed_per_filter_config": {called.get(name, name): one for name, one in own.items()}}


def _routes_of(place: str, there: list[Data], expected: Expected, do: str) -> Iterator[Finding]:
    at = {name: i for i, name in reversed(list(enumerate(names(there))))}
    wanted = {route["name"]: route for route in expected.routes}
    if missing := [name for name in wanted if name not in at]:
        yield Finding(place, "routes", _some(missing), "none of that name" + "s" * (len(missing) > 1), do)
    present = [name for name in wanted if name in at]
    if present != (order := sorted(present, key=at.__getitem__)):
        moved = [(one, other) for one, other in zip(present, order, strict=True) if one != other]
        yield Finding(place, "order of routes", f"{moved[0][0]} next", moved[0][1], do)
    for name in present:
        yield from findings_of(place, differences(wanted[name], there[at[name]]), do, f"route {name}")
    for name in names(there):
        if expected.is_ours(name) and name not in wanted and name != NO_UPGRADES:
            yield Finding(place, f"route {name}", "nothing", "it", f"rendered for other settings: {do}")
    last = max((at[name] for name in present), default=-1)
    others = [route for route in there[: last + 1] if dig(route, "name") not in wanted]
    first = first_to_take(others)
    if first < len(others):
        taking = others[first]
        name = dig(taking, "name") or f"routes[{there.index(taking)}]"
        match = short(dig(taking, "match"))
        yield Finding(
            place,
            f"route {name}",
            "Tidegate's routes before it",
            f"it before them, with {match}",
            "move it behind them",
        )


def _some(items: list[str]) -> str:
    rest = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


# ------------------------------------------------------------------------------- logs and local replies


def _logs(manager: Manager, expected: Expected, away: bool) -> Iterator[Finding]:  # noqa: FBT001 - one of two
    router = _router(manager)
    for part, wanted, there in (
        ("access_log", expected.access_log, manager.config.get("access_log")),
        ("upstream_log", expected.upstream_log, dig(router, "typed_config", "upstream_log")),
    ):
        do = expected.mend(part, control_plane=away)
        found = {str(dig(one, "name")): one for one in there or []}
        for log in wanted:
            if log["name"] in found:
                yield from findings_of(manager.place, differences(log, found[log["name"]]), do, f"{part} {log['name']}")
            else:
                why = f"Tidegate would not learn how requests end: {do}"
                yield Finding(manager.place, part, log["name"], _some(list(found)) or "no log", why)


def _router(manager: Manager) -> Data:
    return next((one for one in reversed(_filters_in(manager)) if _is_router(one)), {})


def _is_router(item: Data) -> bool:
    return str(dig(item, "typed_config", "@type")).endswith(".Router")


def _replies(manager: Manager, expected: Expected, away: bool) -> Iterator[Finding]:  # noqa: FBT001 - one of two
    """Ours come before those of others, in their order."""
    there = dig(manager.config, "local_reply_config", "mappers") or []
    wanted, what = expected.mappers, "local_reply_config.mappers"
    do = expected.mend("local_replies", control_plane=away)
    if len(there) >= len(wanted) and all(map(same, wanted, there)):
        return
    at = [next((i for i, one in enumerate(there) if same(mapper, one)), None) for mapper in wanted]
    missing = [i for i, found in enumerate(at) if found is None]
    if missing and len(missing) == 1 and len(there) >= len(wanted):
        i = missing[0]
        yield from findings_of(manager.place, differences(wanted[i], there[i]), do, f"{what}[{i}]")
    elif missing:
        told = f"{len(wanted) - len(missing)} of them, without [{missing[0]}]"
        yield Finding(manager.place, what, f"all {len(wanted)} of Tidegate's", told, do)
    else:
        yield Finding(manager.place, what, "Tidegate's first, in their order", "another order", do)


# ------------------------------------------------------------------------------------ times and sizes


def _times(manager: Manager, expected: Expected, settings: Settings) -> Iterator[Finding]:
    """What ends a request that Tidegate may still hold."""
    wait_s, config = settings.max_message_timeout_s, manager.config
    for what, value, default_s in (
        ("stream_idle_timeout", config.get("stream_idle_timeout"), 300.0),
        ("max_stream_duration", dig(config, "common_http_protocol_options", "max_stream_duration"), 0.0),
    ):
        found_s = _seconds(value, default_s)
        if what not in expected.own_manager and 0 < found_s < wait_s:
            told = f"{found_s:g} s" if value else f"nothing, which is {found_s:g} s"
            why = (
                f"what is held for longer ends with 504: set {what}: {wait_s + 5:g}s, or a shorter max_wait_s of lanes"
            )
            yield Finding(manager.place, what, f"at least {wait_s:g} s, or none", told, why)


def _seconds(value: Any, default: float) -> float:
    try:
        return default if value is None else float(str(value).removesuffix("s"))
    except ValueError:
        return default


def _buffers(manager: Manager, expected: Expected, settings: Settings) -> Iterator[Finding]:
    """Filters of others that take less of a body than Tidegate does."""
    least = settings.gateway.max_body_bytes
    for item in _filters_in(manager):
        if dig(item, "name") in names(expected.filters) or dig(item, "disabled"):
            continue
        limit = dig(item, "typed_config", "max_request_bytes")
        if isinstance(limit, int) and limit < least and str(dig(item, "typed_config", "@type")).endswith(".Buffer"):
            why = "larger LLM requests get its 413: raise it, or lower gateway.max_body_bytes"
            yield Finding(
                manager.place, f"filter {named(item)} max_request_bytes", f"at least {least}", str(limit), why
            )


def _own(manager: Manager, expected: Expected) -> Iterator[Finding]:
    """Where the whole listener is ours."""
    if expected.merged:
        return
    do = expected.mend("all")
    yield from findings_of(manager.place, _asked(expected.own_manager, manager.config), do)
    yield from findings_of(
        manager.place, _asked(expected.own_router, dig(_router(manager), "typed_config")), do, "router"
    )
    listener = f"listener {dig(manager.listener, 'name')}"
    yield from findings_of(listener, _asked(expected.own_listener, manager.listener), do)


def _asked(expected: Data, found: Any) -> Iterator[Difference]:
    """Differences in what is expected; what else there is, like TLS, is nobody's business here."""
    some = {key: one for key, one in (found or {}).items() if key in expected}
    return differences(expected, some)
