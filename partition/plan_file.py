"""Plans in files: plan.json (docs/files.md)."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from cost_model.strict_files import canonical_sha256, check_format, json_text, read_json, validate
from partition.plan import FORMAT, Figures, Plan

_ADAPTER = TypeAdapter(Plan)
_FIGURES = TypeAdapter(Figures)
SEAL = "sha256"
EDITED = ", edited"
"""Behind the strategy of a plan whose file was changed after it was written."""


def plan_from_data(data: object, source: str) -> Plan:
    """Return the plan in plan.json's data; a plan that was edited is called so.

    The predicted figures are derived, and ignored but for the bound of a plan that was not edited.

    Raises: InputError naming file, key, value and remedy.
    """
    known = check_format(data, FORMAT, source)
    decided = {key: value for key, value in known.items() if key not in ("predicted", SEAL)}
    plan = validate(_ADAPTER, {"strategy": "manual", **decided}, source)
    if SEAL not in known:
        return plan
    if known[SEAL] != _seal(known):
        return dataclasses.replace(plan, strategy=plan.strategy.removesuffix(EDITED) + EDITED)
    if not isinstance(known.get("predicted"), dict):
        return plan
    figures = {key: value for key, value in known["predicted"].items() if key != "gap"}
    if figures.get("samples_per_s", 0) is None:
        figures["samples_per_s"] = math.inf  # of a step of no time
    return dataclasses.replace(plan, predicted=validate(_FIGURES, figures, source))


def _seal(data: Mapping[str, Any]) -> str:
    """Return the hash of what a plan.json holds beside its format and this hash; "" where it has none."""
    try:
        return canonical_sha256({key: value for key, value in data.items() if key not in (SEAL, "format")})
    except (RecursionError, ValueError):  # what cannot be written was not
        return ""


def read_plan(path: Path | str) -> Plan:
    """Read a plan.json.

    Raises: InputError naming file, key, value and remedy.
    """
    return plan_from_data(read_json(Path(path)), str(path))


def plan_text(plan: Plan) -> str:
    """Return the text of a plan.json."""
    return json_text(plan_data(plan))


def plan_data(plan: Plan) -> dict[str, Any]:
    """Return what a plan.json holds."""
    data: dict[str, Any] = json.loads(json.dumps(plan.to_json()))
    return {**data, SEAL: _seal(data)}
