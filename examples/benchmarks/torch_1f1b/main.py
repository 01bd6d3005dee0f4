"""Is our executor as fast as torch's Schedule1F1B where torch's can run? See README.md."""

import argparse
import os
import platform
import pstats
import statistics
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from encoder import Encoder
from pairs import ratio_cells, spread
from runtimes import ALONE, RUNTIMES, Case, compare_rank, memory_rank, profile_rank

from hetpipe.profiling.profile_cache import processor_name
from hetpipe.runtime.processes import RankGroup, run_ranks

MIB = 2**20


def main() -> None:
    options = _options()
    if options.profile:
        _profile(options)
        return
    cases = [_case(count, options) for count in options.ranks]
    nothing = [without_blocks(count) for count in options.ranks]
    pairs = {case: _run(compare_rank, case, options.pairs) for case in (*cases, *nothing)}
    memory = {(case, name): _run(memory_rank, case, name)[0] for case in cases for name in RUNTIMES}
    print(_speed_table(cases, pairs))
    print(_memory_table(cases, memory))
    print(_instruction_table(nothing, pairs))
    print(
        f"{os.cpu_count()} cores ({processor_name()}); Python {platform.python_version()}, "
        f"torch {version('torch')}, NumPy {version('numpy')}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--pairs", type=int, default=40, help="of steps, one of each runtime")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--microbatch-size", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--profile", action="store_true", help="cProfile of our executor, nothing else")
    return parser.parse_args()


def _case(num_stages: int, options: argparse.Namespace) -> Case:
    model = Encoder(options.blocks, options.width, options.length)
    return Case(num_stages, options.microbatches, options.microbatch_size, model)


def without_blocks(num_stages: int) -> Case:
    return Case(num_stages, 32, 1, Encoder(None, linears=num_stages))


def _run(main_of_rank: Any, case: Case, *arguments: Any) -> list[dict[str, Any]]:
    """What the ranks emit; a thread each."""
    events: list[dict[str, Any]] = []
    names = tuple(f"here/{rank}" for rank in range(case.num_stages))
    run_ranks(main_of_rank, (case, *arguments), RankGroup(names, (1,) * len(names)), events.append)
    print(f"{main_of_rank.__name__} {case.num_stages} {arguments}", file=sys.stderr)
    return events


def _speed_table(cases: Sequence[Case], events: dict[Case, list[dict[str, Any]]]) -> str:
    lines = [
        "| ranks | ours s, median [min, max] | torch s, median [min, max] | ours / torch of n pairs: median "
        "| its 95 % interval | CPU s, ours | torch | largest difference of a gradient |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        first, *pairs = events[case]
        seconds = {name: [pair[name][0] for pair in pairs] for name in RUNTIMES}
        cpu = {name: statistics.median(pair[name][1] for pair in pairs) for name in RUNTIMES}
        lines.append(
            f"| {case.num_stages} | {ratio_cells(seconds)} "
            f"| {cpu['ours']:.3f} | {cpu['torch']:.3f} | {first['gradient_difference']:.1e} |"
        )
    return "\n".join(lines) + "\n"


def _memory_table(cases: Sequence[Case], memory: dict[tuple[Case, str], dict[str, Any]]) -> str:
    lines = [
        "| ranks | rank | tensors MiB, ours | torch | resident MiB, ours | torch |",
        "|---|---|---|---|---|---|",
    ]
    for case in cases:
        for rank in range(case.num_stages):
            cells = [
                f"{memory[case, name][which][rank] / MIB:.1f}"
                for which in ("tensors", "resident")
                for name in RUNTIMES
            ]
            lines.append(f"| {case.num_stages} | {rank} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _instruction_table(cases: Sequence[Case], events: dict[Case, list[dict[str, Any]]]) -> str:
    lines = [
        "| ranks | instructions | CPU us per instruction, ours: median [min, max] | torch "
        "| forwards and backwards alone | overhead, ours | torch |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        first, *pairs = events[case]
        used = {
            name: [1e6 * pair[name][1] / first["instructions"] for pair in pairs]
            for name in (*RUNTIMES, ALONE)
        }
        over = [
            [all_of_it - alone for all_of_it, alone in zip(used[name], used[ALONE], strict=True)]
            for name in RUNTIMES
        ]
        cells = [spread(values, 1) for values in (*used.values(), *over)]
        lines.append(f"| {case.num_stages} | {first['instructions']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _profile(options: argparse.Namespace) -> None:
    """The functions of our executor that use most time where the model computes next to nothing."""
    path = Path("torch-1f1b.prof")
    _run(profile_rank, without_blocks(options.ranks[0]), 50, str(path))
    pstats.Stats(str(path)).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
