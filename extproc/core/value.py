"""Frozen values for the hot path.

A frozen dataclass writes each field through `object.__setattr__`, which makes it three times as dear to create as a
plain one; a request makes some forty values on its way. `value` makes classes that the type checker holds frozen and
that cost what plain ones do. Rules and other values that are made once stay ordinary frozen dataclasses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

__all__ = ["value"]

T = TypeVar("T")


@dataclass_transform(frozen_default=True, eq_default=True, field_specifiers=(field,))
def value(cls: type[T]) -> type[T]:
    """Class decorator: a dataclass with slots, compared and hashed by its fields, frozen for the type checker."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
