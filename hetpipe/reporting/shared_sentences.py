"""What becomes of a step where messages share network cards, in a sentence where that matters."""

from cost_model.cluster import is_emulated
from cost_model.units import format_seconds
from hetpipe.simulation.prediction import Prediction
from hetpipe.simulation.shared_network import shared_step_s

WORTH_SAYING = 0.03
"""How much longer a step has to be for it, as a share of the predicted one."""


def shared_sentences(prediction: Prediction, *, hosts: bool = True) -> list[str]:
    """Say how long a step takes where messages share network cards; [] where it is about as long.

    hosts: whether nodes are hosts; if not, links between emulated devices are emulated, by turns.
    """
    if not hosts and all(is_emulated(device.kind) for device in prediction.costs.devices):
        return []
    shared_s = shared_step_s(prediction.costs)
    if shared_s is None or shared_s <= (1 + WORTH_SAYING) * prediction.step_s:
        return []
    longer = shared_s / prediction.step_s - 1
    return [
        f"messages meet: where connections share network cards, as TCP's do, a step may take about "
        f"{format_seconds(shared_s)}, {longer:.0%} longer"
    ]
