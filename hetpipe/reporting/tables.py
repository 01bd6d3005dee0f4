"""Plans, comparisons and predictions as tables and sentences for people (rich; plain text in a pipe)."""

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import IO

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from cost_model.cluster import Cluster, Device
from cost_model.dtypes import FLOAT32, MIXED, multiplied_in
from cost_model.known_errors import distrust
from cost_model.profile import ModelProfile
from cost_model.units import format_bytes, format_number, format_seconds
from hetpipe.reporting.critical_path import Share
from hetpipe.reporting.driver_memory import driver_sentences
from hetpipe.reporting.host_sentences import host_sentences
from hetpipe.reporting.idle_time import DeviceTime
from hetpipe.reporting.many_pipelines import (
    MANY_ROWS,
    MOST_WAITING,
    alike,
    range_of,
    shown_devices,
    shown_together,
)
from hetpipe.reporting.narrow_tables import narrow
from partition.estimates.plan_memory import memory_on
from partition.plan import Figures, Plan, Stage

ESTIMATED = "estimated"
WIDTH_IN_A_PIPE, WIDEST = 160, 10_000
WIDTH_IN_A_NOTEBOOK = 100
"""Columns: what is wider than a cell stands beyond its right edge."""
SMALLEST_SHARE = 0.01
MOST_CAUSES = 4
ROOFLINE_ALONE = "; from no measured kind: times of kinds are better known in proportion than in seconds"
_UNITS = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))
_MANY_BYTES = re.compile(r"(?<![\d,.])(\d{1,3}(?:,\d{3}){2,})(?: bytes)?(?!,?\d)")
_MAKER = re.compile(r"^(?:NVIDIA-(?:GeForce-|Tesla-)?|AMD-(?:Instinct-|Radeon-)?)(?=.)")
_NUMBERED = re.compile(r"(?P<stem>.*?)(?P<number>\d+)")


def console(file: IO[str] | None = None) -> Console:
    """Return a console that writes no colours when it is not a terminal, and there is as wide as COLUMNS.

    In a notebook it is as wide as a cell.
    """
    file = file or sys.stdout
    out = Console(file=file, width=None if file.isatty() else _width_in_a_pipe(), highlight=False)
    if out.is_jupyter:
        out.width = WIDTH_IN_A_NOTEBOOK
    return out


def _width_in_a_pipe() -> int:
    return _given_columns() or WIDTH_IN_A_PIPE


def _given_columns() -> int:
    given = os.environ.get("COLUMNS", "")
    return int(given) if given.isdecimal() and 0 < int(given) <= WIDEST else 0


def show(renderables: Iterable[RenderableType], file: IO[str] | None = None) -> None:
    """Print tables and sentences, one below the other.

    In a pipe a sentence is one line, for who searches it, unless COLUMNS says how long lines may be.
    """
    out = console(file)
    wraps = out.is_terminal or out.is_jupyter or _given_columns() > 0
    for part in renderables:
        if isinstance(part, Table):
            narrow(part, out)
        out.print(part, soft_wrap=isinstance(part, str) and not wraps, markup=False)


def as_text(renderable: RenderableType) -> str:
    """Return the plain text that a pipe would get."""
    out = Console(
        width=WIDTH_IN_A_PIPE, highlight=False, color_system=None, force_terminal=False, force_jupyter=False
    )
    with out.capture() as capture:
        out.print(renderable, soft_wrap=isinstance(renderable, str), markup=False)
    return capture.get()


def few_names(names: Sequence[str], most: int = 3) -> str:
    """Name a few of them, and how many there are more.

    >>> few_names(["a", "b/1"]), few_names(["a", "b", "c", "d", "e"])
    ('a, b/1', 'a, b, c and 2 more')
    """
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def describe_layers(names: Sequence[str]) -> str:
    """Return neighbouring layers by name, numbered ones joined.

    >>> describe_layers(["embeddings", "block0", "block1", "block2", "head"])
    'embeddings, block0-2, head'
    """
    runs: list[tuple[str, int | None, int | None]] = []
    for name in names:
        match = _NUMBERED.fullmatch(name)
        number = int(match["number"]) if match else None
        stem = match["stem"] if match else name
        if runs and number is not None and runs[-1][0] == stem and runs[-1][2] == number - 1:
            runs[-1] = (stem, runs[-1][1], number)
        else:
            runs.append((stem, number, number))
    parts = (
        stem if first is None else f"{stem}{first}" if first == last else f"{stem}{first}-{last}"
        for stem, first, last in runs
    )
    return ", ".join(parts)


