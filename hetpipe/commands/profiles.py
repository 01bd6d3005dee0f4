"""The ways to a profile.json: measure, merge files, calibrate by a run; and what is said of it."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from cost_model.cluster import EMULATED, Cluster
from cost_model.cluster_file import read_cluster
from cost_model.dtypes import FLOAT32, check_fast, parse_dtype
from cost_model.errors import InputError
from cost_model.measured_links import MeasuredLink
from cost_model.profile import ModelProfile, read_profile
from cost_model.units import format_bandwidth, format_bytes, format_seconds
from hetpipe.commands.common import progress_bar, warn
from hetpipe.commands.forcing import remaining
from hetpipe.models.names import model_entry
from hetpipe.profiling.calibration import calibrate
from hetpipe.profiling.median_error import precision_text
from hetpipe.profiling.profile_cache import left_out, merge, profile_model
from hetpipe.runs.run_folder import MEASURED, RunFolder
from hetpipe.runs.run_report import read_report
from hetpipe.runs.settings import Clock
from partition.plan_file import read_plan

AUTO = "auto"


def parse_sizes(text: str) -> tuple[int, ...] | None:
    """Microbatch sizes as on the command line; None for "auto".

    >>> parse_sizes("4,1,2"), parse_sizes("auto")
    ((1, 2, 4), None)

    Raises: InputError if they are no list of whole numbers above zero.
    """
    if text == AUTO:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise InputError(
            f'--microbatch-sizes {text!r} is no list of sizes; write for example 1,2,4, or "auto"'
        )
    return tuple(sorted({int(word) for word in words}))


def measure(
    model: str | None,
    cluster: Path | None,
    sequence_length: int,
    sizes: Sequence[int] | None,
    *,
    dtype: str | None,
    allow_slow: bool,
    budget_s: float,
    quiet: bool,
    estimated: Collection[str] = (),
) -> ModelProfile:
    """Measure a model on the kinds of a cluster file, or take it from the cache; warn of what did not fit.

    estimated: kinds that are left out.

    Raises: InputError if one of the two is missing or unknown, or no kind is left.
    """
    for option, value in (("--model", model), ("--cluster", cluster)):
        if value is None:
            raise InputError(f"Missing option '{option}'; only --merge and --from-run go without")
    assert model is not None and cluster is not None
    name = model_entry(model).name
    devices, precision = _measurable(read_cluster(cluster), estimated), parse_dtype(dtype) or FLOAT32
    check_fast(precision, () if allow_slow else devices.devices)
    with progress_bar(f"measuring {name}", quiet=quiet) as report:
        profile = profile_model(
            model, devices, sequence_length,
            dtype=precision, budget_s=budget_s, microbatch_sizes=sizes, progress=report,
        )  # fmt: skip
    for kind, missing in left_out(profile, sizes or ()).items():
        warn(f"microbatches of {', '.join(map(str, missing))} do not fit on {kind!r} and were left out")
    return profile


def _measurable(cluster: Cluster, estimated: Collection[str]) -> Cluster:
    """The cluster without devices of kinds that will be estimated."""
    names = [device.name for device in cluster.devices if device.kind in estimated]
    if len(names) == len(cluster.devices):
        raise InputError(
            f"--estimate names every kind of {cluster.name!r}; at least one is measured, and estimated from"
        )
    return remaining(cluster, names)


def merge_files(files: Sequence[Path]) -> ModelProfile:
    """One profile of several files.

    Raises: InputError if there are fewer than two, or they do not belong together.
    """
    if len(files) < 2:
        raise InputError(f"--merge is given {len(files)} files; give at least two profile.json")
    profiles = [read_profile(path) for path in files]
    try:
        return merge(profiles)
    except InputError as error:
        raise InputError(f"{', '.join(map(str, files))}: {error}") from None


def from_run(path: Path) -> ModelProfile:
    """The profile of a run, corrected by what the run measured.

    Raises: InputError if the folder holds no finished run.
    """
    folder = RunFolder(path)
    if not folder.report.exists():
        raise InputError(f"{path}: holds no report.json; give the folder of a finished run")
    cluster, report = read_cluster(folder.cluster), read_report(folder.report)
    if report.clock == Clock.NOMINAL and _only_emulated(cluster, (stage.device for stage in report.stages)):
        warn(
            "emulated devices take the time of the profile, so this run can tell nothing new; "
            "run it with --clock cpu"
        )
    if report.host_overloaded:
        warn("the host was overloaded in this run; its times are not to be trusted")
    trace = folder.read_traces().get(MEASURED)
    return calibrate(read_profile(folder.profile), read_plan(folder.plan), cluster, report, trace)


def _only_emulated(cluster: Cluster, names: Iterable[str]) -> bool:
    return all(cluster.device(name).kind == EMULATED for name in names)


def precision_sentences(profile: ModelProfile) -> list[str]:
    """How well the medians of each kind are known, where that was measured."""
    several = len(profile.kinds) > 1
    return [
        f"{f'{kind}: ' if several else ''}{precision_text(entry.standard_error, entry.standard_error_of)}"
        for kind, entry in profile.kinds.items()
        if entry.standard_error is not None
    ]


def link_sentences(profile: ModelProfile) -> list[str]:
    """What messages and sums were measured to take: latency, bandwidth with it by size; seconds by size."""
    sentences = []
    for pair, link in profile.links.items():
        text = f"link {pair}: latency {format_seconds(link.latency_s)}"
        if not isinstance(link, MeasuredLink):
            sentences.append(f"{text}, {format_bandwidth(link.bandwidth_bytes_per_s)}")
            continue
        if link.standard_error is not None:
            text += f" (standard error {100 * link.standard_error:.1f} %)"
        rates = (
            f"{_size(size)} {format_bandwidth(size / max(link.transfer_s(size), 1e-12))}"
            for size in link.message_bytes
        )
        sentences.append(f"{text}; with it {', '.join(rates)}")
    for entry in profile.all_reduces:
        group = " and ".join(f"{count} {kind}" for kind, count in Counter(entry.kinds).items())
        seconds = (
            f"{_size(size)} {format_seconds(duration_s)}"
            for size, duration_s in zip(entry.message_bytes, entry.duration_s, strict=True)
        )
        sentences.append(f"all-reduce of {group}: {', '.join(seconds)}")
    return sentences


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes).replace(".00", "")
