"""What hetpipe answers to a problem, with nothing in it that depends on how fast the machine is.

Only names that `import hetpipe` gives and the command line are used, so that the same files run on code whose
modules have other names.
"""

import contextlib
import hashlib
import io
import itertools
import json
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import hetpipe
from cases import Case

Answer = dict[str, Any]
PROOF_S = 1.0  # on the counted clock
TICK_S = 2e-3  # by which a look at the counted clock moves it on


@contextlib.contextmanager
def counted_time() -> Iterator[None]:
    """The planner's proofs end by `time.process_time`, once by `time.monotonic`: here a look takes TICK_S."""
    looks = itertools.count(1)

    def look() -> float:
        return next(looks) * TICK_S

    with mock.patch.object(time, "monotonic", look), mock.patch.object(time, "process_time", look):
        yield


def answers_of(case: Case, folder: Path) -> dict[str, Answer]:
    """Return the answer of each strategy to a problem; of the one that is forced, if one is."""
    cluster_path, profile_path = folder / "cluster.toml", folder / "profile.json"
    cluster_path.write_text(case.cluster, encoding="utf-8")
    profile_path.write_text(json.dumps(case.profile), encoding="utf-8")
    with counted_time():
        if case.options:
            return {"forced": _forced(case, cluster_path, profile_path)}
        cluster, profile = hetpipe.read_cluster(cluster_path), hetpipe.read_profile(profile_path)
        problem = hetpipe.problem_of(profile, cluster, case.global_batch_size)
        evaluate = hetpipe.evaluator(profile, cluster)
        outcomes = hetpipe.compare(problem, evaluate, proof_s=PROOF_S)
    found: dict[str, Answer] = {}
    for outcome in outcomes:
        if outcome.plan is None:
            found[outcome.strategy] = {"refused": outcome.reason}
        else:
            program = hetpipe.lower(outcome.plan, profile, cluster)
            found[outcome.strategy] = {"plan": outcome.plan.to_json(), "program": program.text}
    return found


def _forced(case: Case, cluster: Path, profile: Path) -> Answer:
    """Return the answer of `hetpipe plan`, which is run in this process."""
    files = ["--cluster", str(cluster), "--profile", str(profile)]
    batch = ["--global-batch-size", str(case.global_batch_size)]
    proof = ["--proof-seconds", str(PROOF_S)]
    code, output, errors = command("plan", *files, *batch, *proof, "--program", "--json", *case.options)
    if code:
        return {"refused": f"exit code {code}: {errors.strip()}"}
    plan = json.loads(output)
    return {"plan": plan, "program": plan.pop("program")}


def command(*arguments: str) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of `python -m hetpipe`, run in this process."""
    output, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["hetpipe", *arguments]),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            runpy.run_module("hetpipe", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            return int(end.code or 0), output.getvalue(), errors.getvalue()
    return 0, output.getvalue(), errors.getvalue()


def digest(answer: Answer) -> Answer:
    """Return what tells answers apart, in few bytes: figures as they are, hashes of plan and program."""
    if "plan" not in answer:
        return answer
    plan = answer["plan"]
    predicted = plan["predicted"]
    decided = {key: value for key, value in plan.items() if key not in ("predicted", "schedule_choice")}
    return {
        "shape": shape(plan),
        "plan": _sha(decided),
        "program": _sha(answer["program"]),
        "predicted": _sha(
            {key: value for key, value in predicted.items() if "bound" not in key and key != "gap"}
        ),
        "step_s": repr(predicted["step_s"]),
        "bound_s": repr(predicted["bound_s"]),
        "bounds": _sha([predicted[key] for key in ("bound_space", "fractional_bound_s")]),
    }


def _sha(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]


def shape(plan: Answer) -> str:
    """Return what sort of a plan it is: pipelines, stages, and what it makes use of.

    >>> shape({"zero": 1, "pipelines": [{"stages": [{"devices": ["a"], "recompute": False}]}]})
    '1 pipelines, 1 stages, 1 devices, zero'
    """
    stages = [stage for pipeline in plan["pipelines"] for stage in pipeline["stages"]]
    devices = {name for stage in stages for name in stage["devices"]}
    words = [f"{len(plan['pipelines'])} pipelines", f"{len(stages)} stages", f"{len(devices)} devices"]
    words += ["zero"] if plan["zero"] else []
    words += ["shared devices"] if len(devices) < len(stages) else []
    words += ["recompute"] if any(stage["recompute"] for stage in stages) else []
    return ", ".join(words)
