"""What the verbs read and check before they do anything: devices, profile, problem."""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cost_model.catalogue import accelerator
from cost_model.cluster import Cluster, Device
from cost_model.cluster_file import read_cluster
from cost_model.dtypes import FLOAT32, check_fast, check_gradient_dtype, common_dtype, dtypes_of
from cost_model.errors import InputError
from cost_model.known_errors import distrust, far_off
from cost_model.other_clusters import without
from cost_model.profile import ModelProfile, read_profile
from hetpipe.commands.given_profile import check_dtypes, check_profile, warn_of_doubts
from hetpipe.commands.gpu_defaults import measured
from hetpipe.commands.options import AUTO, AdapterOptions, PlanOptions, ProfileOptions
from hetpipe.commands.output import note, warn
from hetpipe.models.names import ModelEntry, model_entry
from hetpipe.reporting.progress import progress_bar
from hetpipe.reporting.tables import is_estimated
from hetpipe.runs.lora import parse_lora, read_adapter_settings
from hetpipe.runs.optimizers import OptimizerKind, check_options, num_states
from hetpipe.runs.quantization import check_load_in
from hetpipe.runs.settings import Settings, TaskSettings
from partition.plan import Plan
from partition.problem import Problem, problem_of

if TYPE_CHECKING:
    from partition.solver import Choose


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is asked of a planner: a strategy and its options, on the devices that are not excluded.

    cluster: whole. usable: less what is excluded. proof_s: as for `partition.solver.solve`. run: as
    `hetpipe.profiling.profile_cache.profile_model` takes it.
    """

    cluster: Cluster
    usable: Cluster
    strategy: str
    options: PlanOptions
    proof_s: float | None
    run: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def profile(
        self,
        model: str | None,
        sequence_length: int | None,
        *,
        used: Iterable[Device] | None = None,
        trains: bool = False,
        part: Cluster | None = None,
        further: Collection[str] = (),
        quiet: bool,
    ) -> ModelProfile:
        """Return the profile of a file, or measure the model on the usable devices.

        used: devices that have to be made for its dtype, None for all usable ones. trains: they have to be
        here; else, if none is, all are estimated, further kinds too. part: the devices of this host, None for
        all.

        Raises: InputError as `get_profile`.
        """
        fast = () if self.options.allow_slow_bf16 else self.usable.devices if used is None else used
        if trains or self.options.profile_file is not None or not none_here(self.usable):
            return get_profile(
                model, self.usable, sequence_length, self.options,
                fast=fast, part=part, run=self.run, quiet=quiet,
            )  # fmt: skip
        kinds = {device.kind for device in self.usable.devices}
        check_fast(dtypes_of(self.options.dtype, {*kinds, *further}), fast)
        return estimate_all(
            model, self.usable, sequence_length, self.options, self.run,
            allow_slow=self.options.allow_slow_bf16, further=further,
        )  # fmt: skip

    def problem(
        self, profile: ModelProfile, global_batch_size: int, *, gradient_dtype: str = FLOAT32
    ) -> Problem:
        """Return the problem with what is forced.

        gradient_dtype: where the options say nothing.

        Raises: InputError if it contradicts itself, or the strategy takes no such wishes.
        """
        problem = problem_of(
            profile, self.usable, global_batch_size, self.options.microbatch_size,
            gradient_dtype=self.options.gradient_dtype or gradient_dtype, thorough=self.options.thorough,
        )  # fmt: skip
        return _forced_problem(problem, self.strategy, self.options)

    def choose(self, profile: ModelProfile) -> "Choose":
        """Return what takes another plan of those that a search has looked at, where messages meet."""
        from hetpipe.simulation.shared_choice import EVERYWHERE, TIES, least_shared

        return least_shared(profile, self.usable, EVERYWHERE if self.options.shared_network else (TIES,))


def plan_request(cluster_file: Path, options: PlanOptions, strategy: str) -> PlanRequest:
    """Read the devices, and check the rest before anything slow is done for a typing mistake.

    Raises: InputError for an unknown strategy, dtype or device, or if nothing is left.
    """
    from partition.solver import check_strategy

    check_strategy(strategy)
    check_gradient_dtype(options.gradient_dtype or FLOAT32)
    if options.thorough and strategy != AUTO:
        raise InputError(f"--thorough is for --strategy auto; {strategy!r} searches for nothing")
    if options.shared_network and strategy != AUTO:
        raise InputError(f"--shared-network is for --strategy auto; {strategy!r} has one plan")
    proof_s = _proof_seconds(options)
    cluster = read_cluster(cluster_file)
    usable = remaining(cluster, options.exclude)
    return PlanRequest(cluster, usable, strategy, options, proof_s, options.decided)


def _proof_seconds(options: PlanOptions) -> float | None:
    """Return seconds for the proof of a plan; None for what suits the devices.

    Raises: InputError if there is to be none, and seconds for it.
    """
    if options.proof_s is not None and not math.isfinite(options.proof_s):
        raise InputError(f"--proof-seconds is {options.proof_s}; give a number of seconds, such as 60")
    if options.no_proof and options.proof_s:
        raise InputError(
            f"--no-proof leaves out what --proof-seconds {options.proof_s:g} is for; give one of them"
        )
    return 0.0 if options.no_proof else options.proof_s


def remaining(cluster: Cluster, exclude: list[str] | None) -> Cluster:
    """Return the cluster less what is excluded.

    Raises: InputError for an unknown name, or if nothing is left.
    """
    if not exclude:
        return cluster
    return without(cluster, exclude)


def for_whole(plan: Plan, part: Cluster, cluster: Cluster) -> Plan:
    """Return the plan of a part of a cluster as one of the cluster, whose bound speaks about that part."""
    known = {device.name for device in part.devices}
    missing: list[str] = []
    for node in cluster.nodes:
        names = [device.name for device in node.devices if device.name not in known]
        missing += [node.name] if names and len(names) == len(node.devices) else names
    figures = plan.predicted and dataclasses.replace(plan.predicted, bound_without=tuple(missing))
    return dataclasses.replace(plan, predicted=figures, cluster_sha256=cluster.sha256)


def _forced_problem(problem: Problem, strategy: str, options: PlanOptions) -> Problem:
    if not options.forces_plan:
        return problem
    from partition.constraints.wishes import check_forced, describe, forced_of, parse_pin

    pins = [parse_pin(text) for text in options.pins or ()]
    forced = forced_of(problem.profile, problem.cluster, pins, options.num_pipelines, options.max_devices)
    if strategy != AUTO:
        raise InputError(f"{describe(forced)} is for --strategy auto; {strategy!r} decides all by itself")
    problem = dataclasses.replace(problem, forced=forced)
    check_forced(problem)
    return problem


def named_model(model: str, options: AdapterOptions) -> ModelEntry:
    """Return the model that is meant, with its adapters if there are to be some.

    Raises: InputError if there is no such model, or these adapters are none of it.
    """
    if options.lora is not None and options.adapter is not None:
        raise InputError(
            "--lora makes new adapters, --adapter goes on with those of a folder, whose settings it takes; "
            "give one of them"
        )
    load_in = check_load_in(options.load_in)
    if load_in is not None and options.lora is None and options.adapter is None:
        raise InputError(
            f"--load-in {load_in}: weights in {load_in} cannot be trained, only adapters beside them; give "
            "--lora or --adapter"
        )
    place = None if options.adapter is None else str(options.adapter.resolve())
    lora = None if options.lora is None else parse_lora(options.lora)
    if place is not None:
        lora = read_adapter_settings(Path(place))
    entry = model_entry(model)
    if lora is None:
        if entry.folder is not None and entry.folder.quantization is not None:
            from hetpipe.models.adapters import check_trainable

            check_trainable(entry.name, entry.folder.quantization)
        return entry
    from hetpipe.models.adapter_folder import AdapterFolder
    from hetpipe.models.adapters import held_in, with_adapters, with_named_targets
    from hetpipe.models.huggingface import model_spec

    base = model_spec(entry.name, entry.place)
    lora = with_named_targets(base, lora)
    chosen = entry.with_adapters(lora, place, load_in)
    spec = with_adapters(held_in(base, chosen.load_in), lora)
    if place is not None:
        AdapterFolder.find(Path(place), spec)
    return chosen


def get_profile(
    model: str | None,
    cluster: Cluster,
    sequence_length: int | None,
    options: ProfileOptions,
    *,
    fast: Iterable[Device] = (),
    part: Cluster | None = None,
    run: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> ModelProfile:
    """Return the profile of a file, or else of the named model, measured here (or taken from the cache).

    fast: devices that have to be made for its dtype. sequence_length: None for the default of these devices.
    part: those of them that are measured, None for all. run: as `profile_model` takes it.

    Raises: InputError if neither is given, the file is of another model or dtype, or a device is too slow.
    """
    entry = None if model is None else named_model(model, options)
    if model is None and (options.lora or options.adapter or options.load_in):
        raise InputError(
            "--lora, --adapter and --load-in are of a --model; name its base, or give the --profile alone"
        )
    name = None if entry is None else entry.name
    note(() if entry is None or entry.folder is None else entry.folder.notes())
    if options.profile_file is not None:
        profile = read_profile(options.profile_file)
        check_profile(profile, options, name)
        profile = with_states(profile, run or {})
        if sequence_length not in (None, profile.sequence_length):
            raise InputError(
                f"--sequence-length is {sequence_length}, the profile is of {profile.sequence_length}; "
                "profile again, or leave the option out"
            )
        check_fast(profile.dtypes, fast)
        warn_of_doubts(profile, str(options.profile_file))
        return profile
    if model is None:
        raise InputError("neither --model nor --profile is given; name a model, or give its profile.json")
    how = measured(cluster, model, sequence_length, options.dtype)
    dtypes = dtypes_of(how.dtype, {device.kind for device in cluster.devices})
    check_fast(dtypes, fast)
    from hetpipe.profiling.profile_cache import profile_model

    with progress_bar(f"measuring {name}", quiet=quiet) as report:
        profile = profile_model(
            model, part or cluster, how.sequence_length,
            dtype=dtypes, budget_s=options.profile_budget_s, progress=report,
            microbatch_sizes=how.microbatch_sizes,
            lora=None if entry is None else entry.lora, load_in=None if entry is None else entry.load_in,
            loss_chunks=options.loss_chunks,
            compiled=options.compiled,
            use_cache=not options.remeasure, run=run, tell=warn,
        )  # fmt: skip
    note(how.said)
    warn_of_doubts(profile)
    return profile


def with_states(profile: ModelProfile, run: Mapping[str, Any]) -> ModelProfile:
    """Return a profile with the optimizer states of a run, where it says of which optimizer.

    Raises: InputError for a momentum that is none, or that the optimizer does not take.
    """
    momentum = run.get("momentum", 0.0)
    check_options(run.get("optimizer", OptimizerKind.ADAMW), learning_rate=1.0, momentum=momentum, rho=0.0)
    if "optimizer" not in run:
        return profile
    states = float(num_states(run["optimizer"], run.get("momentum", 0.0)))
    # those that have a name step each number by itself, whatever optimizer the profile was used for before
    return dataclasses.replace(
        profile,
        optimizer_bytes_per_parameter_byte=states,
        whole_states=False,
        resident_states=run["optimizer"].resident_states,
    )


def none_here(cluster: Cluster) -> bool:
    """Return whether this host has none of the devices."""
    from hetpipe.runtime.gpus import check_here

    def is_here(device: Device) -> bool:
        try:
            check_here([device], "")
        except InputError:
            return False
        return True

    return all(device.is_gpu for device in cluster.devices) and not any(map(is_here, cluster.devices))


def estimate_all(
    model: str | None,
    cluster: Cluster,
    sequence_length: int | None,
    options: ProfileOptions,
    decided: Mapping[str, Any],
    *,
    allow_slow: bool,
    further: Collection[str] = (),
) -> ModelProfile:
    """Return a profile of a cluster's kinds by estimates alone, from the configuration of a model.

    decided: settings of the run that it is for. allow_slow: as for `estimated_profile`. further: kinds that
    the cluster has not.

    Raises: InputError if there is no such model, or a kind is not in the catalogue.
    """
    if model is None:
        raise InputError("neither --model nor --profile is given; name a model, or give its profile.json")
    entry = named_model(model, options)
    kinds = dict.fromkeys([*(device.kind for device in cluster.devices), *further])
    for kind in kinds:
        accelerator(kind)
    from hetpipe.profiling.layer_estimates import estimated_profile
    from hetpipe.profiling.merging import merge

    how = measured(cluster, model, sequence_length, options.dtype, sizes_given=True, further=further)
    dtypes = dtypes_of(how.dtype, tuple(kinds))
    common_dtype(dtypes)
    run, profiles = Settings(steps=1, **entry.in_settings, **decided), []
    for dtype in dict.fromkeys(dtypes.values()):
        alike = [kind for kind, own in dtypes.items() if own == dtype]
        settings = TaskSettings(
            entry.name, how.sequence_length, dtype, run, options.loss_chunks, options.compiled
        )
        profiles.append(estimated_profile(settings, alike, allow_slow=allow_slow))
    note(how.said)
    return merge(profiles)


def with_estimates(
    profile: ModelProfile, kinds: Iterable[str], *, dtype: str | None = None, allow_slow: bool
) -> ModelProfile:
    """Return the profile with estimated kinds added, anew where it has estimates of them; warn of poor ones.

    Where all of its kinds are estimated, from nothing measured, those that it has stay as they are.
    dtype: as --dtype, None for that of the kind that another is estimated from. allow_slow: as for
    `estimate_kind`.

    Raises: InputError if a kind is unknown, was measured or has no units for the dtype, or no measured kind
        is in the catalogue to estimate from.
    """
    kinds = tuple(kinds)
    if all(is_estimated(profile, kind) for kind in profile.kinds):
        kinds = tuple(kind for kind in kinds if kind not in profile.kinds)
    wanted = {} if dtype is None else dtypes_of(dtype, {*profile.kinds, *kinds})
    if dtype is not None:
        check_dtypes(_without(profile, kinds), dtype, wanted, "--profile")
    for kind in kinds:
        from cost_model.roofline import estimate_kind, nearest_kind

        device = accelerator(kind)
        if kind in profile.kinds and profile.kinds[kind].source == "measured":
            raise InputError(f"{kind!r} was measured; leave out --estimate {kind}")
        nearest = nearest_kind(profile, device, wanted.get(kind))
        _warn_of_source(kind, nearest, profile)
        own = wanted.get(kind, profile.dtype_of(nearest))
        estimated = estimate_kind(profile, nearest, device, allow_slow=allow_slow, dtype=own)
        profile = profile.with_kinds({**profile.kinds, kind: estimated}, {**profile.dtypes, kind: own})
    return profile


def _without(profile: ModelProfile, kinds: Collection[str]) -> ModelProfile:
    left = {kind: times for kind, times in profile.kinds.items() if kind not in kinds}
    return dataclasses.replace(profile, kinds=left)


def _warn_of_source(kind: str, nearest: str, profile: ModelProfile) -> None:
    """Warn if a kind is estimated from one that says little of others."""
    from cost_model.roofline import launch_bound

    if far_off(nearest):
        warn(f"{kind} is estimated from {nearest}, which is itself far off: {distrust(nearest)}")
    growth = launch_bound(profile.kinds[nearest])
    if growth is not None:
        warn(
            f"{kind} is estimated from {nearest}, whose times hardly grow with the microbatch ({growth}): "
            "they are bound by launches, not by the card; measure there with --microbatch-sizes auto"
        )
