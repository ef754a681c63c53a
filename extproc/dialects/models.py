"""The answer to "which models are there", in a shape that the SDKs of both families accept."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["models_answer"]

_LIST = "/v1/models"


def models_answer(names: Sequence[str], path: str = _LIST) -> bytes | None:
    """Return the body of GET /v1/models, or of GET /v1/models/{id}; None when there is no such model.

    When a model was made is not known here: the dates are the beginning of the epoch.
    """
    path = path.partition("?")[0]
    if path == _LIST:
        items = [_model(name) for name in names]
        ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
        return _json({"object": "list", "data": items, "has_more": False, **ends})
    name = unquote(path.removeprefix(_LIST + "/"))
    return _json(_model(name)) if name in names else None


def _model(name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "tidegate",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
