"""Plans in files (DESIGN section 7)."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

from cost_model.errors import InputError
from cost_model.strict_files import STRICT, check_format, read_json, validate
from partition.plan import FORMAT, Pipeline, Plan


class _PlanFile(BaseModel):
    model_config = STRICT
    strategy: str = "manual"
    model: str
    global_batch_size: int
    zero: int = 0
    state_owners: tuple[str, ...] | None = None
    pipelines: tuple[Pipeline, ...]
    predicted: dict[str, Any] | None = None
    profile_sha256: str | None = None
    cluster_sha256: str | None = None


_ADAPTER = TypeAdapter(_PlanFile)


def plan_from_data(data: object, source: str) -> Plan:
    """The plan in plan.json's data; the predicted figures in it are ignored, they are derived.

    Raises: InputError naming file, key, value and remedy.
    """
    file = validate(_ADAPTER, check_format(data, FORMAT, source), source)
    try:
        return Plan(
            strategy=file.strategy,
            model=file.model,
            global_batch_size=file.global_batch_size,
            zero=file.zero,
            state_owners=file.state_owners,
            pipelines=file.pipelines,
            profile_sha256=file.profile_sha256,
            cluster_sha256=file.cluster_sha256,
        )
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def read_plan(path: Path) -> Plan:
    """Raises: InputError naming file, key, value and remedy."""
    return plan_from_data(read_json(path), str(path))


def plan_text(plan: Plan) -> str:
    return json.dumps(plan.to_json(), indent=1) + "\n"
