"""What a `Trainer` does before it trains: measure the user's model, and plan where no plan is given."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from cost_model.cluster import Cluster
from cost_model.cluster_file import read_cluster
from cost_model.dtypes import FLOAT32
from cost_model.errors import InputError
from cost_model.other_clusters import with_room, without
from cost_model.plain_numbers import whole_number
from cost_model.profile import ModelProfile
from hetpipe.data.user_task import Model, UserTask
from hetpipe.profiling.doubtful_profiles import doubt_sentences
from hetpipe.profiling.profile_cache import MICROBATCH_SIZES, profile_model
from hetpipe.reporting.progress import progress_bar
from hetpipe.runs.settings import Settings
from hetpipe.runs.warned import warn_caller
from hetpipe.simulation.prediction import Prediction, evaluator
from hetpipe.simulation.shared_choice import TIES, least_shared
from hetpipe.training.recovery import Replan
from hetpipe.training.run import verified_prediction
from partition.plan import Plan
from partition.problem import problem_of
from partition.solver import solve

FOR_A_PLAN_S = 30.0
FOR_A_REPORT_S = 10.0
"""How long a model is measured at most: where a plan is made by it, and where one is given."""


@dataclass(frozen=True, slots=True)
class OwnPlanning:
    """How a user's model is measured and planned for.

    name: under which profile, plan and run know it. batch_size: samples a step. dtype: None for float32.
    """

    cluster_file: Path
    task: UserTask
    name: str
    batch_size: int
    dtype: str | None
    quiet: bool

    def measure(self, plan: Plan | None) -> ModelProfile:
        """Return the profile, from the cache if it is there; warn of times that are known badly.

        plan: whose sizes of microbatches are measured alone.
        """
        cluster = read_cluster(self.cluster_file)
        with progress_bar(f"measuring {self.name}", quiet=self.quiet) as report:
            profile = profile_model(
                self.name,
                cluster,
                self.task.sequence_length,
                dtype=self.dtype or FLOAT32,
                budget_s=FOR_A_PLAN_S if plan is None else FOR_A_REPORT_S,
                microbatch_sizes=sizes_for(self.batch_size, cluster) if plan is None else sizes_of(plan),
                progress=report,
                task=self.task,
            )
        for sentence in doubt_sentences(profile):
            warn_caller(f"{sentence}; was something else running?")
        return profile

    def plan(self, profile: ModelProfile) -> Plan:
        """Return the best plan that is found on all devices of the cluster.

        Raises: InfeasibleError if nothing fits.
        """
        return self._best(profile, read_cluster(self.cluster_file))

    def replan(self, profile: ModelProfile, settings: Settings) -> Replan:
        """Return what plans a run with these settings for the devices that are left."""

        def without_lost(lost: frozenset[str], room_bytes: Mapping[str, float]) -> Prediction:
            whole = read_cluster(self.cluster_file)
            plan = self._best(profile, with_room(without(whole, sorted(lost)), room_bytes))
            return verified_prediction(settings, self.cluster_file, profile, plan)

        return without_lost

    def _best(self, profile: ModelProfile, cluster: Cluster) -> Plan:
        problem = problem_of(profile, cluster, self.batch_size)
        choose = least_shared(profile, cluster, [TIES])
        return solve(problem, evaluator(profile, cluster), proof_s=0.0, choose=choose)


def sizes_of(plan: Plan) -> Sequence[int]:
    """Return the sizes of a plan's microbatches."""
    return sorted({pipeline.microbatch_size for pipeline in plan.pipelines})


def sizes_for(batch_size: int, cluster: Cluster) -> Sequence[int] | None:
    """Return the sizes of microbatches to measure: powers of two up to a quarter of the batch.

    None, up to the largest that fits, where all devices are GPUs.
    """
    if all(device.is_gpu for device in cluster.devices):
        return None
    most = max(*MICROBATCH_SIZES, batch_size // 4)
    sizes = [2**power for power in range(most.bit_length())]
    return tuple(size for size in sizes if size <= min(most, batch_size))


_OF_FOLDER = re.compile(r"[^./\\\s][^/\\\x00-\x1f\x7f]*")


def checked_name(name: object) -> str:
    """Return the name of a run, which its folder under runs/ begins with.

    Raises: InputError if no folder can be called so.
    """
    if isinstance(name, str) and _OF_FOLDER.fullmatch(name) and len(name.encode()) <= 100:
        return name
    shown = repr(name) if len(repr(name)) <= 40 else f"{repr(name)[:40]}..."
    raise InputError(
        f"name is {shown}; give what a folder can be called: at most 100 letters, digits, '-', '_', ..."
    )


def name_of(model: Model) -> str:
    """Return the name of a model that is given none: that of its class, or of what builds it."""
    named = type(model) if isinstance(model, nn.Module) else model
    name = re.sub(r"[^a-z0-9-]+", "-", getattr(named, "__name__", "").lower()).strip("-")
    return name or "own"


def checked_batch_size(batch_size: int | None, plan: Plan | None) -> int:
    """Return the samples of a step.

    Raises: InputError if nothing says them, or a plan others.
    """
    if plan is not None:
        if batch_size not in (None, plan.global_batch_size):
            raise InputError(
                f"batch_size is {batch_size}, the plan's is {plan.global_batch_size}; leave it out, or plan "
                "again"
            )
        return plan.global_batch_size
    if batch_size is None:
        raise InputError("neither batch_size nor plan is given; give batch_size, the samples of a step")
    batch_size = whole_number("batch_size", batch_size)
    if batch_size < 1:
        raise InputError(f"batch_size is {batch_size}; give the samples of a step, at least 1")
    return batch_size
