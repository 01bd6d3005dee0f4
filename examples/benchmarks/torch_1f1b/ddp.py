"""Is a replica on each rank as fast as under torch's DistributedDataParallel? See README.md."""

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from encoder import Encoder
from pairs import ratio_cells
from replicas import REPLICAS, Case, cluster_of, compare_rank, profile_of, program_of

from hetpipe.profiling.profile_cache import processor_name
from hetpipe.runtime.processes import RankGroup, run_ranks


def main() -> None:
    options = _options()
    lines = [
        "| ranks | buckets | ours s, median [min, max] | torch s, median [min, max] "
        "| ours / torch of n pairs: median | its 95 % interval | largest difference of a gradient |",
        "|---" * 7 + "|",
    ]
    for num_ranks in options.ranks:
        case = Case(
            num_ranks,
            options.microbatches,
            options.microbatch_size,
            Encoder(options.blocks, options.width, options.length),
            options.bucket_mib * 2**20,
        )
        lines.append(_row(case, _run(case, options.pairs)))
        print(lines[-1], file=sys.stderr, flush=True)
    print("\n".join(lines))
    print(
        f"\n{os.cpu_count()} cores ({processor_name()}); Python {platform.python_version()}, "
        f"torch {version('torch')}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--pairs", type=int, default=100, help="of steps, one of each")
    parser.add_argument("--microbatches", type=int, default=2, help="of each rank")
    parser.add_argument("--microbatch-size", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--bucket-mib", type=float, default=25.0, help="of both")
    return parser.parse_args()


def _run(case: Case, num_pairs: int) -> list[dict[str, Any]]:
    """Return what the ranks emit; a thread each."""
    events: list[dict[str, Any]] = []
    names = tuple(f"here/{rank}" for rank in range(case.num_ranks))
    run_ranks(compare_rank, (case, num_pairs), RankGroup(names, (1,) * len(names)), events.append)
    return events


def _row(case: Case, events: Sequence[dict[str, Any]]) -> str:
    first, *pairs = events
    chain = case.model.chain()
    program = program_of(case, chain, profile_of(chain), cluster_of(case.num_ranks))
    seconds = {name: [pair[name][0] for pair in pairs] for name in REPLICAS}
    return (
        f"| {case.num_ranks} | {len(program.buckets)} | {ratio_cells(seconds)} "
        f"| {first['gradient_difference']:.1e} |"
    )


if __name__ == "__main__":
    main()