def describe_device(device: Device, profile: ModelProfile | None = None) -> str:
    """Return kind and speed of a device; "estimated" where its times were not measured.

    And in which precision it computes, where not all do in the same.
    """
    speed = "" if device.speed == 1 else f" x {device.speed:g}"
    if profile is not None and profile.dtype == MIXED and device.kind in profile.kinds:
        speed += f" in {multiplied_in(profile.dtype_of(device.kind))}"
    estimated = profile is not None and is_estimated(profile, device.kind)
    return f"{device.kind}{speed}{f' ({ESTIMATED})' if estimated else ''}"


def device_labels(plan: Plan, profile: ModelProfile, cluster: Cluster) -> dict[int, tuple[str, str]]:
    """Return for each rank that has a row in a picture its device, with what it is, and the layers it holds.

    Of many pipelines, those alike have the rows of one of them, with how many more there are.
    """
    shown, labels = shown_devices(plan, cluster), {}
    for rank, name in enumerate(plan.device_names):
        if name in shown:
            device = f"{name}  {describe_device(cluster.device(name), profile)}{alike(shown[name])}"
            layers = [profile.layers[layer].name for layer in plan.layers_of(name)]
            labels[rank] = (device, describe_layers(layers))
    return labels


def estimate_sentences(profile: ModelProfile, kinds: Iterable[str]) -> list[str]:
    """Name the kinds whose times are estimated, and which not to trust, in a sentence; [] if none are."""
    estimated = [kind for kind in dict.fromkeys(kinds) if is_estimated(profile, kind)]
    if not estimated:
        return []
    doubts = [
        f"{kind} ({reason})" for kind in estimated if (reason := distrust(kind, profile.dtype_of(kind)))
    ]
    doubt = f"; not to be trusted: {', '.join(doubts)}" if doubts else ""
    alone = "" if any(kind.source != ESTIMATED for kind in profile.kinds.values()) else ROOFLINE_ALONE
    return [f"{ESTIMATED}, not measured: {', '.join(estimated)}{doubt}{alone}"]


def is_estimated(profile: ModelProfile, kind: str) -> bool:
    """Return whether the profile has a kind and its times were not measured."""
    return kind in profile.kinds and profile.kinds[kind].source == ESTIMATED


def plan_sentences(
    plan: Plan, profile: ModelProfile, cluster: Cluster, *, details: bool = False
) -> list[str]:
    """Say what a plan is and how good: header, precisions, bound, devices left out, hosts, estimated kinds.

    details: of the bound, which plans it speaks about.
    """
    sentences = [_header(plan, profile, cluster), *_precisions(plan, profile, cluster)]
    sentences += gradient_sentences(plan.gradient_dtype)
    if plan.predicted is not None and (bound := bound_sentence(plan.predicted, details=details)):
        sentences.append(bound)
    left_out = [device for device in cluster.devices if device.name not in plan.device_names]
    if left_out:
        names = ", ".join(f"{device.name} ({describe_device(device, profile)})" for device in left_out)
        sentences.append(f"left out: {names}")
    sentences += driver_sentences(cluster.device(name) for name in plan.device_names)
    sentences += host_sentences(plan, profile, cluster)
    return sentences + estimate_sentences(profile, (device.kind for device in cluster.devices))


def _precisions(plan: Plan, profile: ModelProfile, cluster: Cluster) -> list[str]:
    """Name in which precision each kind of a plan computes, in a sentence; [] where all do in the same."""
    if profile.dtype != MIXED:
        return []
    kinds = dict.fromkeys(cluster.device(name).kind for name in plan.device_names)
    named = (f"{kind} in {multiplied_in(profile.dtype_of(kind))}" for kind in kinds)
    return [f"computes: {', '.join(named)}"]


def gradient_sentences(gradient_dtype: str) -> list[str]:
    """Say in what gradients travel where that is not what they are made in; [] where it is."""
    if gradient_dtype == FLOAT32:
        return []
    return [f"gradients: summed between devices in {gradient_dtype}, half the bytes, rounded"]


