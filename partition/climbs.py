"""Searches that begin where a first local search ended."""

import math
import random
from collections.abc import Callable, Sequence

from partition.local_search import Found, Judge, LocalSearch
from partition.recut import Recutter
from partition.sample_shares import share_out
from partition.worker import Worker

CLIMBS, PATIENCE = 24, 6  # after random changes, and those without a gain in a row
KICKS = (2, 3, 5, 8)  # random changes between two climbs
WORSE = 1.02  # climbs go on from what is at most so much slower than the best
SIMULATED = 3  # sets that show whether it pays to climb with the simulator
SETTLED, CLIMBED = 5, 3  # sets that are simulated then, and from which such a climb begins
SETTLING = 2  # times as many tries there
MOST_SIMULATED = 400_000  # microbatches at stages; after them no new climb begins
HOPELESS = 2.0  # times the best judged: local search seldom makes up for that
QUEUES = 1.03  # simulated over estimated seconds, from which on that is worth it


def shaken(
    recutter: Recutter, best: Found, judge: Judge, tries: int, goes_on: Callable[[Found], bool]
) -> list[Found]:
    """What climbs after a few random changes find: the better ones, the best last.

    Iterated local search (Lourenco, Martin, Stuetzle, Handbook of Metaheuristics 2003). goes_on: whether
    there may be something better than the best so far.
    """
    rng = random.Random(0)
    found, now, failed = [best], best, 0
    for turn in range(CLIMBS):
        if failed == PATIENCE or not goes_on(found[-1]):
            break
        climber = LocalSearch(recutter, judge, tries, seed=turn + 1)
        step_s, workers = climber.improve(kicked(climber, rng, now.workers, now.step_s))
        failed += 1
        now = found[-1]
        if step_s <= WORSE * now.step_s:
            now = Found(step_s, tuple(workers), "shaken")
        if step_s < found[-1].step_s:
            found.append(now)
            failed = 0
    return found[1:]


def kicked(
    climber: LocalSearch, rng: random.Random, workers: Sequence[Worker], step_s: float
) -> list[Worker]:
    """The workers after a few random changes, better or worse, with which they can still do the batch."""
    base, batch = list(workers), climber.recutter.tables.problem.global_batch_size
    for _ in range(rng.choice(KICKS)):
        changed = climber.change(rng, base, step_s)
        if changed and math.isfinite(share_out(changed, batch)[0]):
            base = changed
    return base


def settled(
    recutter: Recutter, found: Sequence[Found], simulated: Judge, tries: int, *, always: bool = False
) -> list[Found]:
    """The best sets by the simulator, climbed on with it where it says more than the clocks of pipelines.

    Messages of pipelines that share network cards wait for each other, and gradient sync hides behind
    backwards, which no estimate knows. Empty where the estimates hold, unless it is to be done `always`.
    found: at least one, least estimates first.
    """
    first = list({entry.workers: entry for entry in reversed(found)}.values())[::-1]
    judged = [(simulated(entry.workers, 0.0), entry) for entry in first[:SIMULATED]]
    if not always and min(step_s for step_s, _ in judged) <= QUEUES * found[0].step_s:
        return []
    judged += [(simulated(entry.workers, 0.0), entry) for entry in first[SIMULATED:SETTLED]]
    judged.sort(key=lambda pair: pair[0])
    climbs, asked, batch = [], 0.0, recutter.tables.problem.global_batch_size

    def counted(workers: Sequence[Worker], seconds: float) -> float:
        nonlocal asked
        asked += sum(batch / len(workers) / worker.microbatch_size * len(worker.stages) for worker in workers)
        return simulated(workers, seconds)

    for step_s, entry in judged[:CLIMBED]:
        if step_s > HOPELESS * judged[0][0]:
            break
        climber = LocalSearch(recutter, simulated, SETTLING * tries, seed=1)
        step_s, workers = climber.improve(entry.workers)
        climbs.append(Found(step_s, tuple(workers), "settled"))
    best = min(climbs, key=lambda entry: entry.step_s)
    climbs += shaken(recutter, best, counted, tries, lambda _: asked < MOST_SIMULATED)
    return sorted(climbs, key=lambda entry: entry.step_s)
