"""What a run's events are answered, where several of a step ask for different things."""

from types import SimpleNamespace
from typing import Any

from hetpipe.runs.settings import Settings
from hetpipe.runtime.stopping import Stopping
from hetpipe.training.answered import Answered
from hetpipe.training.evaluated import Evaluated
from hetpipe.training.evaluation import Evaluation


def test_training_that_held_out_losses_end_does_not_go_on_under_a_new_plan():
    settings = Settings(steps=100, eval_data=("held.txt",), eval_every=1, patience=2)
    evaluation: Any = SimpleNamespace(evaluated=Evaluated(40, 2.0, best_step=38, best_loss=1.0, worse=2))
    (ending,) = Evaluation.ending(evaluation, settings)
    recovery: Any = SimpleNamespace(
        saw=lambda event: None, prediction=SimpleNamespace(plan=None), lost=frozenset(), room_bytes={}
    )
    moves: Any = SimpleNamespace(saw=lambda event, *others: event["event"] == "slow", pending="a plan")
    told: list[str] = []
    answered = Answered(lambda event: None, told.append, Stopping(), settings, recovery, moves)
    assert not answered({"event": "step", "step": 40})
    assert answered({"event": "slow"})
    assert not answered.over  # so the run goes on under another plan
    answered(ending)
    assert told == [ending["text"]]
    assert answered.over
    assert not answered.complete
    # where that step is done again, since a rank was lost, it is not over before
    assert not answered({"event": "step", "step": 39})
    assert not answered.over
