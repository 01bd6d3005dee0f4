"""Plans in which stages share devices, by hand and at random. Shared by tests."""

from dataclasses import replace

from hypothesis import strategies as st

from cost_model.cluster import Cluster, Link
from cost_model.layer_profile import LayerTimes
from cost_model.profile import ModelProfile
from partition.plan import Pipeline, Plan, Stage
from small_case import INSTANT, equal_stages


def layers_of(*seconds: float, link: Link = INSTANT) -> tuple[ModelProfile, Cluster]:
    """Layers without bytes that take so many seconds, forward to backward 1:2; four equal devices n/0 ..."""
    profile, _ = equal_stages(len(seconds))
    times = tuple(LayerTimes((entry / 3,), (entry * 2 / 3,)) for entry in seconds)
    kinds = {"one": replace(profile.kinds["one"], layers=times)}
    return replace(profile, kinds=kinds), equal_stages(4, link=link)[1]


def pipeline(num_samples: int, *stages: tuple[int, int, int, int]) -> Pipeline:
    """Microbatches of 1 through stages (device, start, stop, in_flight)."""
    entries = (Stage((f"n/{device}",), (start, stop), flight) for device, start, stop, flight in stages)
    return Pipeline(1, num_samples, tuple(entries))


def plan_of(*pipelines: Pipeline) -> Plan:
    return Plan("manual", "made-up", sum(entry.num_samples for entry in pipelines), pipelines)


@st.composite
def shared_plans(draw: st.DrawFn, num_layers: int = 5) -> Plan:
    pipelines = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(1, num_layers - 1), max_size=num_layers - 1)))
        edges = [0, *cuts, num_layers]
        count = len(edges) - 1
        flights = sorted(draw(st.lists(st.integers(1, 5), min_size=count, max_size=count)), reverse=True)
        devices = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
        stages = [
            (device, edges[index], edges[index + 1], flights[index]) for index, device in enumerate(devices)
        ]
        pipelines.append(pipeline(draw(st.integers(1, 6)), *stages))
    return plan_of(*pipelines)
