"""Plans as files: reading the JSON of a plan, and refusing what is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from strati.core.errors import BadInputError
from strati.interventions.compress.budget import ACTIONS


def load_plan(path: str | Path) -> dict[str, Any]:
    """The JSON of a plan.

    Raises:
        BadInputError: It is not there, or no plan.
    """
    place = Path(path)
    try:
        payload = json.loads(place.read_text("utf-8"))
    except OSError as error:
        raise BadInputError(path, f"cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError):
        raise BadInputError(path, "is not JSON; give the JSON file of a plan") from None
    return check_plan(payload, path)


def check_plan(payload: Any, path: str | Path = "plan") -> dict[str, Any]:
    """The JSON of a plan, if it is one.

    Raises:
        BadInputError: It is not.
    """
    if not isinstance(payload, dict) or payload.get("schema") != "strati.plan/1":
        raise BadInputError(path, "is not a plan; give the JSON file of a plan")
    layers = payload.get("layers")
    if not isinstance(layers, list) or not all(
        isinstance(x, dict) and {"name", "choice"} <= set(x) for x in layers
    ):
        raise BadInputError(path, "is a damaged plan: its layers have no names or choices")
    if payload.get("action") not in ACTIONS:
        raise BadInputError(path, f"is a plan of an unknown action {payload.get('action')!r}")
    return payload
