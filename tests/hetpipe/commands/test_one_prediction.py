"""How often a verb and its ranks lower, verify and simulate: once, the planner's evaluations apart."""

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import rank_calls
from cost_model.profile import profile_text
from hetpipe import cli
from hetpipe.program import lowering, verification
from hetpipe.simulation import prediction, shared_choice, simulator
from hetpipe.training import run
from partition.plan_file import plan_text, read_plan
from runs import CPU_CLUSTER, chain_plan, made_up_profile
from shell import Shell

FILES = "--profile profile.json --cluster cluster.toml"
ONCE = {"lower_as": 1, "simulate": 1}
VERIFIED_ONCE = {**ONCE, "verify": 1}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often this process calls the functions, the planner's evaluations apart."""
    found: Counter[str] = Counter()
    evaluating: list[bool] = []

    def not_counted(evaluate: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            evaluating.append(True)
            try:
                return evaluate(*arguments, **named)
            finally:
                evaluating.pop()

        return call

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            found[function.__name__] += not evaluating
            return function(*arguments)

        return call

    for verb in cli.VERBS.values():
        verb.load()  # before the functions are replaced, wherever they are imported
    monkeypatch.setattr(prediction, "_running", not_counted(prediction._running))
    choice = shared_choice._LeastShared
    monkeypatch.setattr(choice, "__call__", not_counted(choice.__call__))
    for function in (lowering.lower_as, simulator.simulate, verification.verify):
        one = counted(function)
        for name, module in list(sys.modules.items()):
            if name.startswith("hetpipe") and vars(module).get(function.__name__) is function:
                monkeypatch.setattr(module, function.__name__, one)
    return found


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"simulate plan.json {FILES}", ONCE),
        (f"simulate plan.json {FILES} --json --trace trace.json", ONCE),
        (f"plan {FILES} --json", ONCE),
        (f"plan {FILES} --program", VERIFIED_ONCE),
        (f"explain plan.json {FILES}", VERIFIED_ONCE),
    ],
)
def test_a_verb_predicts_once(hetpipe: Shell, calls: Counter[str], line: str, expected: dict[str, int]):
    assert hetpipe(line).code == 0
    assert calls == expected


@pytest.mark.slow
def test_a_run_predicts_once_and_keeps_the_prediction(
    hetpipe: Shell, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run, "registered_task", rank_calls.counted_task)
    hetpipe.write("cluster.toml", CPU_CLUSTER)
    hetpipe.write("profile.json", profile_text(made_up_profile("bert-tiny")))
    hetpipe.write("plan.json", plan_text(chain_plan("bert-tiny", [0, 4, 8], 4)))
    line = f"run --model bert-tiny --plan plan.json {FILES} --steps 1 --no-save --run-folder run --json"
    result = hetpipe(line)
    assert result.code == 0, result.err
    assert calls == VERIFIED_ONCE
    assert rank_calls.read(hetpipe.folder / "run") == [[], []]  # none in the ranks
    data = read_plan(hetpipe.folder / "run" / "plan.json")
    assert data.pipelines == read_plan(hetpipe.folder / "plan.json").pipelines
    simulated = hetpipe(f"simulate plan.json {FILES} --json").json
    assert result.json["predicted_step_s"] == simulated["step_s"]
