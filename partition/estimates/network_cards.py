"""How long the network cards of the nodes are busy: pipelines on one node share its card."""

from collections.abc import Sequence
from itertools import pairwise

from cost_model.cluster import Device
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.timed_pipeline import TimedPipeline


class CardLoad:
    """Cheap, for the search: the clock of a pipeline knows nothing of the others on its nodes."""

    def __init__(self, costs: PipelineCosts) -> None:
        self._costs = costs
        self._hops: dict[object, tuple[float, float]] = {}

    def step_s(self, timed: Sequence[TimedPipeline], seconds: float) -> float:
        """Return a step of pipelines that take so long by their clocks, or until the busiest card is done."""
        batch = self._costs.problem.global_batch_size
        busy: dict[tuple[str, str], float] = {}
        for pipeline in timed:
            if len(pipeline.stages) == 1:
                continue
            count = pipeline.timing.most(seconds, batch) / pipeline.microbatch_size
            for left, right in pairwise(pipeline.stages):
                here, there = left.device, right.device
                if here.node == there.node or not count:
                    continue
                out, home = self._seconds(pipeline, left.device, right.device, right.start)
                for card, spent in (
                    ((here.node, "out"), out),
                    ((there.node, "in"), out),
                    ((there.node, "out"), home),
                    ((here.node, "in"), home),
                ):
                    busy[card] = busy.get(card, 0.0) + count * spent
        return max(seconds, max(busy.values(), default=0.0))

    def _seconds(
        self, pipeline: TimedPipeline, here: Device, there: Device, layer: int
    ) -> tuple[float, float]:
        key = (here.node, there.node, here.kind, there.kind, layer, pipeline.microbatch_size)
        if key not in self._hops:
            self._hops[key] = self._costs.message_s(here, there, layer, pipeline.microbatch_size)[:2]
        return self._hops[key]
