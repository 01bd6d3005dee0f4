"""The order of forwards and backwards at one stage, and on a device that takes several in turn."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from hetpipe.program.instructions import Pass


def one_f_one_b(
    microbatches: Iterable[int], in_flight: int, *, backward: bool = True
) -> Iterator[tuple[Pass, int]]:
    """Yield the passes of 1F1B with any number in flight.

    PipeDream-Flush (Narayanan et al., ICML 2021, section 2.2); GPipe (Huang et al., NeurIPS 2019) is
    in_flight = the number of microbatches.

        warmup | steady       | cooldown
        F0 F1  | F2 B0 F3 B1  | B2 B3      in_flight = 3: two forwards, then one each way

    >>> " ".join(f"{op}{m}" for op, m in one_f_one_b(range(4), in_flight=2))
    'F0 F1 B0 F2 B1 F3 B2 B3'

    backward: False for a stage that has none, and so goes on with its forwards.
    """
    if not backward:
        yield from ((Pass.FORWARD, microbatch) for microbatch in microbatches)
        return
    waiting: list[int] = []
    for microbatch in microbatches:
        if len(waiting) == in_flight:
            yield Pass.BACKWARD, waiting.pop(0)
        yield Pass.FORWARD, microbatch
        waiting.append(microbatch)
    for microbatch in waiting:
        yield Pass.BACKWARD, microbatch


def breadth_first(microbatches: Sequence[int], in_flight: int) -> Iterator[tuple[Pass, int]]:
    """Yield the passes of microbatches in groups of in_flight, forwards and then backwards of each group.

    Within a group each layer takes all microbatches before the next layer does, so that its weights are
    fetched, and its gradients summed, once for all of them (Lamy-Poirier, Breadth-First Pipeline Parallelism,
    MLSys 2023, section 4; Cephalo computes so, too).

    >>> " ".join(f"{op}{m}" for op, m in breadth_first(range(3), in_flight=2))
    'F0 F1 B0 B1 F2 B2'
    """
    for start in range(0, len(microbatches), in_flight):
        group = microbatches[start : start + in_flight]
        for op in Pass:
            yield from ((op, microbatch) for microbatch in group)


def interleaved_one_f_one_b(
    place: int, num_devices: int, num_chunks: int, num_microbatches: int
) -> Iterator[tuple[Pass, int, int]]:
    """Yield (pass, chunk, microbatch) on one device of interleaved 1F1B.

    Narayanan et al., SC 2021, section 2.2.

    Chunk c of the device at `place` is stage c * num_devices + place. Microbatches go through in groups, each
    through one chunk after the other; a device forwards 2 more chunks ahead than the one after it. Any number
    of microbatches: groups are as equal as can be, and none is smaller than num_devices
    (unless there are fewer microbatches), with which no two devices wait for each other. Where all groups
    are equal this is the order of Megatron-LM and of torch's ScheduleInterleaved1F1B.

    >>> " ".join(f"{op}{chunk}.{m}" for op, chunk, m in interleaved_one_f_one_b(1, 2, 2, 2))
    'F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 B0.0 B0.1'
    """
    rounds = max(1, num_microbatches // num_devices)
    starts = [-(-num_microbatches * index // rounds) for index in range(rounds + 1)]
    groups = [range(*pair) for pair in pairwise(starts)]
    chunks = range(num_chunks)
    forwards = [(chunk, m) for group in groups for chunk in chunks for m in group]
    backwards = [(chunk, m) for group in groups for chunk in reversed(chunks) for m in group]
    largest = max(map(len, groups))
    warmup = min(len(forwards), (num_chunks - 1) * largest + 2 * (num_devices - 1 - place))
    yield from ((Pass.FORWARD, *forward) for forward in forwards[:warmup])
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        yield Pass.FORWARD, *forward
        yield Pass.BACKWARD, *backward
    yield from ((Pass.BACKWARD, *backward) for backward in backwards[len(forwards) - warmup :])
