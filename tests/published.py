"""What the console's OpenAPI document says of its answers, to hold answers against."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from extproc.console.answers import encoded
from extproc.console.api import _Described, application
from extproc.console.audit import Audit
from extproc.console.clerk import Clerk
from extproc.console.proof import Proof
from extproc.console.stream import Overviews
from extproc.settings import AdminSettings
from tests.console.world import World

__all__ = ["as_described", "document", "faults"]


@cache
def document() -> dict[str, Any]:
    """That of a console that has everything."""
    world = World()
    clerk = Clerk(world.sources(), Proof(AdminSettings()), Audit(None), Overviews(world.overview), "127.0.0.1:1")
    return dict(json.loads(_Described(application(clerk), clerk)._make()))


@cache
def _validator(name: str) -> Draft202012Validator:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document()["components"]}
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def faults(name: str, told: Any) -> list[str]:
    """What is not as the schema of that name has it, of plain data as a client gets it."""
    read = json.loads(encoded(told))
    return [f"{error.json_path}: {error.message[:300]}" for error in _validator(name).iter_errors(read)]


def as_described(name: str, told: Any) -> None:
    """It has all fields of its schema and no others, each of its type."""
    assert faults(name, told) == []
