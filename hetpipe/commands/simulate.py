"""simulate: run a plan on a virtual clock."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from cost_model.cluster_file import read_cluster
from hetpipe.commands.given_plan import check_devices, predict_given, profile_of_plan
from hetpipe.commands.options import (
    ClusterOption,
    JsonOption,
    ModelOption,
    ProfileOptions,
    ScheduleOption,
    SequenceOption,
    VerboseOption,
    with_options,
)
from hetpipe.commands.output import (
    check_output,
    choice_json,
    choice_sentences,
    estimates_of,
    note,
    print_json,
    write_output,
)
from hetpipe.program.costs import check_memory
from hetpipe.program.trace import chrome_trace
from hetpipe.reporting.critical_path import Share, critical_path, shares
from hetpipe.reporting.idle_time import DeviceTime, device_times
from hetpipe.reporting.shared_sentences import shared_sentences
from hetpipe.reporting.speed_breakdown import speed_sentence, speed_shares
from hetpipe.reporting.sums_table import summed_gradients, sums_table
from hetpipe.reporting.tables import path_sentence, plan_sentences, plan_table, show, waiting_table
from hetpipe.runs.run_folder import PREDICTED
from hetpipe.simulation.shared_network import shared_step_s
from partition.plan import Figures
from partition.plan_file import read_plan


@with_options
def simulate_command(
    *,
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json.")],
    cluster_file: ClusterOption,
    model: ModelOption = None,
    sequence_length: SequenceOption = None,
    options: ProfileOptions,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write Chrome trace events here.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the step here, as PNG and SVG, or as PDF.")
    ] = None,
    schedule: ScheduleOption = None,
    verbose: VerboseOption = False,
    json: JsonOption = False,
) -> None:
    """Run a plan on a virtual clock: step time, bubble, memory, and what the step waits for."""
    check_output(trace, "traceEvents")
    if plot is not None:
        from hetpipe.commands.pictures import check_picture

        check_picture(plot)
    plan, cluster = read_plan(plan_file), read_cluster(cluster_file)
    check_devices(plan, cluster, plan_file)
    profile = profile_of_plan(model, cluster, sequence_length, options, quiet=json)
    prediction = predict_given(plan, profile, cluster, schedule, plan_file)
    check_memory(prediction.plan, profile, cluster)
    if trace is not None:
        write_output(trace, chrome_trace([(PREDICTED, prediction.trace)]))
    if plot is not None:
        from hetpipe.commands.pictures import day_of, save_picture
        from hetpipe.reporting.plots import gantt, plan_title, stage_labels, title

        ax = gantt(prediction.trace, labels=stage_labels(prediction.plan, profile, cluster))
        save_picture(title(ax, plan_title(prediction.plan, cluster, day_of(plan_file))), plot)
    causes = shares(critical_path(prediction.trace, prediction.costs))
    times = dict(
        zip(prediction.plan.device_names, device_times(prediction.trace, prediction.costs), strict=True)
    )
    speed = speed_shares(prediction.trace, prediction.costs, profile, cluster)
    if json:
        data = _figures_json(prediction.figures, causes, times)
        sums = [each.to_json() for each in summed_gradients(prediction.costs)]
        shared_s = shared_step_s(prediction.costs)
        data |= {"shared_step_s": shared_s, "speed": speed, "sums": sums}
        print_json({**data, **choice_json(prediction.choice)})
        note(estimates_of(profile, cluster))
        return
    show(plan_sentences(prediction.plan, profile, cluster, details=verbose))
    show([plan_table(prediction.plan, profile, cluster)])
    sentences = choice_sentences(prediction.choice, schedule)
    show([*sentences, speed_sentence(speed), *shared_sentences(prediction)])
    show([*sums_table(prediction.costs, profile), path_sentence(causes), waiting_table(times)])


def _figures_json(
    figures: Figures, causes: Iterable[Share], times: Mapping[str, DeviceTime]
) -> dict[str, Any]:
    data = figures.to_json()
    for name, time in times.items():
        data["devices"][name] |= dataclasses.asdict(time)
    data["critical_path"] = [dataclasses.asdict(share) for share in causes]
    return data
