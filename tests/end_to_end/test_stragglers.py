"""The benchmark of what --adapt gives back when a device is slow: its figures, and the whole in short."""

import pytest

from places import load_benchmark


def test_the_share_is_of_what_the_best_plan_promises():
    row = load_benchmark("stragglers/main.py").Row(16, 0.1, 0.2, 0.15, 0.14, 7.0)
    assert row.share == pytest.approx(5 / 6)
    assert row.cells == ["16", "100.0 ms", "200.0 ms", "150.0 ms", "140.0 ms", "83%", "7.0 s"]


def test_a_change_is_the_longest_wait_between_two_steps():
    benchmark = load_benchmark("stragglers/main.py")
    told_s = {step: step * 0.2 + (9.0 if step > 57 else 0.0) for step in range(1, 100)}
    run = benchmark.Run(dict.fromkeys(told_s, 0.2), told_s, (57,), "")
    assert benchmark._changed_after(run) == 57
    assert benchmark._seconds_of_change(run, 57) == pytest.approx(9.0)


@pytest.mark.exhaustive
def test_the_whole_in_short(capsys):
    main = load_benchmark("stragglers/main.py").main
    assert main(["--repeats", "1", "--speed", "0.2"]) in (0, 1)  # others may use the machine
    assert "regained" in capsys.readouterr().out
