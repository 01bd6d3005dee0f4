"""Proves of a program that goes layer by layer: gradients are summed once, weights there when used."""

from collections import Counter
from itertools import pairwise

from cost_model.errors import InputError
from hetpipe.program.instructions import Compute, Gather, Pass, Program, Reduce
from hetpipe.program.layer_rounds import buckets_by_layer, is_fetched, is_summed_once


def verify_rounds(program: Program) -> None:
    """Check that the rounds of a program do what its plan says, and that it has none where it shards nothing.

    Raises: InputError naming the rank and the instruction.
    """
    numbers: dict[tuple[type, int], dict[int, list[int]]] = {}
    for rank, instructions in enumerate(program.ranks):
        for entry in instructions:
            if isinstance(entry, Reduce | Gather):
                if not 0 <= entry.bucket < len(program.buckets):
                    raise InputError(f"rank {rank} has {entry}, and there are {len(program.buckets)} buckets")
                numbers.setdefault((type(entry), entry.bucket), {}).setdefault(rank, []).append(entry.round)
    for kind in (Reduce, Gather):
        for index, bucket in enumerate(program.buckets):
            found = numbers.get((kind, index), {})
            if set(found) != _expected(program, kind, index):
                raise InputError(
                    f"bucket {index} of ranks {list(bucket.ranks)} has a {kind.__name__.upper()} on ranks "
                    f"{sorted(found)} under zero {program.plan.zero}; lower the plan again"
                )
            together = kind is Reduce or not program.plan.fetches_apart
            counts = {len(rounds) for rounds in found.values()}
            if (together and len(counts) > 1) or any(r != list(range(len(r))) for r in found.values()):
                raise InputError(
                    f"bucket {index} has rounds {found} of {kind.__name__.upper()} by rank; each rank must "
                    "have the same, in order; lower the plan again"
                )
    if program.plan.sharding.by_layer:
        for rank in range(len(program.ranks)):
            _verify_rank(program, rank)


def _expected(program: Program, kind: type[Reduce] | type[Gather], bucket: int) -> set[int]:
    """Return the ranks that have rounds of a kind of a bucket."""
    ranks = program.buckets[bucket].ranks if program.plan.sharding.by_layer else ()
    return {rank for rank in ranks if kind is Reduce or is_fetched(program, bucket, rank)}


def _verify_rank(program: Program, rank: int) -> None:
    of_layer = buckets_by_layer(program, rank)
    added: Counter[int] = Counter()  # backwards of each bucket that no REDUCE has taken yet
    last: dict[int, Compute] = {}  # the same, the last of them
    live: dict[int, bool] = {}  # fetched buckets, and whether they were used
    together = program.plan.breadth_first
    computations = [entry for entry in program.ranks[rank] if isinstance(entry, Compute)]
    following = dict(pairwise(computations))
    before: Compute | None = None
    for entry in program.ranks[rank]:
        if isinstance(entry, Gather):
            live[entry.bucket] = False
        elif isinstance(entry, Reduce):
            added[entry.bucket] = 0
            last.pop(entry.bucket, None)
        elif isinstance(entry, Compute):
            if entry.layer is None:
                raise InputError(f"rank {rank} has {entry} of a whole stage, under zero {program.plan.zero}")
            used = of_layer[entry.layer]
            fetched = [bucket for bucket in used if is_fetched(program, bucket, rank)]
            if missing := [bucket for bucket in fetched if bucket not in live]:
                raise InputError(f"rank {rank} has {entry} before the GATHER of bucket {missing[0]}")
            live.update(dict.fromkeys(fetched, True))
            if entry.op is Pass.BACKWARD:
                same = before is not None and (before.op, before.layer) == (entry.op, entry.layer)
                if not (together and same):
                    added.update(bucket for bucket in used if not is_summed_once(program, bucket))
                last.update(dict.fromkeys(used, entry))
            if early := [bucket for bucket, count in added.items() if count > 1]:
                raise InputError(
                    f"rank {rank} has {entry} before the REDUCE of bucket {early[0]}, which it adds to again"
                )
            before = entry
            upcoming = following.get(entry)
            kept = of_layer[upcoming.layer] if upcoming is not None and upcoming.layer is not None else []
            live = {bucket: was for bucket, was in live.items() if not was or bucket in kept}
    for bucket, backward in last.items():
        raise InputError(f"rank {rank} has no REDUCE of bucket {bucket} after {backward}, which adds to it")
