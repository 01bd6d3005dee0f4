"""The order of forwards and backwards at one stage."""

from collections.abc import Iterable, Iterator

from hetpipe.instructions import Pass


def one_f_one_b(microbatches: Iterable[int], in_flight: int) -> Iterator[tuple[Pass, int]]:
    """1F1B (PipeDream-Flush; Narayanan et al., ICML 2021, section 2.2) with any number in flight.

    GPipe (Huang et al., NeurIPS 2019) is in_flight = the number of microbatches.

        warmup | steady       | cooldown
        F0 F1  | F2 B0 F3 B1  | B2 B3      in_flight = 3: two forwards, then one each way

    >>> " ".join(f"{op}{m}" for op, m in one_f_one_b(range(4), in_flight=2))
    'F0 F1 B0 F2 B1 F3 B2 B3'
    """
    waiting: list[int] = []
    for microbatch in microbatches:
        if len(waiting) == in_flight:
            yield Pass.BACKWARD, waiting.pop(0)
        yield Pass.FORWARD, microbatch
        waiting.append(microbatch)
    for microbatch in waiting:
        yield Pass.BACKWARD, microbatch
