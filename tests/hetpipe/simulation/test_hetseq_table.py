"""The benchmark that predicts HetSeq's table."""

import pytest

from places import EXAMPLES, load_benchmark


def test_the_figures_of_the_readme_come_out(capsys: pytest.CaptureFixture[str]):
    module = load_benchmark("hetseq/main.py")
    module.main()
    printed = capsys.readouterr().out.splitlines()
    readme = (EXAMPLES / "benchmarks" / "hetseq" / "README.md").read_text().splitlines()
    assert [line for line in printed if line and line not in readme] == []
    assert sum(line.startswith("| ") for line in printed) == 5


def test_a_fit_finds_rising_and_falling_values():
    module = load_benchmark("hetseq/main.py")
    assert module.fitted(lambda x: x**2, 9.0, 1.0, 10.0) == pytest.approx(3.0)
    assert module.fitted(lambda x: 1 / x, 0.5, 0.1, 10.0, falls=True) == pytest.approx(2.0)
