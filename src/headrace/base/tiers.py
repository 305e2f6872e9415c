"""What both planes share of the tiers below the KV pool: blocks by their content's key.

The control plane (`kv.tiers`) decides which blocks move, the data plane (`worker.mover`) moves
their bytes in threads of its own. Nothing here belongs to a step: an engine without one loads all
the same, and no step waits for a disk.
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
    """Names the content, as `kv.prefix` makes it: equal keys mean equal bytes."""
    depth: int
    """Its place in the prefix: of one prefix the deepest is forgotten first."""
    tenant: str
    """A name of those to whom it belongs: the room is shared out between tenants."""
    kept: float = 0.0
    """Seconds for which somebody asked that it stays."""

    @property
    def age(self) -> int:
        """Microseconds before now at which a tier is to take it as used last."""
        return self.depth - int(self.kept * 1e6)


class OrderEnd(NamedTuple):
    """The end of one order."""

    ticket: int
    kind: Movement
    good: tuple[bool, ...]
    """Per piece of the order: read, written, found to be equal, or there."""
    nbytes: int
    seconds: float
    """From the first byte to the last."""


@dataclass(slots=True)
class TierStats:
    """What the tiers below the pool did since the start of the engine."""

    loads: int = 0
    """Prefixes that were loaded."""
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    remote_bytes: int = 0
    """Bytes of these that came from a tier that other machines share."""
    lent_bytes: int = 0
    """Bytes of these that prefill servers lent."""
    met: int = 0
    """Prefixes that were computed from the front while they were loaded from the back."""
    written_bytes: int = 0
    written_blocks: int = 0
    left_out: int = 0
    """Blocks that were not written, since too many waited."""
    recomputed: int = 0
    """Prefixes that were there and computed all the same, since that was quicker."""
    damaged: int = 0
    """Blocks that were dropped: torn, of another content, or gone meanwhile."""
    checked: int = 0
    """Blocks that were computed anew and compared with what had been kept of them."""
    wrong: int = 0
    """Blocks of these that differed: must stay 0."""
    kept_bytes: int = 0
    """Bytes in the lower tier, as far as this process knows."""


class LowerTiers(Protocol):
    """What the books of the pool ask of those of the tiers below it (`kv.tiers`)."""

    stats: TierStats
    held: Counter[tuple[int, int]]
    """(group, block) → how often it is held for an order under way."""

    def offer(self, blocks: Iterable[KeyedBlock]) -> None:
        """These are computed and final, if the pool still has them under their keys."""

    def turn(self) -> None:
        """Give back what is done."""

    def meets(self, work: int, computed: int) -> bool:
        """Is all that follows the tokens computed there by now, as far as it was loaded meanwhile?
        Then the work is better admitted anew."""

    def gone(self, work: int) -> None:
        """Work that waited has ended."""

    def distrust(self) -> None:
        """The pool's content is another from now on."""


class BlockStore(Protocol):
    """Moves blocks between the pool and a lower tier. Calls come from one thread and never wait;
    a block in an order is held by the caller until the order has ended."""

    def known(self, group: int) -> Container[bytes]:
        """Keys that a tier most likely has; a read may still find one gone."""

    def place(self, group: int, key: bytes) -> int | None:
        """The rank of the nearest tier that has it: 0 a disk, 1 what machines share, 2 a prefill
        server; None: nobody is known to."""

    @property
    def nearest(self) -> int:
        """The rank of the tier that is asked first."""

    @property
    def keeps(self) -> bool:
        """Is there a tier to write to?"""

    @property
    def asks(self) -> bool:
        """Is there a tier of which is known only what it was asked?"""

    def seek(self, ticket: int, pieces: Sequence[KeyedBlock]) -> None:
        """Ask for these keys, whatever blocks they name; what is there is known from then on."""

    def read(self, ticket: int, pieces: Sequence[KeyedBlock]) -> None: ...
    def write(self, ticket: int, pieces: Sequence[KeyedBlock]) -> None: ...
    def compare(self, ticket: int, pieces: Sequence[KeyedBlock]) -> None:
        """Are the blocks' bytes those that the tier has?"""

    def prepare(self, group: int, blocks: range) -> None:
        """These blocks of the pool are likely to be read into: their memory can be had by then."""

    def ended(self) -> list[OrderEnd]:
        """Orders that ended since the last call."""

    def kept_bytes(self) -> int:
        """Bytes that the tier holds."""

    def forget(self) -> None:
        """Drop all blocks of this engine; orders under way write nothing any more."""