def _header(plan: Plan, profile: ModelProfile, cluster: Cluster) -> str:
    shapes = [(pipeline.microbatch_size, pipeline.num_microbatches) for pipeline in plan.pipelines]
    parts = [
        f"{f'{count} pipelines of ' if (count := len(list(group))) > 1 else ''}microbatch {size} x {number}"
        for (size, number), group in groupby(shapes)
    ]
    text = f"{plan.strategy}: {plan.model}, {plan.global_batch_size} samples a step, {', '.join(parts)}"
    if plan.zero:
        levels = "/".join(map(str, sorted(set(plan.layer_zero or (plan.zero,)))))
        text += f", {plan.sharding.words} sharded (ZeRO-{levels}{' by layer' * bool(plan.layer_zero)}"
        cut = len({each.layer for each in plan.owner_ranges})
        text += f", {cut} layer{'s' * (cut > 1)} in ranges)" if cut else ")"
    if plan.predicted is None:
        return text
    kinds = {cluster.device(name).kind for name in plan.device_names}
    estimated = any(is_estimated(profile, kind) for kind in kinds)
    figures = plan.predicted
    return (
        f"{text}; predicted{' (from estimated times)' if estimated else ''}: "
        f"step {format_seconds(figures.step_s)}, {format_number(figures.samples_per_s, 4)} samples/s, "
        f"bubble {figures.bubble:.0%}"
    )


def bound_sentence(figures: Figures, *, details: bool = False) -> str:
    """Say how much better any plan could be; "" where no bound is known.

    details: name the plans that the bound speaks about, too.
    """
    if figures.bound_s is None or figures.gap is None:
        return ""
    bound, gap = format_seconds(figures.bound_s), f"{max(0.0, figures.gap):.1%}"
    without = f" without {few_names(figures.bound_without)}" if figures.bound_without else ""
    if details:
        return f"no plan{without} ({figures.bound_space}) can be faster than {bound}; gap {gap}"
    return (
        f"proven: no plan of its kind{without} can be faster than {bound}; this one is at most {gap} slower "
        "than the best"
    )


def plan_table(plan: Plan, profile: ModelProfile, cluster: Cluster) -> Table:
    """Show each stage: device, layers, in flight, busy and memory against what a plan may fill.

    Of many stages, pipelines alike are shown as one of them, with how many more there are.
    """
    several = len(plan.pipelines) > 1
    used = [cluster.device(name) for name in plan.device_names]
    kinds = {device.kind for device in used}
    common = next(iter(kinds)) if len(kinds) == 1 else ""  # of all devices, and named once
    names = {device.name: f"{device.name} {_short(device, profile, common)}".rstrip() for device in used}
    table = new_table("stage", f"device, {_without_maker(common)}" if common else "device", "layers")
    if several:
        table.add_column("samples", justify="right")
    needs = {name: memory_on(plan, profile, cluster.device(name)).total_bytes for name in plan.device_names}
    unit, size = unit_of(max(needs.values()))
    for title in ("in flight", "busy", f"memory, {unit}", "of"):
        table.add_column(title, justify="right", no_wrap=True)
    predicted = plan.predicted.devices if plan.predicted else {}
    for numbers in shown_together(plan, cluster):
        pipeline = plan.pipelines[numbers[0]]
        for index, stage in enumerate(pipeline.stages):
            device = cluster.device(stage.device)
            layers = [layer.name for layer in profile.layers[stage.start : stage.stop]]
            shown = [plan.pipelines[number].stages[index].device for number in numbers]
            table.add_row(
                f"{numbers[0]}.{index}" if several else str(index),
                names[device.name] + alike(len(shown) - 1),
                describe_layers(layers) + _recompute_words(stage) + _offload_words(stage),
                *([str(pipeline.num_samples)] if several else []),
                str(pipeline.in_flight(index)),
                range_of([predicted[name].busy for name in shown if name in predicted]),
                f"{needs[device.name] / size:,.2f}",
                f"{device.usable_bytes / size:,.2f}",
            )
    return table


def _short(device: Device, profile: ModelProfile, common: str) -> str:
    """Return what is to be said of a device in a table where it is named, and the kind of all is."""
    text = describe_device(device, profile)
    return text.removeprefix(common).strip() if common else _without_maker(text)


def _without_maker(kind: str) -> str:
    """Return a kind without the words that are in the names of all cards of a maker.

    >>> [_without_maker(kind) for kind in ("NVIDIA-GeForce-RTX-2080-Ti", "AMD-Instinct-MI250X", "T4")]
    ['RTX-2080-Ti', 'MI250X', 'T4']
    """
    return _MAKER.sub("", kind)


