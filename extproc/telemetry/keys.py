"""The names of counters taken apart: what is counted, whose it is, and which setting limits it."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote

__all__ = ["Place", "place_of"]

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
class Place:
    """A counter's name taken apart. of: upstream, tenant, session, route or lane; model: where a limit is of one."""

    of: str
    name: str
    kind: str
    model: str = ""

    @property
    def setting(self) -> str:
        """The setting that limits it, empty where none does."""
        return SETTINGS.get(self.kind, "")


def place_of(key: str) -> Place:
    """Take a counter's name apart. Names of tenants and routes are quoted in it; anything else is returned as it is."""
    of, _, rest = key.partition("/")
    inner, _, kind = rest.rpartition("/")
    if of == "upstream":
        name, _, model = inner.partition("/")
        return Place(of, name, kind, "" if model == "*" else model)
    return Place(of, unquote(inner), kind)
