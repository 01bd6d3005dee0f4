"""profile: measure a model, merge files, calibrate by a run; and what is said of the result."""

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from cost_model.catalogue import accelerator
from cost_model.cluster import Cluster, is_emulated
from cost_model.cluster_file import read_cluster
from cost_model.dtypes import check_estimable, check_fast, dtypes_of
from cost_model.errors import InputError
from cost_model.measured_links import MeasuredLink
from cost_model.profile import ModelProfile, profile_text, read_profile
from cost_model.units import format_bandwidth, format_bytes, format_seconds
from hetpipe.commands.given_profile import warn_of_doubts
from hetpipe.commands.gpu_defaults import FEW_SIZES, measured
from hetpipe.commands.inputs import estimate_all, named_model, remaining, with_estimates
from hetpipe.commands.measured_network import measured_text
from hetpipe.commands.options import (
    AllowSlowOption,
    BudgetOption,
    CompileOption,
    DtypeOption,
    EstimateOption,
    JsonOption,
    LearnedOptions,
    LossChunksOption,
    MaybeCluster,
    ModelOption,
    ProfileOptions,
    RemeasureOption,
    SequenceOption,
    with_options,
)
from hetpipe.commands.output import check_output, note, print_json, warn, write_output
from hetpipe.commands.several_hosts import (
    Asked,
    HostOptions,
    follow_leader,
    joined_profile,
    leading,
    place_of,
    said_of,
)
from hetpipe.profiling.calibration import calibrate
from hetpipe.profiling.median_error import precision_text
from hetpipe.profiling.merging import left_out, merge
from hetpipe.profiling.profile_cache import profile_model
from hetpipe.reporting.host_sentences import rate_sentences
from hetpipe.reporting.largest_sizes import CURVE_MEANS, LARGEST_MEANS, curve_table, largest_table
from hetpipe.reporting.progress import progress_bar
from hetpipe.reporting.tables import estimate_sentences, profile_table, show
from hetpipe.runs.run_folder import DEVICE_CLOCKS, MEASURED, RunFolder
from hetpipe.runs.run_report import read_report
from hetpipe.runs.settings import Clock
from partition.plan_file import read_plan

AUTO_SIZES = "auto"
MOST_SAMPLES = 2**20
PROFILE_FILE = "hetpipe.profile"


@dataclasses.dataclass(frozen=True, slots=True)
class MeasureOptions(LearnedOptions):
    """What is measured, where, and how long."""

    title: ClassVar[str] = "What is measured"
    model: ModelOption = None
    cluster_file: MaybeCluster = None
    sequence_length: SequenceOption = None
    dtype: DtypeOption = None
    loss_chunks: LossChunksOption = None
    compiled: CompileOption = False
    allow_slow_bf16: AllowSlowOption = False
    profile_budget_s: BudgetOption = 60.0
    remeasure: RemeasureOption = False
    microbatch_sizes: Annotated[
        str | None,
        typer.Option("--microbatch-sizes", help="1,2,4; auto, as on GPUs alone: to the largest that fits."),
    ] = None


