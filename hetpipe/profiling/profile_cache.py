"""Profiles from the cache or from a measurement in processes of their own. Needs no torch itself."""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cost_model.cluster import CPU, Cluster, Device, is_emulated
from cost_model.dtypes import FLOAT32, MIXED, common_dtype
from cost_model.errors import InputError
from cost_model.profile import ModelProfile, profile_from_data, profile_text, read_profile
from cost_model.strict_files import canonical_sha256, write_atomically
from hetpipe.models.names import model_entry
from hetpipe.models.rank_modules import RANKS, modules_of
from hetpipe.profiling.doubtful_profiles import doubtful_kinds, more_precise
from hetpipe.profiling.merging import left_out, merge
from hetpipe.runs.cache import profiles_folder
from hetpipe.runs.lora import LoraSettings
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings
from hetpipe.runs.warned import warn_caller
from hetpipe.runtime.compilers import check_compilers
from hetpipe.runtime.gpus import check_here
from hetpipe.runtime.rank_server import server_ahead
from hetpipe.runtime.scratch import scratch_folder

MICROBATCH_SIZES = (1, 2, 4)
DEFAULT_BUDGET_S = 60.0
LEAST_REPEATED_S = 1.0
"""A shorter budget asks for a rough measurement, which is not repeated however rough it is."""
MEASURE_ELSEWHERE = (
    "run `hetpipe profile` where it is, or estimate it from a card at hand (--estimate), and give --profile"
)

Progress = Callable[[float, str], None]
"""Called with the share done in [0, 1] and what is being done."""


def cache_key(
    settings: TaskSettings,
    sharers: Mapping[str, int],
    sizes: Sequence[int] | None,
    code: str,
    memory_bytes: Mapping[str, float] | None = None,
    *,
    real_kinds: Sequence[Sequence[str]] = (),
    dtypes: Mapping[str, str] | None = None,
    own_sha256: str | None = None,
) -> str:
    """Return the hash of everything that a measurement depends on.

    That is: model, shapes, kinds, threads, host, versions.

    sharers: by kind, how many devices share the host's cores, which gives the threads of each.
    memory_bytes: of the largest device of each kind, where the sizes depend on it (None).
    real_kinds: of the devices of each node between which messages are measured. dtypes: of the kinds, where
    they differ. own_sha256: of a model of the user's own, None for others.
    """
    return canonical_sha256(
        {
            **({} if dtypes is None else {"dtypes": dict(dtypes)}),
            **({} if own_sha256 is None else {"own": own_sha256}),
            **_decided(settings.run),
            "loss_chunks": settings.loss_chunks,
            "compiled": settings.compiled,
            "model": settings.model,
            "sequence_length": settings.sequence_length,
            "dtype": settings.dtype,
            "sharers": dict(sharers),
            "real_kinds": [list(kinds) for kinds in real_kinds],
            "sizes": list(sizes) if sizes is not None else dict(memory_bytes or {}),
            "cores": os.cpu_count(),
            "processor": processor_name(),
            "versions": {name: importlib.metadata.version(name) for name in _libraries(settings)},
            "code": code,
        }
    )[:24]


def _decided(run: Settings) -> dict[str, object]:
    """Return what of a run decides what its layers cost, where it is not as usual."""
    usual = Settings(steps=1)
    names = ("pack", "optimizer", "momentum")
    return {name: getattr(run, name) for name in names if getattr(run, name) != getattr(usual, name)}


def _libraries(settings: TaskSettings) -> tuple[str, ...]:
    of_adapters = () if settings.lora is None else ("peft",)
    spec = model_entry(settings.model_folder) if settings.model_folder else None
    is_quantized = spec is not None and spec.folder is not None and spec.folder.quantization is not None
    of_weights = ("bitsandbytes",) if is_quantized or settings.run.load_in else ()
    return ("torch", "transformers", *of_adapters, *of_weights)


