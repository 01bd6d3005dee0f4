"""The makespan of one pipeline under 1F1B, on devices and links that it has for itself.

The same rules as the simulator's, for the search: a plan's time that a user sees comes from the simulator.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of one microbatch: forward and backward per stage, and on each link between stages there and back.

    link_s is (there, back, latency there, latency back); a message occupies its direction without latency.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    link_s: tuple[tuple[float, float, float, float], ...]


def one_f_one_b_s(
    full: Seconds, in_flight: Sequence[int], num_microbatches: int, last: Seconds | None = None
) -> float:
    """Seconds from the first forward to the last backward; `last` are those of a smaller last microbatch.

    Each stage's list is that of `hetpipe.schedules.one_f_one_b`; in_flight must not rise along the pipeline.
    """
    last = last or full
    final, num_stages = num_microbatches - 1, len(in_flight)
    if num_stages == 1:
        busy = full.forward_s[0] + full.backward_s[0]
        return final * busy + last.forward_s[0] + last.backward_s[0]
    forward_ready = [[0.0 if not stage else math.inf] * num_microbatches for stage in range(num_stages)]
    backward_ready = [[math.inf] * num_microbatches for _ in range(num_stages)]
    clock = [0.0] * num_stages
    link_there, link_back = [0.0] * num_stages, [0.0] * num_stages
    forwards, backwards = [0] * num_stages, [0] * num_stages
    flights = [min(flight, num_microbatches) for flight in in_flight]
    left = 2 * num_microbatches * num_stages
    while left:
        for stage in range(num_stages):
            now, done, undone = clock[stage], forwards[stage], backwards[stage]
            has_next, has_previous = stage + 1 < num_stages, stage > 0
            while True:
                if done < num_microbatches and done - undone < flights[stage]:
                    arrived = forward_ready[stage][done]
                    if arrived == math.inf:
                        break
                    seconds = last if done == final else full
                    now = (arrived if arrived > now else now) + seconds.forward_s[stage]
                    if has_next:
                        there, _, latency, _ = seconds.link_s[stage]
                        free = link_there[stage]
                        free = (now if now > free else free) + there
                        link_there[stage] = free
                        forward_ready[stage + 1][done] = free + latency
                    else:
                        backward_ready[stage][done] = now
                    done += 1
                elif undone < num_microbatches:
                    arrived = backward_ready[stage][undone]
                    if arrived == math.inf:
                        break
                    seconds = last if undone == final else full
                    now = (arrived if arrived > now else now) + seconds.backward_s[stage]
                    if has_previous:
                        _, back, _, latency = seconds.link_s[stage - 1]
                        free = link_back[stage]
                        free = (now if now > free else free) + back
                        link_back[stage] = free
                        backward_ready[stage - 1][undone] = free + latency
                    undone += 1
                else:
                    break
            left -= done - forwards[stage] + undone - backwards[stage]
            clock[stage], forwards[stage], backwards[stage] = now, done, undone
    return max(clock)
