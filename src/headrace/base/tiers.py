"""Types of the tiers below the KV pool for both planes: blocks by their content's key.

The control plane (`kv.tiers`) decides which blocks move; the data plane (`worker.mover`) moves
their bytes in its own threads. None of this belongs to a step: an idle engine still loads, and no
step waits for a disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

KEY_BYTES = 16
"""Length of a block's name."""

Movement = Literal["read", "write", "compare", "seek", "prefill"]


class KeyedBlock(NamedTuple):
    """A block of the pool and the content that belongs there."""

    group: int
    block: int
    key: bytes
    """Name of the content, as `kv.prefix` makes it: equal keys mean equal bytes."""
    depth: int
    """Its place in the prefix: the deepest of one prefix is evicted first."""
    tenant: str
    """Name of the owner: the space is divided between tenants."""
    kept: float = 0.0
    """Seconds for which a client asked to keep it."""

    @property
    def age(self) -> int:
        """Microseconds before now that a tier takes as its last use."""
        return self.depth - int(self.kept * 1e6)


class OrderEnd(NamedTuple):
    """The end of one order."""

    ticket: int
    kind: Movement
    good: tuple[bool, ...]
    """Result per piece of the order: read, written, found equal, or present."""
    nbytes: int
    seconds: float
    """From the first byte to the last."""


@dataclass(slots=True)
class TierStats:
    """Counts of the tiers below the pool since the start of the engine."""

    loads: int = 0
    """Prefixes that were loaded."""
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    remote_bytes: int = 0
    """Loaded bytes from a tier that other machines share."""
    lent_bytes: int = 0
    """Loaded bytes that prefill servers lent."""
    met: int = 0
    """Prefixes computed from the front while they were loaded from the back."""
    written_bytes: int = 0
    written_blocks: int = 0
    left_out: int = 0
    """Blocks that were not written because too many waited."""
    recomputed: int = 0
    """Prefixes that were present but computed, since that was faster."""
    damaged: int = 0
    """Blocks that were dropped: torn, of other content, or gone meanwhile."""
    checked: int = 0
    """Blocks that were recomputed and compared with their kept copy."""
    wrong: int = 0
    """Checked blocks that differed: must stay 0."""
    kept_bytes: int = 0
    """Bytes in the lower tier, as far as this process knows."""


class LowerTiers(Protocol):
    """Interface of the lower tiers' bookkeeping (`kv.tiers`) for that of the pool."""

    stats: TierStats
    held: Counter[tuple[int, int]]
    """(group, block) → number of holds for orders under way."""

    def offer(self, blocks: Iterable[KeyedBlock]) -> None:
        """Offer computed, final blocks, if the pool still has them under their keys."""

    def turn(self) -> None:
        """Release the blocks of finished orders."""

    def meets(self, work: int, computed: int) -> bool:
        """Return whether the blocks loaded meanwhile now meet the computed tokens. The work is then
        better admitted again."""

    def gone(self, work: int) -> None:
        """Drop waiting work that has ended."""

    def distrust(self) -> None:
        """Stop trusting the pool's content, which changes from now on."""


class BlockStore(Protocol):
    """Mover of blocks between the pool and a lower tier.

    Calls come from one thread and never wait. The caller holds a block in an order until the order
    has ended.
    """

    def known(self, group: int) -> Container[bytes]:
        """Return the keys that a tier most likely has; a read may still find one gone."""

    def place(self, group: int, key: bytes) -> int | None:
        """Return the rank of the nearest tier that has it: 0 a disk, 1 a store shared by machines,
        2 a prefill server; None if no tier is known to have it."""

    @property
    def nearest(self) -> int:
        """Rank of the tier that is asked first."""

    @property
    def keeps(self) -> bool:
        """Whether there is a tier to write to."""

    @property
    def asks(self) -> bool:
        """Whether there is a tier with contents known only for keys already asked."""

    def seek(self, ticket: int, pieces: Sequence[KeyedBlock]) -> None:
        """Ask for these keys, for any blocks; the present ones are known from then on."""

    def read(self, ticket: int, pieces: Sequence[KeyedBlock]) -> None: ...
    def write(self, ticket: int, pieces: Sequence[KeyedBlock]) -> None: ...
    def compare(self, ticket: int, pieces: Sequence[KeyedBlock]) -> None:
        """Compare the blocks' bytes with the tier's."""

    def prepare(self, group: int, blocks: range) -> None:
        """Prepare the memory of these blocks of the pool, which will likely be read into."""

    def ended(self) -> list[OrderEnd]:
        """Return the orders that ended since the last call."""

    def kept_bytes(self) -> int:
        """Return the bytes that the tier holds."""

    def forget(self) -> None:
        """Drop all blocks of this engine; orders under way write nothing more."""