def profile_model(
    model: str,
    cluster: Cluster,
    sequence_length: int,
    *,
    dtype: str | Mapping[str, str] = FLOAT32,
    budget_s: float = DEFAULT_BUDGET_S,
    microbatch_sizes: Sequence[int] | None = MICROBATCH_SIZES,
    progress: Progress | None = None,
    use_cache: bool = True,
    task: Any = None,
    lora: LoraSettings | None = None,
    load_in: str | None = None,
    loss_chunks: int | None = None,
    compiled: bool = False,
    run: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] = warn_caller,
) -> ModelProfile:
    """Return the profile of a model for all kinds of the cluster's devices, from the cache if it is there.

    Emulated devices are profiled once, unslowed, with one thread; their speed scales the price later.
    budget_s: seconds of measurement over all kinds; it ends earlier where all medians are known well. A kind
    that is known to worse than `DOUBTFUL` is measured once more, as long again, and the better of the two
    is taken; what is as bad still is not cached. use_cache: False measures anew what is in the cache.
    model: a name, or a Hugging Face folder, of which the cache knows the configuration and not the path.
    dtype: of all kinds, or of each. microbatch_sizes: those of them that fit; None: up to the largest that
    fits. task: for a model of your own, named by `model`: an `own_task`, kept by the hash of its code, or an
    importable `TaskFactory`, which is never cached. lora: of adapters that are trained in place of the model.
    load_in: "4bit" or "8bit", in which the matrices beside them are held. loss_chunks: into how many chunks
    of a microbatch's tokens the loss is cut; None: none. compiled: whether blocks are compiled. run: those of
    the `Settings` of a run that decide what layers cost: pack, optimizer, momentum. tell: takes a sentence
    where the cache cannot be written.

    Raises: InputError for an unknown model, or a GPU that this host does not have; CheckFailedError for a
    model that does not compute the same when it is split.
    """
    kinds = sorted({device.kind for device in cluster.devices})
    dtypes = {kind: dtype if isinstance(dtype, str) else dtype[kind] for kind in kinds}
    settings = TaskSettings(
        model, sequence_length, common_dtype(dtypes), loss_chunks=loss_chunks, compiled=compiled
    )
    if task is None:
        known = model_entry(model)
        known = known if lora is None else known.with_adapters(lora, load_in=load_in)
        settings = dataclasses.replace(
            settings, model=known.name, run=Settings(steps=1, **known.in_settings, **(run or {}))
        )
    own = getattr(task, "code_sha256", None)
    counts = {kind: sum(device.kind == kind for device in cluster.devices) for kind in kinds}
    sharers = {kind: count if kind == CPU else 1 for kind, count in counts.items()}
    memory = {kind: max(d.memory_bytes for d in cluster.devices if d.kind == kind) for kind in kinds}
    key = cache_key(
        settings, sharers, microbatch_sizes, _code(), memory,
        real_kinds=_real_kinds(cluster), dtypes=dtypes if settings.dtype == MIXED else None,
        own_sha256=own,
    )  # fmt: skip
    path = profiles_folder() / f"{_file_name(settings.model)}-{key}.json"
    keeps = task is None or own is not None
    if use_cache and keeps and (kept := _kept(path)) is not None:
        return kept
    measured: dict[str, Device] = {}
    for device in cluster.devices:
        measured.setdefault(device.kind, device)
    if compiled:
        check_compilers(measured.values())
    check_here(measured.values(), MEASURE_ELSEWHERE)
    profiles = []
    for index, kind in enumerate(kinds):

        def report(done: float, what: str, index: int = index) -> None:
            if progress is not None:
                progress((index + done) / len(kinds), what)

        limits = (microbatch_sizes, memory[kind], budget_s / len(kinds))
        of_kind = dataclasses.replace(settings, dtype=dtypes[kind]), measured[kind], counts[kind], limits
        profile = _measure(*of_kind, report, task)
        if doubtful_kinds(profile) and budget_s >= LEAST_REPEATED_S:
            profile = more_precise(profile, _measure(*of_kind, _again(report), task))
        profiles.append(profile)
    merged = _with_links(merge(profiles), cluster)
    whole = microbatch_sizes is None or not left_out(merged, microbatch_sizes)
    if keeps and whole and not doubtful_kinds(merged):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, profile_text(merged))
        except OSError as error:
            reason = f"{path.parent} cannot be written ({error.strerror})"
            tell(f"{reason}, so that what was measured is not kept and the next call measures anew")
    return merged


