"""What fills each device's memory under a plan: frozen weights, what is trained, activations."""

from dataclasses import asdict, dataclass

from rich.table import Table

from cost_model.cluster import Cluster
from cost_model.memory import held_bytes, trained_bytes
from cost_model.profile import ModelProfile
from hetpipe.reporting.tables import new_table, unit_of
from partition.estimates.plan_memory import plan_memory
from partition.plan import Plan


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The bytes of one device at its peak, by what they are for.

    frozen_bytes: weights that are not trained. trained_bytes: those that are, such as adapters, with their
    lowered copies. state_bytes: their gradients and optimizer states. activation_bytes: what microbatches in
    flight keep, messages included. driver_bytes: contexts and communicators. usable_bytes: what all of it may
    fill, the memory less the reserve.
    """

    frozen_bytes: float
    trained_bytes: float
    state_bytes: float
    activation_bytes: float
    workspace_bytes: float
    usable_bytes: float
    driver_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        """Return the sum of what is needed."""
        return (
            self.frozen_bytes
            + self.trained_bytes
            + self.state_bytes
            + self.activation_bytes
            + self.workspace_bytes
            + self.driver_bytes
        )


def memory_uses(plan: Plan, profile: ModelProfile, cluster: Cluster) -> dict[str, MemoryUse]:
    """Return what fills each device of a plan."""
    found = {}
    for name in plan.device_names:
        device, layers = cluster.device(name), set(plan.layers_of(name))
        held = profile.on(device.kind)
        memory = plan_memory(plan, held, name)
        lowered = sum(held.layers[layer].lowered_bytes for layer in layers)
        trained = trained_bytes(profile, layers) + lowered
        if (
            plan.sharding.by_layer
        ):  # owners alone keep what is trained; what is frozen is whole on each device
            trained = memory.parameter_bytes - (held_bytes(held, layers) - trained)
        found[name] = MemoryUse(
            frozen_bytes=memory.parameter_bytes - trained,
            trained_bytes=trained,
            state_bytes=memory.gradient_bytes + memory.optimizer_bytes,
            activation_bytes=memory.saved_bytes + memory.boundary_bytes,
            workspace_bytes=memory.workspace_bytes,
            usable_bytes=device.usable_bytes + device.driver_bytes,
            driver_bytes=device.driver_bytes,
        )
    return found


def mostly_frozen(profile: ModelProfile) -> bool:
    """Return whether more bytes of weights are frozen than trained, as with adapters."""
    total = sum(layer.parameter_bytes for layer in profile.layers)
    return 2 * sum(layer.unreached_bytes for layer in profile.layers) > total


def memory_table(plan: Plan, profile: ModelProfile, cluster: Cluster) -> Table:
    """Show what fills each device, in one unit, beside what a plan may fill."""
    uses = memory_uses(plan, profile, cluster)
    unit, size = unit_of(max(use.total_bytes for use in uses.values()))
    table = new_table(f"memory, {unit}")
    has_driver = any(use.driver_bytes for use in uses.values())
    titles = ("frozen", "trained", "states", "saved", "workspace", *["driver"] * has_driver, "sum", "of")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for name, use in uses.items():
        values = (
            use.frozen_bytes, use.trained_bytes, use.state_bytes, use.activation_bytes,
            use.workspace_bytes, *[use.driver_bytes] * has_driver, use.total_bytes, use.usable_bytes,
        )  # fmt: skip
        table.add_row(name, *(f"{value / size:,.2f}" for value in values))
    return table


def memory_json(plan: Plan, profile: ModelProfile, cluster: Cluster) -> dict[str, dict[str, float]]:
    """Return the same as JSON data, in bytes."""
    uses = memory_uses(plan, profile, cluster)
    return {name: {**asdict(use), "total_bytes": use.total_bytes} for name, use in uses.items()}
