"""Train one model on unequal devices, as fast as they allow.

    cluster = hetpipe.read_cluster(Path("cluster.toml"))
    profile = hetpipe.profile_model("bert-base", cluster, sequence_length=128)
    problem = hetpipe.problem_of(profile, cluster, global_batch_size=64)
    plan = hetpipe.solve(problem, hetpipe.evaluator(profile, cluster))
    settings = hetpipe.Settings("bert-base", steps=100, global_batch_size=64, sequence_length=128)
    hetpipe.train(settings, Path("cluster.toml"), profile, plan, hetpipe.RunFolder(Path("runs/first")))

Planning needs no torch; what needs it is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cost_model.cluster import Cluster, Device, Link, Node
    from cost_model.cluster_file import read_cluster
    from cost_model.errors import InfeasibleError, InputError
    from cost_model.profile import ModelProfile, read_profile
    from hetpipe.checking import check_split
    from hetpipe.checkpoint import load_weights
    from hetpipe.execution import RankStages, execute, trace_of
    from hetpipe.executor import StepOutcome
    from hetpipe.instructions import Program, Schedule
    from hetpipe.launch import WorkerLostError
    from hetpipe.lowering import lower
    from hetpipe.models import model_spec
    from hetpipe.own_model import own_task
    from hetpipe.peers import PeerError
    from hetpipe.planning import evaluator, predict, simulate_plan
    from hetpipe.profiling import profile_model
    from hetpipe.run_folder import RunFolder
    from hetpipe.run_report import RunReport
    from hetpipe.settings import Settings
    from hetpipe.splitting import ChainModel
    from hetpipe.task import TrainingTask
    from hetpipe.trace import Trace
    from hetpipe.trainer import AdamW, Callback, Trainer
    from hetpipe.training import measure, train
    from hetpipe.verifier import verify
    from partition.plan import Pipeline, Plan, Stage
    from partition.plan_file import read_plan
    from partition.problem import Problem, problem_of
    from partition.solver import compare, solve

_HOMES = {
    "cost_model.cluster": ("Cluster", "Device", "Link", "Node"),
    "cost_model.cluster_file": ("read_cluster",),
    "cost_model.errors": ("InfeasibleError", "InputError"),
    "cost_model.profile": ("ModelProfile", "read_profile"),
    "hetpipe.checking": ("check_split",),
    "hetpipe.checkpoint": ("load_weights",),
    "hetpipe.execution": ("RankStages", "execute", "trace_of"),
    "hetpipe.executor": ("StepOutcome",),
    "hetpipe.instructions": ("Program", "Schedule"),
    "hetpipe.launch": ("WorkerLostError",),
    "hetpipe.lowering": ("lower",),
    "hetpipe.models": ("model_spec",),
    "hetpipe.own_model": ("own_task",),
    "hetpipe.peers": ("PeerError",),
    "hetpipe.planning": ("evaluator", "predict", "simulate_plan"),
    "hetpipe.profiling": ("profile_model",),
    "hetpipe.run_folder": ("RunFolder",),
    "hetpipe.run_report": ("RunReport",),
    "hetpipe.settings": ("Settings",),
    "hetpipe.splitting": ("ChainModel",),
    "hetpipe.task": ("TrainingTask",),
    "hetpipe.trace": ("Trace",),
    "hetpipe.trainer": ("AdamW", "Callback", "Trainer"),
    "hetpipe.training": ("measure", "train"),
    "hetpipe.verifier": ("verify",),
    "partition.plan": ("Pipeline", "Plan", "Stage"),
    "partition.plan_file": ("read_plan",),
    "partition.problem": ("Problem", "problem_of"),
    "partition.solver": ("compare", "solve"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022  # in the order in which they are met
    "Cluster", "Device", "Link", "Node", "read_cluster",
    "ModelProfile", "read_profile", "profile_model",
    "Plan", "Pipeline", "Stage", "read_plan",
    "Problem", "problem_of", "solve", "compare", "evaluator",
    "Program", "Schedule", "lower", "verify", "predict", "simulate_plan", "Trace",
    "ChainModel", "model_spec", "check_split", "TrainingTask",
    "Settings", "RunFolder", "RunReport", "train", "measure",
    "Trainer", "AdamW", "Callback", "own_task", "load_weights",
    "RankStages", "execute", "StepOutcome", "trace_of",
    "InputError", "InfeasibleError", "WorkerLostError", "PeerError",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hetpipe' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