def _kept(path: Path) -> ModelProfile | None:
    """Return the profile of a file of the cache; None where there is none to plan by."""
    try:
        profile = read_profile(path) if path.exists() else None
    except InputError:
        with suppress(OSError):  # of a cache that cannot be written
            path.unlink(missing_ok=True)
        return None
    return None if profile is None or doubtful_kinds(profile) else profile


def _again(report: Progress) -> Progress:
    return lambda done, what: report(done, f"again, since times varied: {what}")


def _measure(
    settings: TaskSettings,
    device: Device,
    count: int,
    limits: tuple[Sequence[int] | None, float, float],
    progress: Progress,
    task: Any,
) -> ModelProfile:
    """Measure the kind of a device; limits: microbatch sizes, memory_bytes and budget_s of `profile_rank`."""
    from hetpipe.data.task import prepare_data, registered_task
    from hetpipe.data.user_task import UserTask
    from hetpipe.models.adapters import task_spec
    from hetpipe.models.kept_proofs import require_split
    from hetpipe.profiling.layer_profiler import profile_rank
    from hetpipe.runtime.processes import RankGroup, run_ranks
    from hetpipe.runtime.rank_threads import threads_for

    found: list[ModelProfile] = []

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "progress":
            progress(event["done"], event["what"])
        elif event["event"] == "profile":
            found.append(profile_from_data(json.loads(json.dumps(event["profile"])), "measurement"))

    ahead = RANKS if task is not None else modules_of(settings, [device])
    with scratch_folder("profile") as place, server_ahead(ahead):
        folder = RunFolder(place)
        if task is None:
            progress(0.0, "loading the model and checking its split")
            require_split(task_spec(settings))
            progress(0.0, "reading the text")
            prepare_data(folder, settings, trains=False)
        progress(0.0, f"starting on {device.kind}")
        if isinstance(task, UserTask):
            task.write_weights(folder)
        group = RankGroup((device.kind,), (threads_for(device.kind, count),), preload=ahead)
        arguments = (str(place), settings, device, *limits, task or registered_task)
        run_ranks(profile_rank, arguments, group, on_event)
    return found[0]


def _with_links(profile: ModelProfile, cluster: Cluster) -> ModelProfile:
    """Return the profile with the times of messages and sums between the cluster's real devices."""
    if not _real_kinds(cluster):
        return profile
    from hetpipe.profiling.link_profiler import measure_all_reduces, measure_links

    return dataclasses.replace(
        profile, links=measure_links(cluster), all_reduces=measure_all_reduces(cluster)
    )


def _real_kinds(cluster: Cluster) -> list[list[str]]:
    """Return the kinds of real devices, node by node: messages are measured between those of a node."""
    nodes = [sorted(d.kind for d in node.devices if not is_emulated(d.kind)) for node in cluster.nodes]
    return [kinds for kinds in nodes if kinds]


def _code() -> str:
    """Return the hash of the code that measures, so that its changes do not meet old profiles."""
    places = (
        "profiling/layer_profiler",
        "profiling/host_rate",
        "profiling/link_profiler",
        "profiling/layer_timer",
        "profiling/attention_counter",
        "profiling/median_error",
        "runtime/transport",
        "runtime/accelerators",
        "runtime/byte_counter",
        "runtime/stage_runner",
        "runtime/optimizer",
        "runtime/torch_optimizer",
        "runtime/named_optimizers",
        "models/mixed_precision",
        "models/partial_model",
        "models/block_arguments",
        "models/adapters",
        "models/chain",
        "models/block_structure",
        "models/observation",
        "models/found_structure",
        "models/splittable",
        "models/frozen_weights",
        "models/lowered_weights",
        "models/quantized_weights",
        "models/weight_bytes",
        "models/pretrained_weights",
        "models/placement",
        "models/families",
        "models/huggingface",
        "models/keyed_dropout",
        "models/philox",
        "models/philox_compiled",
        "models/philox_torch",
        "models/philox_triton",
        "models/loss",
        "models/chunked_loss",
        "models/compiled_blocks",
    )
    package = Path(__file__).parents[1]
    return hashlib.sha256(b"".join((package / f"{place}.py").read_bytes() for place in places)).hexdigest()


def processor_name() -> str:
    """Return the processor of this host as its system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")


def _file_name(model: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-._" else "_" for letter in model)
