"""What devices take while a plan uses them: money and electric power, as the cluster file has them."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from cost_model.cluster import Cluster

S_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Expenses:
    """Money an hour and watts of some devices together; None where those of a device are not known.

    All devices count for the whole time, busy or waiting: who rents one pays for both, and the watts of a
    cluster file are one number.
    """

    per_hour: float | None
    watts: float | None

    def money(self, duration_s: float) -> float | None:
        """Return the money for some seconds.

        >>> Expenses(per_hour=7.2, watts=None).money(2.0)
        0.004
        """
        return None if self.per_hour is None else self.per_hour * duration_s / S_PER_HOUR

    def energy_j(self, duration_s: float) -> float | None:
        """Return the joules of some seconds."""
        return None if self.watts is None else self.watts * duration_s


class Objective(StrEnum):
    """What a plan is to have least of."""

    STEP = "step"
    MONEY = "money"
    ENERGY = "energy"

    def of(self, step_s: float, used: Expenses) -> float:
        """Return seconds, money or joules of a step; inf where they are not known."""
        values = {
            Objective.STEP: step_s,
            Objective.MONEY: used.money(step_s),
            Objective.ENERGY: used.energy_j(step_s),
        }
        value = values[self]
        return inf if value is None else value


def expenses(cluster: Cluster, names: Collection[str]) -> Expenses:
    """Return the expenses of devices (names), which all count for as long as any of them is used."""
    devices = [cluster.device(name) for name in names]
    prices, watts = [device.price_per_hour for device in devices], [device.watts for device in devices]
    return Expenses(
        per_hour=None if None in prices else sum(price for price in prices if price is not None),
        watts=None if None in watts else sum(power for power in watts if power is not None),
    )
