"""Every disagreement between a running Envoy and the settings, most general first."""

from __future__ import annotations

from collections.abc import Iterator

from extproc.against.clusters import about_clusters, about_keys, about_listeners
from extproc.against.comparing import differences
from extproc.against.dump import AdminError, Running, read
from extproc.against.expected import Expected, expected_in, is_there
from extproc.against.finding import Finding, findings_of
from extproc.against.managers import about_managers
from extproc.render.shape import address
from extproc.settings import Settings

__all__ = ["OLDEST", "compare", "disagreements"]

OLDEST = {"native": (1, 40, 0)}
"""The oldest Envoy that has what a profile needs."""


def compare(url: str, settings: Settings) -> list[Finding]:
    """Ask the Envoy whose admin interface is at `url`. AdminError when it does not tell what it runs."""
    running = read(url)
    try:
        return disagreements(running, settings)
    except AdminError as error:
        raise AdminError(f"{url}/config_dump: {error}") from None


def disagreements(running: Running, settings: Settings) -> list[Finding]:
    """A finding for each; none where Envoy runs what the settings would render. AdminError where fields have shapes
    that Envoy's never have.
    """
    try:
        return list(_disagreements(running, settings))
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise AdminError(f"not of the shape that Envoy's configuration has ({what})") from error


def _disagreements(running: Running, settings: Settings) -> Iterator[Finding]:
    yield from _version(running, settings)
    for told in running.refused:
        yield Finding("Envoy", "what it was sent", "that it takes it", f"that it refused {told}", "mend that")
    if not is_there(running, settings):
        do = "merge Tidegate in with `tidegate merge`, or start Envoy with what `tidegate render` prints"
        yield Finding("Envoy", "Tidegate", "its filters, routes and clusters", "nothing of it", do)
        return
    expected = expected_in(running, settings)
    yield from _admin(running, expected, settings)
    yield from about_managers(running, expected, settings)
    yield from about_clusters(running, expected)
    yield from about_keys(running, expected, settings)
    yield from about_listeners(running, expected)


def _version(running: Running, settings: Settings) -> Iterator[Finding]:
    profile = settings.gateway.profile
    oldest = OLDEST.get(profile)
    if oldest and running.version and running.version < oldest:
        wanted, found = (".".join(map(str, one)) for one in (oldest, running.version))
        do = "run a newer one, or set gateway.profile: classic"
        yield Finding("Envoy", "version", f"{wanted} or newer for gateway.profile {profile}", found, do)


def _admin(running: Running, expected: Expected, settings: Settings) -> Iterator[Finding]:
    if not expected.merged:
        wanted = address("127.0.0.1", settings.gateway.admin_port)
        yield from findings_of("admin", differences(wanted, running.admin), expected.mend("all"), "address")
