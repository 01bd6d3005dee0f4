"""Seconds for which the network cards of nodes are busy: pipelines on one node share its card."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from cost_model.cluster import Device
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.timed_pipeline import TimedPipeline

FEW_HOPS = 2
"""Of pipelines over the card of a node, up to which messages take turns."""


def queued_s(between: Mapping[tuple[str, str], float], several: bool) -> float:
    """Return the seconds until the cards of nodes have carried some messages.

    A message holds the sender's and the receiver's card at once, and also while it waits for one of the two.
    So where several messages are on their way the busiest card is idle at times: half of the time that the
    others of a message's cards are busy with other messages, as measured. between: seconds of the messages
    from a node to another.
    """
    out: dict[str, float] = {}
    into: dict[str, float] = {}
    for (one, other), seconds in between.items():
        out[one] = out.get(one, 0.0) + seconds
        into[other] = into.get(other, 0.0) + seconds
    load_s = max([*out.values(), *into.values()], default=0.0)
    if not several or not load_s:
        return load_s
    both_s = max(out[one] + into[other] - seconds for (one, other), seconds in between.items())
    return max(load_s, (load_s + both_s) / 2)


class CardLoad:
    """The load of network cards, cheap, for the search: a pipeline's clock knows no others on its nodes."""

    def __init__(self, costs: PipelineCosts) -> None:
        self._costs = costs
        self._messages: dict[object, tuple[float, float]] = {}

    def step_s(self, timed: Sequence[TimedPipeline], seconds: float) -> float:
        """Return a step of pipelines that take so long by their clocks, or until the busiest card is done."""
        batch = self._costs.problem.global_batch_size
        between: dict[tuple[str, str], float] = {}  # by nodes, from the one to the other
        hops: dict[str, int] = {}  # by node, of pipelines over its card
        for pipeline in timed:
            if len(pipeline.stages) == 1:
                continue
            count = pipeline.timing.most(seconds, batch) / pipeline.microbatch_size
            for left, right in pairwise(pipeline.stages):
                here, there = left.device.node, right.device.node
                if here == there or not count:
                    continue
                forward_s, backward_s = self._seconds(pipeline, left.device, right.device, right.start)
                between[here, there] = between.get((here, there), 0.0) + count * forward_s
                between[there, here] = between.get((there, here), 0.0) + count * backward_s
                hops[here], hops[there] = hops.get(here, 0) + 1, hops.get(there, 0) + 1
        return max(seconds, queued_s(between, max(hops.values(), default=0) > FEW_HOPS))

    def _seconds(
        self, pipeline: TimedPipeline, left: Device, right: Device, layer: int
    ) -> tuple[float, float]:
        key = (left.node, right.node, left.kind, right.kind, layer, pipeline.microbatch_size)
        if key not in self._messages:
            self._messages[key] = self._costs.message_s(left, right, layer, pipeline.microbatch_size)[:2]
        return self._messages[key]
