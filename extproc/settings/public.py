"""Settings as they may be shown: every value in force, and nothing that lets anybody in.

Keys and tokens stand in files that the settings only name. Digests of tenants' keys are in the settings, and left out:
a key that can be guessed could be proven by one.
"""

from __future__ import annotations

from typing import Any

from extproc.settings.whole import Settings

__all__ = ["HIDDEN", "public"]

HIDDEN = "..."


def public(settings: Settings) -> dict[str, Any]:
    """As plain data."""
    shown: dict[str, Any] = settings.model_dump(mode="json")
    for tenant in shown["tenants"].values():
        tenant["key_sha256"] = [HIDDEN for _ in tenant["key_sha256"]]
    return shown
