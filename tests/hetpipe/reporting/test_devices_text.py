from cost_model.cluster import Cluster, Device, Link, Node
from hetpipe.reporting.expense_tables import devices_text


def cluster_of(*kinds: tuple[str, float]) -> Cluster:
    devices = tuple(
        Device(f"a/{number}", "a", kind, 1e9, speed=speed) for number, (kind, speed) in enumerate(kinds)
    )
    return Cluster("one", Link(latency_s=0.0, bandwidth_bytes_per_s=1e9), (Node("a", devices),))


def test_the_speed_is_named_where_a_kind_has_several():
    cluster = cluster_of(("emulated", 1.0), ("emulated", 0.5), ("emulated", 0.5), ("T4", 0.9))
    assert devices_text(["a/0", "a/1"], cluster) == "1 emulated, 1 emulated x 0.5"
    assert devices_text(["a/1", "a/2", "a/3"], cluster) == "2 emulated x 0.5, 1 T4"


def test_the_speed_that_all_of_a_kind_have_is_left():
    assert devices_text(["a/0", "a/1"], cluster_of(("emulated", 0.5), ("emulated", 0.5))) == "2 emulated"
