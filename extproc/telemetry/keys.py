"""The keys of counters taken apart: what is counted, whose it is, and which setting limits it."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote

__all__ = ["Parts", "parts_of"]

SETTINGS = {
    "total": "tpm",
    "input": "itpm",
    "output": "otpm",
    "requests": "rpm",
    "slots": "concurrency",
    "usd_hour": "usd_per_hour",
    "usd_day": "usd_per_day",
    "usd_month": "usd_per_month",
}


@dataclass(frozen=True, slots=True)
class Parts:
    """What a counter's key says. of: upstream, tenant, session, route or lane; model: where a limit is of one.

    name: of that upstream, tenant, route or lane; of a session, its tenant's.
    """

    of: str
    name: str
    kind: str
    model: str = ""

    @property
    def setting(self) -> str:
        """The setting that limits it, empty where none does."""
        return SETTINGS.get(self.kind, "")


def parts_of(key: str) -> Parts:
    """Take a counter's key apart. Names of tenants and routes are quoted in it, and come back as they are."""
    of, _, rest = key.partition("/")
    inner, kind = rest.rpartition("/")[0], key.rpartition("/")[2]
    if of == "upstream":
        name, _, model = inner.partition("/")
        return Parts(of, name, kind, "" if model == "*" else model)
    return Parts(of, unquote(inner.partition("/")[0]), kind)
