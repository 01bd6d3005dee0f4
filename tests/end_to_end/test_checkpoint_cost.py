"""The benchmark of what checkpoints cost: its figures, and the whole in short."""

import pytest

from places import load_benchmark


def test_a_cost_is_what_steps_beside_a_checkpoint_took_longer():
    watched = load_benchmark("checkpoint_cost/main.py").Watched()
    for step in range(1, 26):
        longer = {1: 9.0, 11: 1.5, 12: 0.25, 13: 0.25}.get(step, 0.0)  # the first one makes memory
        watched({"event": "step", "step": step, "wall_s": 2.0 + longer})
        if step == 12:
            watched({"event": "checkpoint", "step": 10, "in_background": True})
    (found,) = watched.shares(10)
    assert (found.step, found.usual_s, found.cost_s, found.num_beside) == (10, 2.0, 2.0, 3)
    assert found.share == pytest.approx(0.1)


def test_a_checkpoint_for_which_training_waits_is_no_figure():
    watched = load_benchmark("checkpoint_cost/main.py").Watched({1: 1.0})
    with pytest.raises(SystemExit, match="training waited"):
        watched({"event": "checkpoint", "step": 1, "in_background": False})


@pytest.mark.exhaustive
def test_the_whole_in_short(capsys):
    main = load_benchmark("checkpoint_cost/main.py").main
    assert main(["--model", "bert-tiny", "--every", "20"]) in (0, 1)  # its steps are too short for a figure
    out = capsys.readouterr().out
    assert "\n| 20 | " in out and "\n| 40 | " in out and "restored and training after" in out
