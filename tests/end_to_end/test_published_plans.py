"""The layouts that other systems published: they are plans here, and files that the commands read."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hetpipe import cli
from hetpipe.program.verification import verify
from hetpipe.simulation.prediction import predict
from places import EXAMPLES

FOLDER = EXAMPLES / "benchmarks" / "published_plans"


@pytest.fixture(scope="module")
def examples() -> ModuleType:
    """The example's `layouts`, and its `main` as an attribute."""
    sys.path.insert(0, str(FOLDER))
    try:
        found = {name: _load(name) for name in ("layouts", "main")}
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("layouts")
    found["layouts"].main = found["main"]
    return found["layouts"]


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there for the module of a class
    spec.loader.exec_module(module)
    if name != "layouts":
        sys.modules.pop(name)
    return module


def test_every_layout_is_a_plan_whose_program_is_sound(examples):
    found = {layout.name: layout for layout in examples.layouts()}
    assert len(found) == 9 + 2 + 4
    for name, layout in found.items():
        if name.startswith("hexiscale"):
            continue  # 9,600 forwards; one of them is below
        prediction = predict(layout.plan, layout.problem.profile, layout.problem.cluster)
        assert prediction.step_s > 0
        verify(prediction.program, layout.problem.profile, layout.problem.cluster)


def test_hexiscale_has_four_pipelines_of_ten_stages(examples):
    readings = examples.FACTS["hexiscale"]["readings"]
    first, second = (examples.hexiscale(reading, "at 5 GB/s") for reading in readings)
    for pipeline in first.plan.pipelines:
        # the embedding is with the first block, the head with the last
        assert [stage.num_layers for stage in pipeline.stages] == [5, 4, 2, 2, 4, 4, 4, 4, 2, 3]
        machines = [stage.device.partition("/")[0] for stage in pipeline.stages]
        assert machines == ["m0", "m0", "m1", "m1", "m2", "m2", "m3", "m3", "m4", "m5"]
    assert len(first.plan.device_names) == 40
    kinds = [[device.kind for device in layout.problem.cluster.devices] for layout in (first, second)]
    assert sorted(kinds[0]) == sorted(kinds[1]) and kinds[0] != kinds[1]


def test_zorse_shares_the_batch_as_its_example_does(examples):
    for layout in examples.zorse():
        shares = {
            (layout.problem.cluster.device(entry.stages[0].device).kind, entry.num_samples)
            for entry in layout.plan.pipelines
        }
        assert shares == {("L4", 36), ("P40", 2), ("A6000", 56), ("L4", 34)}


def test_data_parallel_groups_take_what_sailor_measured(examples):
    # without pipelines nothing depends on how messages are sent
    entry = next(plan for plan in examples.FACTS["sailor"]["plans"] if plan["name"] == "N4_D4")
    layout = examples.sailor(entry)
    prediction = predict(layout.plan, layout.problem.profile, layout.problem.cluster)
    assert prediction.step_s == pytest.approx(entry["measured_s"], rel=0.1)


def test_the_files_that_it_writes_are_read_by_the_commands(examples, tmp_path: Path, monkeypatch, capsys):
    layout = next(iter(examples.zorse()))
    examples.main.write(layout, tmp_path)
    monkeypatch.chdir(tmp_path)
    files = ["plan.json", "--profile", "profile.json", "--cluster", "cluster.toml"]
    assert cli.main(["simulate", *files, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    prediction = predict(layout.plan, layout.problem.profile, layout.problem.cluster)
    assert told["step_s"] == pytest.approx(prediction.step_s)
