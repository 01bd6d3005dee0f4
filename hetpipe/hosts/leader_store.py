"""The way of a rank to the store at which the ranks of all hosts meet."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hetpipe.trust.channel import Address

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True, slots=True)
class LeaderStore:
    """Opens, in a rank, the store of the launcher that leads.

    prefix: of the keys, so that groups which meet at the same time do not meet each other.
    """

    address: Address
    token: bytes = field(repr=False)
    timeout_s: float
    prefix: str = ""

    def __call__(self, world: int) -> "Store":
        """Connect to the store; it does not ask how many ranks there are."""
        from torch._C._distributed_c10d import PrefixStore

        from hetpipe.runtime.remote_store import RemoteStore

        store = RemoteStore(self.address, self.token, self.timeout_s)
        return PrefixStore(self.prefix, store) if self.prefix else store
