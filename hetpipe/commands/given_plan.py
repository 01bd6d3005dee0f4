"""A plan that a verb is given: whether it fits, what is expected of it, the batch that `run` is asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cost_model.cluster import Cluster
from cost_model.errors import InputError
from cost_model.profile import ModelProfile
from hetpipe.commands.gpu_defaults import measured
from hetpipe.commands.inputs import estimate_all, get_profile, none_here
from hetpipe.commands.options import ProfileOptions
from hetpipe.commands.output import warn
from hetpipe.models.names import ModelEntry
from hetpipe.program.instructions import Schedule
from partition.estimates.optimizer_sharding import with_state_owners
from partition.plan import Plan
from partition.problem import check_plan

if TYPE_CHECKING:
    from hetpipe.simulation.prediction import Prediction


@dataclass(frozen=True, slots=True)
class GivenOptions:
    """A plan that is there already, and what is asked for where plan and profile decide it otherwise."""

    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="A plan.json to run, instead of planning.")
    ] = None
    global_batch_size: Annotated[
        int | None,
        typer.Option("--global-batch-size", help="Samples a step; 16, or that of the plan or --resume."),
    ] = None
    tokens_per_step: Annotated[
        int | None,
        typer.Option("--tokens-per-step", min=1, help="The same in tokens: samples times their length."),
    ] = None
    sequence_length: Annotated[
        int | None,
        typer.Option("--sequence-length", help="Tokens a sample; 64, on GPUs alone 512, or the profile's."),
    ] = None

    def batch(self, plan: Plan | None, length: int | None, *, reads_text: bool = True) -> int | None:
        """Return the samples of a step, None where nothing says how many; length: None where unknown yet.

        Raises: InputError if they are said twice, are no whole samples, or not those of the plan; or in
            tokens where the model reads no text.
        """
        if self.tokens_per_step is None:
            return self.global_batch_size
        if not reads_text:
            raise InputError("--tokens-per-step is of texts, and images are read; give --global-batch-size")
        if self.global_batch_size is not None:
            raise InputError("--tokens-per-step and --global-batch-size say the same; give one of them")
        if length is None:
            return None
        samples, left = divmod(self.tokens_per_step, length)
        if left or not samples:
            raise InputError(
                f"--tokens-per-step {self.tokens_per_step} is no multiple of the {length} tokens of a "
                f"sample; give {max(1, samples) * length} or {(max(1, samples) + 1) * length}"
            )
        if plan is not None and samples != plan.global_batch_size:
            raise InputError(
                f"--tokens-per-step {self.tokens_per_step} is {samples} samples, the plan's are "
                f"{plan.global_batch_size}; leave it out, or plan again"
            )
        return samples

    def check(self, plan: Plan | None, entry: ModelEntry, cluster: Cluster, *, is_new: bool) -> None:
        """Check the batch before anything is measured, as far as the length of a sample is known.

        is_new: whether neither a profile nor a run before says how long it is.

        Raises: InputError as `batch`.
        """
        length = self.sequence_length
        if self.tokens_per_step is not None and length is None and is_new and entry.task.reads_text:
            length = measured(cluster, entry.place or entry.name, None, None).sequence_length
        self.batch(plan, length, reads_text=entry.task.reads_text)


def profile_of_plan(
    model: str | None, cluster: Cluster, sequence_length: int | None, options: ProfileOptions, *, quiet: bool
) -> ModelProfile:
    """Return the profile by which a given plan is looked at: as `get_profile`, or all of it estimated.

    So it is where `hetpipe plan` estimated all, on a host with none of the devices.

    Raises: InputError as `get_profile`.
    """
    run = options.decided
    if model is not None and options.profile_file is None and none_here(cluster):
        return estimate_all(model, cluster, sequence_length, options, run, allow_slow=True)
    return get_profile(model, cluster, sequence_length, options, run=run, quiet=quiet)


def checked_plan(plan: Plan, profile: ModelProfile, cluster: Cluster, file: Path) -> Plan:
    """Return the plan of a file with what it leaves open; warn if another profile or cluster made it.

    Raises: InputError naming the file, if the plan does not fit the profile or the cluster.
    """
    with _of_file(file):
        check_plan(plan, profile, cluster)
    for what, made_from, given in (
        ("profile", plan.profile_sha256, profile.sha256),
        ("cluster", plan.cluster_sha256, cluster.sha256),
    ):
        if made_from is not None and made_from != given:
            warn(
                f"the plan was made from the {what} {made_from[:12]}, this {what} is {given[:12]}; "
                "its figures are computed anew"
            )
    return with_state_owners(plan, profile, cluster) if plan.zero else plan


def check_devices(plan: Plan, cluster: Cluster, file: Path) -> None:
    """Check, before anything is measured, that a cluster has the devices of a plan.

    Raises: InputError naming the file, if it lacks one.
    """
    with _of_file(file):
        for name in plan.device_names:
            cluster.device(name)


@contextmanager
def _of_file(file: Path) -> Iterator[None]:
    """Begin with the name of the file what is refused of its plan."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{file}: {error}") from None


def predict_given(
    plan: Plan, profile: ModelProfile, cluster: Cluster, schedule: Schedule | None, file: Path
) -> "Prediction":
    """Return what the plan of a file is expected to do under a schedule, with a bound; as `checked_plan`.

    Raises: InputError if it does not fit the profile or the cluster.
    """
    from hetpipe.simulation.prediction import predict, with_bound

    plan = checked_plan(plan, profile, cluster, file)
    return with_bound(predict(plan, profile, cluster, schedule), profile, cluster)