def unit_of(num_bytes: float) -> tuple[str, float]:
    """Return the unit in which a table shows bytes of which these are the most, and its bytes.

    >>> unit_of(3 * 2**20)
    ('MiB', 1048576.0)
    """
    return next((unit, size) for unit, size in _UNITS if num_bytes >= size or size == 1.0)


def in_units(text: str) -> str:
    """Return a message with its counts of bytes from a MiB on in the units of people.

    >>> in_units("need 5,742,060,456 bytes on 'big/0', which has 3,865,470,566 usable; 12 bytes are missing")
    "need 5.35 GiB on 'big/0', which has 3.60 GiB usable; 12 bytes are missing"
    """
    return _MANY_BYTES.sub(lambda found: format_bytes(float(found[1].replace(",", ""))), text)


def _recompute_words(stage: Stage) -> str:
    """Say what is recomputed at once; nothing without recompute."""
    if not stage.recompute:
        return ""
    if len(stage.segments) == 1:
        return " (recompute)"
    each = stage.segment_layers
    return " (recompute by layer)" if each == 1 else f" (recompute by {each} layers)"


def _offload_words(stage: Stage) -> str:
    return f" ({', '.join(stage.offload)} on the host)" if stage.offload else ""


def path_sentence(shares: Sequence[Share]) -> str:
    """Say what the critical path is made of, the longest first; places below 1 % together."""
    shown = [share for share in shares if share.fraction >= SMALLEST_SHARE]
    rest = sum(share.fraction for share in shares if share.fraction < SMALLEST_SHARE)
    parts = [*map(str, shown), *([f"{rest:.1%} the rest"] if rest >= SMALLEST_SHARE / 10 else [])]
    return f"critical path: {', '.join(parts)}"


def waiting_table(times: Mapping[str, DeviceTime]) -> Table:
    """Show busy and waiting seconds of each device, and what it waited for, the longest first.

    Of many devices those that wait longest have a row each, in the order of the plan.
    """
    table = new_table("device")
    for title in ("busy", "waiting"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("waiting for")
    longest = sorted(times, key=lambda name: -times[name].waiting_s)
    longest = longest if len(times) <= MANY_ROWS else longest[:MOST_WAITING]
    for name in [name for name in times if name in longest]:
        found = times[name]
        causes = sorted(found.waiting_for.items(), key=lambda cause: -cause[1])[:MOST_CAUSES]
        table.add_row(
            name,
            format_seconds(found.busy_s),
            format_seconds(found.waiting_s),
            ", ".join(f"{what} {format_seconds(duration)}" for what, duration in causes),
        )
    if len(times) > len(longest):
        table.add_row(f"{len(times) - len(longest):,} more", "", "", "less long; --json has all")
    return table


def profile_table(profile: ModelProfile) -> Table:
    """Show layers with their bytes, and their seconds on each kind at its largest microbatch size.

    The most bytes, where kinds have their own.
    """
    table = new_table("layer")
    most = "most " if any(kind.held for kind in profile.kinds.values()) else ""
    for title in ("parameters", "saved / sample", "output / sample"):
        table.add_column(most + title, justify="right", no_wrap=True)
    for name, kind in profile.kinds.items():
        mark = f" ({ESTIMATED})" if kind.source == ESTIMATED else ""
        title = f"{_without_maker(name)}{mark}, forward + backward of {kind.microbatch_sizes[-1]}"
        table.add_column(title, justify="right", overflow="fold")
    views = [profile.on(kind) for kind in profile.kinds] or [profile]
    for index, layer in enumerate(profile.layers):
        held = [view.layers[index] for view in views]
        times = [kind.layers[index] for kind in profile.kinds.values()]
        table.add_row(
            layer.name,
            format_bytes(max(each.parameter_bytes for each in held)),
            format_bytes(max(each.saved_bytes_per_sample for each in held)),
            format_bytes(max(each.output_bytes_per_sample for each in held)),
            *(f"{format_seconds(t.forward_s[-1])} + {format_seconds(t.backward_s[-1])}" for t in times),
        )
    return table


def new_table(*columns: str) -> Table:
    """Return an empty table with columns that fold where they are too wide."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