@with_options
def profile_command(
    *,
    files: Annotated[list[Path] | None, typer.Argument(help="Profiles to --merge.")] = None,
    options: MeasureOptions,
    hosts: HostOptions,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the profile here.")] = None,
    cluster_output: Annotated[
        Path | None,
        typer.Option("--cluster-output", help="With --rendezvous: the cluster file, with measured links."),
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Join the profiles of several hosts.")] = False,
    profile_file: Annotated[
        Path | None, typer.Option("--profile", help="Go on from this profile.json; nothing is measured.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--from-run", help="Correct the profile of this run by what it measured.")
    ] = None,
    show_layers: Annotated[bool, typer.Option("--show", help="Print the layers as a table.")] = False,
    estimate: EstimateOption = None,
    json: JsonOption = False,
) -> None:
    """Measure a model's layers on each kind of device of the cluster, or merge or correct profiles."""
    kinds = tuple(estimate or ())
    for kind in kinds:
        accelerator(kind)  # an unknown one is refused before anything slow
    given = {"--merge": merge, "--from-run": run is not None, "--profile": profile_file is not None}
    sources = [name for name, is_given in given.items() if is_given]
    _check_source(sources, files or [], options, estimated=kinds)
    _check_hosts(sources, hosts, cluster_output)
    check_output(output, PROFILE_FILE)
    check_output(cluster_output, "nodes")
    dtype = options.dtype
    if merge:
        profile = merge_files(files or [])
    elif run is not None:
        profile = from_run(run)
    elif profile_file is not None:
        profile = read_profile(profile_file)
    else:
        found = measure(options, hosts, cluster_output, estimated=kinds, quiet=json)
        if found is None:  # the profile is on the leader's host
            return
        profile, dtype = found
    profile = with_estimates(profile, kinds, dtype=dtype, allow_slow=options.allow_slow_bf16)
    if output is not None:
        write_output(output, profile_text(profile))
    if json:
        print_json(profile.to_json())
        note(estimate_sentences(profile, profile.kinds))
    else:
        _show(profile, output, _with_largest(options, layers=show_layers), layers=show_layers)


def _with_largest(options: MeasureOptions, *, layers: bool) -> Cluster | None:
    """Return the cluster whose largest microbatches are shown: all sizes were tried, or tables are wanted."""
    wanted = layers or options.microbatch_sizes == AUTO_SIZES
    return read_cluster(options.cluster_file) if wanted and options.cluster_file is not None else None


def _show(profile: ModelProfile, output: Path | None, cluster: Cluster | None, *, layers: bool) -> None:
    """Print what the profile is of, how well its times are known, and with layers all of them.

    cluster: whose largest microbatches are shown, None for none.
    """
    if layers:
        show([profile_table(profile), *link_sentences(profile), *rate_sentences(profile)])
    if cluster is not None:
        show([curve_table(profile, cluster), CURVE_MEANS, largest_table(profile, cluster), LARGEST_MEANS])
    where = f"; wrote {output}" if output is not None else ""
    what = f"{profile.model}: {profile.num_layers} layers on {', '.join(profile.kinds)}{where}"
    show([*precision_sentences(profile), *estimate_sentences(profile, profile.kinds), what])


def _check_source(
    given: Sequence[str], files: Sequence[Path], options: MeasureOptions, *, estimated: Collection[str]
) -> None:
    """Check that a profile comes from one place.

    given: those of --merge, --from-run and --profile that are given. estimated: kinds, which a --dtype may be
    for.

    Raises: InputError if two are given, one beside what is measured, or files without --merge.
    """
    if len(given) > 1:
        raise InputError(f"{given[0]} and {given[1]} exclude each other; do one after the other")
    if files and "--merge" not in given:
        raise InputError(
            f"{files[0]}: to join profiles, give --merge; to go on from one, --profile {files[0]}"
        )
    measured = (
        ("--model", options.model), ("--cluster", options.cluster_file),
        ("--dtype", None if estimated else options.dtype),
        ("--loss-chunks", options.loss_chunks), ("--compile", options.compiled or None),
        ("--remeasure", options.remeasure or None),
        ("--lora", options.lora), ("--sequence-length", options.sequence_length),
        ("--microbatch-sizes", options.microbatch_sizes),
        ("--adapter", options.adapter), ("--load-in", options.load_in),
    )  # fmt: skip
    for option, value in measured:
        if given and value is not None:
            raise InputError(
                f"{option} is for measuring, and {given[0]} measures nothing; leave one of them out"
            )


def _check_hosts(sources: Sequence[str], hosts: HostOptions, cluster_output: Path | None) -> None:
    """Check that several hosts are asked for where something is measured between them.

    Raises: InputError if they measure nothing, or there are none.
    """
    several = hosts.are_several
    if several and sources:
        raise InputError(f"several hosts are for measuring, and {sources[0]} measures nothing; leave it out")
    if cluster_output is not None and not several:
        raise InputError("--cluster-output is of links between hosts; give --rendezvous, or leave it out")
    if hosts.print_launch:
        raise InputError("--print-launch is of `hetpipe run`; start the same profile line on each host")


def parse_sizes(text: str) -> tuple[int, ...] | None:
    """Return microbatch sizes as on the command line; None for "auto".

    >>> parse_sizes("4,1,2"), parse_sizes("auto")
    ((1, 2, 4), None)

    Raises: InputError if they are no list of whole numbers above zero.
    """
    if text == AUTO_SIZES:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise InputError(
            f'--microbatch-sizes {text!r} is no list of sizes; write for example 1,2,4, or "auto"'
        )
    if max(map(len, words)) > len(str(MOST_SAMPLES)) or max(map(int, words)) > MOST_SAMPLES:
        raise InputError(f"--microbatch-sizes {text[:60]!r}: give at most {MOST_SAMPLES:,} samples")
    return tuple(sorted({int(word) for word in words}))


def measure(
    options: MeasureOptions,
    hosts: HostOptions,
    cluster_output: Path | None,
    *,
    estimated: Collection[str] = (),
    quiet: bool,
) -> tuple[ModelProfile, str | None] | None:
    """Measure a model on the kinds of a cluster file, or take it from the cache; return the --dtype, too.

    On several hosts each measures its own kinds, and the leader's has all; None on the others. Warns of what
    did not fit.

    estimated: kinds that are left out; where these are all kinds, nothing is measured, and they are estimated
    by the roofline alone. cluster_output: where the cluster with measured links is written.

    Raises: InputError if one of the two is missing or unknown, or nothing is measured and more is asked for.
    """
    given = options.microbatch_sizes
    sizes = FEW_SIZES if given is None else parse_sizes(given)
    for option, value in (("--model", options.model), ("--cluster", options.cluster_file)):
        if value is None:
            raise InputError(f"Missing option '{option}'; only --profile, --merge and --from-run go without")
    assert options.model is not None and options.cluster_file is not None
    entry = named_model(options.model, options)
    name = entry.name
    note(() if entry.folder is None else entry.folder.notes())
    whole = read_cluster(options.cluster_file)
    if all(device.kind in estimated for device in whole.devices):
        if given is not None or hosts.are_several:
            raise InputError(
                f"--estimate names every kind of {whole.name!r}, so that nothing is measured; leave out "
                "--microbatch-sizes and --rendezvous, or a kind"
            )
        return _all_estimated(options, whole, estimated), options.dtype
    cluster = remaining(whole, [device.name for device in whole.devices if device.kind in estimated])
    how = measured(
        cluster, options.model, options.sequence_length, options.dtype, sizes, sizes_given=given is not None
    )
    dtypes = dtypes_of(how.dtype, {*(device.kind for device in cluster.devices), *estimated})
    if not options.allow_slow_bf16:
        check_fast(dtypes, cluster.devices)
        check_estimable({kind: dtypes[kind] for kind in estimated})

    def measured_on(part: Cluster | None = None) -> ModelProfile:
        with progress_bar(f"measuring {name}", quiet=quiet) as report:
            return profile_model(
                str(options.model), part or cluster, how.sequence_length,
                dtype=dtypes, budget_s=options.profile_budget_s, microbatch_sizes=how.microbatch_sizes,
                progress=report,
                lora=entry.lora,
                load_in=entry.load_in,
                loss_chunks=options.loss_chunks,
                compiled=options.compiled,
                use_cache=not options.remeasure, run=options.decided, tell=warn,
            )  # fmt: skip

    if not hosts.are_several:
        hosts.check_alone()
    place = place_of(hosts, cluster) if hosts.are_several else None
    said = said_of(options.dtype, options.loss_chunks, compiled=options.compiled)
    said |= {f"--{name}": str(value) for name, value in options.decided.items()}
    said["--sequence-length"] = options.sequence_length
    asked = Asked(cluster, cluster, entry, said, what="measuring")
    if place is not None and not place.leads:
        follow_leader(place, asked, measured_on)
        return None
    with leading(place, asked) as leader:
        profile = measured_on() if leader is None else joined_profile(leader, cluster, measured_on)
        if leader is not None:
            text = measured_text(leader, cluster, options.cluster_file, anew=options.remeasure)
            if cluster_output is not None:
                write_output(cluster_output, text)
    note(how.said)
    warn_of_doubts(profile)
    for kind, missing in left_out(profile, how.microbatch_sizes or ()).items():
        warn(f"microbatches of {', '.join(map(str, missing))} do not fit on {kind!r} and were left out")
    return profile, how.dtype


def _all_estimated(options: MeasureOptions, cluster: Cluster, kinds: Collection[str]) -> ModelProfile:
    names = [field.name for field in dataclasses.fields(ProfileOptions) if field.name != "profile_file"]
    as_given = ProfileOptions(**{name: getattr(options, name) for name in names})
    return estimate_all(
        options.model, cluster, options.sequence_length, as_given, options.decided,
        allow_slow=options.allow_slow_bf16, further=kinds,
    )  # fmt: skip


def merge_files(files: Sequence[Path]) -> ModelProfile:
    """Return one profile of several files.

    Raises: InputError if there are fewer than two, or they do not belong together.
    """
    if len(files) < 2:
        raise InputError(
            f"--merge is given {len(files)} files; give at least two profile.json, or one with --profile"
        )
    profiles = [read_profile(path) for path in files]
    try:
        return merge(profiles)
    except InputError as error:
        raise InputError(f"{', '.join(map(str, files))}: {error}") from None


def from_run(path: Path) -> ModelProfile:
    """Return the profile of a run, corrected by what the run measured.

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
    traces = folder.read_traces()
    trace = traces.get(DEVICE_CLOCKS) or traces.get(MEASURED)
    return calibrate(read_profile(folder.profile), read_plan(folder.plan), cluster, report, trace)


def _only_emulated(cluster: Cluster, names: Iterable[str]) -> bool:
    return all(is_emulated(cluster.device(name).kind) for name in names)


def precision_sentences(profile: ModelProfile) -> list[str]:
    """Say how well the medians of each kind are known, where that was measured."""
    several = len(profile.kinds) > 1
    return [
        f"{f'{kind}: ' if several else ''}{precision_text(entry.standard_error, entry.standard_error_of)}"
        for kind, entry in profile.kinds.items()
        if entry.standard_error is not None
    ]


def link_sentences(profile: ModelProfile) -> list[str]:
    """Say what messages take, latency and bandwidth with it by size, and sums, seconds by size."""
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
