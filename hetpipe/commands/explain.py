"""explain: why a plan is as it is."""

from pathlib import Path
from typing import Annotated

import typer

from cost_model.cluster_file import read_cluster
from cost_model.other_clusters import without
from hetpipe.commands.given_plan import check_devices, checked_plan, profile_of_plan
from hetpipe.commands.options import (
    ClusterOption,
    JsonOption,
    ModelOption,
    ProfileOptions,
    SequenceOption,
    VerboseOption,
    with_options,
)
from hetpipe.commands.output import estimates_of, note, print_json
from hetpipe.program.verification import verify
from hetpipe.reporting.idle_time import device_times
from hetpipe.reporting.speed_breakdown import speed_sentence, speed_shares
from hetpipe.reporting.tables import plan_sentences, show
from hetpipe.simulation.prediction import evaluator, predict, with_bound
from partition.plan_file import read_plan
from partition.problem import problem_of


@with_options
def explain_command(
    *,
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json.")],
    cluster_file: ClusterOption,
    model: ModelOption = None,
    sequence_length: SequenceOption = None,
    options: ProfileOptions,
    verbose: VerboseOption = False,
    json: JsonOption = False,
) -> None:
    """Say where the speed goes, why each stage has its layers, what left-out devices would add."""
    plan, cluster = read_plan(plan_file), read_cluster(cluster_file)
    check_devices(plan, cluster, plan_file)
    profile = profile_of_plan(model, cluster, sequence_length, options, quiet=json)
    plan = checked_plan(plan, profile, cluster, plan_file)
    from hetpipe.reporting.explanation import explanation_sentences
    from partition.explanation.explain import explain

    prediction = predict(plan, profile, cluster)
    verify(prediction.program, profile, cluster)  # what does not fit has no speed to explain
    times = zip(plan.device_names, device_times(prediction.trace, prediction.costs), strict=True)
    waits = {name: time.waiting_for for name, time in times}
    unknown = [device.name for device in cluster.devices if device.kind not in profile.kinds]
    problem = problem_of(
        profile, without(cluster, unknown), plan.global_batch_size, gradient_dtype=plan.gradient_dtype
    )
    found = explain(plan, problem, evaluator(profile, cluster), waits)
    speed = speed_shares(prediction.trace, prediction.costs, profile, cluster)
    lines = [speed_sentence(speed), *explanation_sentences(found, plan, problem)]
    if json:
        print_json({**found.to_json(), "speed": speed, "sentences": lines})
        note(estimates_of(profile, cluster))
        return
    prediction = with_bound(prediction, profile, cluster)
    show([*plan_sentences(prediction.plan, profile, cluster, details=verbose), *lines])
