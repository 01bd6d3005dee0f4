"""Train one model on unequal devices, as fast as they allow.

    cluster = hetpipe.read_cluster(Path("cluster.toml"))
    profile = hetpipe.profile_model("bert-base", cluster, sequence_length=128)
    problem = hetpipe.problem_of(profile, cluster, global_batch_size=64)
    plan = hetpipe.solve(problem, hetpipe.evaluator(profile, cluster))
    settings = hetpipe.Settings.of(plan, profile, steps=100)
    hetpipe.train(settings, Path("cluster.toml"), profile, plan, hetpipe.RunFolder(Path("runs/first")))

Planning needs no torch; what needs it is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cost_model.cluster import Cluster, Device, Link, Node
    from cost_model.cluster_file import read_cluster
    from cost_model.errors import DivergedError, InfeasibleError, InputError
    from cost_model.profile import ModelProfile, read_profile
    from hetpipe.data.task import TrainingTask
    from hetpipe.data.user_task import own_task
    from hetpipe.models.chain import ChainModel
    from hetpipe.models.huggingface import model_spec
    from hetpipe.models.split_check import check_split
    from hetpipe.profiling.profile_cache import profile_model
    from hetpipe.program.instructions import Program, Schedule
    from hetpipe.program.trace import Trace
    from hetpipe.program.verification import verify
    from hetpipe.runs.run_folder import RunFolder
    from hetpipe.runs.run_report import RunReport
    from hetpipe.runs.settings import Settings
    from hetpipe.runtime.peer_errors import PeerError
    from hetpipe.runtime.processes import WorkerLostError
    from hetpipe.runtime.step_outcome import StepOutcome
    from hetpipe.runtime.torchgpipe_backend import to_torchgpipe
    from hetpipe.simulation.prediction import evaluator, predict, simulate_plan
    from hetpipe.simulation.schedule_selection import lower
    from hetpipe.simulation.shared_choice import least_shared
    from hetpipe.simulation.shared_network import shared_step_s
    from hetpipe.training.callbacks import Callback
    from hetpipe.training.checkpoint_weights import load_weights
    from hetpipe.training.given_optimizer import AdamW
    from hetpipe.training.run import measure, train
    from hetpipe.training.trainer import Trainer
    from hetpipe.training.transformers_trainer import TransformersTrainer
    from hetpipe.training.user_loop import RankStages, execute, trace_of
    from partition.plan import Pipeline, Plan, Stage
    from partition.plan_file import read_plan
    from partition.problem import Problem, problem_of
    from partition.solver import compare, solve

_HOMES = {
    "cost_model.cluster": ("Cluster", "Device", "Link", "Node"),
    "cost_model.cluster_file": ("read_cluster",),
    "cost_model.errors": ("DivergedError", "InfeasibleError", "InputError"),
    "cost_model.profile": ("ModelProfile", "read_profile"),
    "hetpipe.models.split_check": ("check_split",),
    "hetpipe.training.checkpoint_weights": ("load_weights",),
    "hetpipe.training.user_loop": ("RankStages", "execute", "trace_of"),
    "hetpipe.runtime.step_outcome": ("StepOutcome",),
    "hetpipe.runtime.torchgpipe_backend": ("to_torchgpipe",),
    "hetpipe.simulation.schedule_selection": ("lower",),
    "hetpipe.simulation.shared_choice": ("least_shared",),
    "hetpipe.simulation.shared_network": ("shared_step_s",),
    "hetpipe.program.instructions": ("Program", "Schedule"),
    "hetpipe.runtime.processes": ("WorkerLostError",),
    "hetpipe.models.huggingface": ("model_spec",),
    "hetpipe.data.user_task": ("own_task",),
    "hetpipe.runtime.peer_errors": ("PeerError",),
    "hetpipe.simulation.prediction": ("evaluator", "predict", "simulate_plan"),
    "hetpipe.profiling.profile_cache": ("profile_model",),
    "hetpipe.runs.run_folder": ("RunFolder",),
    "hetpipe.runs.run_report": ("RunReport",),
    "hetpipe.runs.settings": ("Settings",),
    "hetpipe.models.chain": ("ChainModel",),
    "hetpipe.data.task": ("TrainingTask",),
    "hetpipe.program.trace": ("Trace",),
    "hetpipe.training.callbacks": ("Callback",),
    "hetpipe.training.given_optimizer": ("AdamW",),
    "hetpipe.training.trainer": ("Trainer",),
    "hetpipe.training.transformers_trainer": ("TransformersTrainer",),
    "hetpipe.training.run": ("measure", "train"),
    "hetpipe.program.verification": ("verify",),
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
    "shared_step_s", "least_shared",
    "ChainModel", "model_spec", "check_split", "TrainingTask",
    "Settings", "RunFolder", "RunReport", "train", "measure",
    "Trainer", "AdamW", "Callback", "own_task", "load_weights", "TransformersTrainer",
    "RankStages", "execute", "StepOutcome", "trace_of", "to_torchgpipe",
    "InputError", "InfeasibleError", "DivergedError", "WorkerLostError", "PeerError",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hetpipe' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
