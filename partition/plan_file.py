"""Plans in files: plan.json (docs/files.md)."""

import json
from pathlib import Path

from pydantic import TypeAdapter

from cost_model.strict_files import check_format, read_json, validate
from partition.plan import FORMAT, Plan

_ADAPTER = TypeAdapter(Plan)


def plan_from_data(data: object, source: str) -> Plan:
    """Return the plan in plan.json's data; the predicted figures in it are ignored, they are derived.

    Raises: InputError naming file, key, value and remedy.
    """
    decided = {key: value for key, value in check_format(data, FORMAT, source).items() if key != "predicted"}
    return validate(_ADAPTER, {"strategy": "manual", **decided}, source)


def read_plan(path: Path) -> Plan:
    """Read a plan.json.

    Raises: InputError naming file, key, value and remedy.
    """
    return plan_from_data(read_json(path), str(path))


def plan_text(plan: Plan) -> str:
    """Return the text of a plan.json."""
    return json.dumps(plan.to_json(), indent=1) + "\n"
