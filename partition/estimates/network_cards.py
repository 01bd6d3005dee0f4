"""Seconds for which the network cards of nodes are busy: pipelines on one node share its card."""

from collections.abc import Sequence
from itertools import pairwise

from cost_model.cluster import Device
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.timed_pipeline import TimedPipeline


class CardLoad:
    """The load of network cards, cheap, for the search: a pipeline's clock knows no others on its nodes."""

    def __init__(self, costs: PipelineCosts) -> None:
        self._costs = costs
        self._messages: dict[object, tuple[float, float]] = {}

    def step_s(self, timed: Sequence[TimedPipeline], seconds: float) -> float:
        """Return a step of pipelines that take so long by their clocks, or until the busiest card is done."""
        batch = self._costs.problem.global_batch_size
        busy: dict[tuple[str, str], float] = {}
        for pipeline in timed:
            if len(pipeline.stages) == 1:
                continue
            count = pipeline.timing.most(seconds, batch) / pipeline.microbatch_size
            for left, right in pairwise(pipeline.stages):
                left_node, right_node = left.device.node, right.device.node
                if left_node == right_node or not count:
                    continue
                forward_s, backward_s = self._seconds(pipeline, left.device, right.device, right.start)
                for card, spent in (
                    ((left_node, "out"), forward_s),
                    ((right_node, "in"), forward_s),
                    ((right_node, "out"), backward_s),
                    ((left_node, "in"), backward_s),
                ):
                    busy[card] = busy.get(card, 0.0) + count * spent
        return max(seconds, max(busy.values(), default=0.0))

    def _seconds(
        self, pipeline: TimedPipeline, left: Device, right: Device, layer: int
    ) -> tuple[float, float]:
        key = (left.node, right.node, left.kind, right.kind, layer, pipeline.microbatch_size)
        if key not in self._messages:
            self._messages[key] = self._costs.message_s(left, right, layer, pipeline.microbatch_size)[:2]
        return self._messages[key]
