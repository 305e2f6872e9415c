"""Names for prefixes: the key of block i identifies everything that blocks 0 … i depend on.

A key is the running BLAKE2b digest (16 bytes) of a root and of links, read at each block boundary.
So each key contains its predecessor. Two sequences share key i if and only if they agree on the
root and on their first i + 1 links.

* The **root** covers the inputs common to all blocks: the engine's identity (weights, architecture
  with its rope, KV type, kernels, version), the arrays that a block holds and their layers
  (`GroupShape`), the block size, and the format of the keys. From the request it has the tenant's
  salt, the adapter's content, and the digests of inputs that every token attends to.
* A **link** is the tokens of a block as 32-bit integers. Each input that is not text (an image) and
  overlaps the block adds a mark, which equals no token id, its digest and the block's offset in it.
  Equal placeholders of different images never share.

Tokens are untrusted. A hash with constructible collisions would hand one tenant the KV of another,
so a cryptographic one is used. Measured, it costs about a microsecond a block; each token is hashed
once in its sequence's life. Keys do not depend on the process, so they also name blocks in other
tiers and on other machines.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile

from headrace.base.request import Retained
from headrace.base.spec import InputSpan
from headrace.base.split import Handed
from headrace.base.step import PoolShape
from headrace.base.tiers import KEY_BYTES

FORMAT = 5
"""Version of the keys. Raised when the key's inputs change, or the meaning of a block's bytes while
its arrays stay. 5: int8 keys without their large biases on GPUs."""
_MARK = -1
"""First word of an input's part of a link; token ids are never negative."""


def root_of(pool: PoolShape, identity: str) -> bytes:
    """Return the digest that all keys of an engine begin with. `identity`: what determines its KV
    besides the pool's form, see `base.identity`."""
    held = [(group.name, group.layers, group.window, group.arrays) for group in pool.groups]
    return _digest(repr((FORMAT, identity, pool.block_size, held)))


def tenant_of(salt: str) -> str:
    """Return a name for a salt's users that does not reveal it: 16 hexadecimal digits. All salts of
    one API key (`server.caller`) are one tenant, so two salts do not get two shares."""
    return _digest(f"tenant {salt.partition(chr(0))[0]}")[:8].hex()


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).digest()


class PrefixChain:
    """The keys of one sequence's full blocks, computed on demand."""

    __slots__ = (
        "_hasher", "_inputs", "_start", "_tokens", "adapter", "block_size", "keys", "marks",
        "retained", "salt", "tenant",
    )  # fmt: skip

    def __init__(
        self,
        root: bytes,
        block_size: int,
        tokens: list[int],
        *,
        salt: str = "",
        adapter: str | None = None,
        inputs: Sequence[InputSpan] = (),
        retained: Sequence[Retained] = (),
        marks: Sequence[tuple[int, int]] = (),
    ) -> None:
        """`tokens` is the sequence's own list, which only ever grows. `adapter`: digest of its
        content. `marks`: see `Request.marks`."""
        self.block_size = block_size
        self._tokens = tokens
        self._inputs = [one for one in inputs if one.length]
        read = [(one.kind, one.digest) for one in inputs if not one.length]
        start = repr((salt, adapter, read) if read else (salt, adapter))
        self._hasher = blake2b(root + _digest(start), digest_size=KEY_BYTES)
        self._start = self._hasher.digest()
        self.keys: list[bytes] = []
        self.salt, self.adapter = salt, adapter
        self.tenant = tenant_of(salt)
        self.retained = retained
        self.marks = list(marks)
        """Marks not reported yet (`holdings`)."""

    def extend(self, blocks: int) -> list[bytes]:
        """Return the keys of at least the first `blocks` full blocks."""
        keys, size = self.keys, self.block_size
        done = len(keys)
        if done < blocks:
            assert blocks * size <= len(self._tokens)
            packed = array("i", self._tokens[done * size : blocks * size]).tobytes()
            update, digest, step = self._hasher.update, self._hasher.digest, 4 * size
            for at in range(0, len(packed), step):
                update(packed[at : at + step])
                if self._inputs:
                    update(self._links(len(keys) * size))
                keys.append(digest())
        return keys

    @property
    def known(self) -> int:
        """Tokens of the sequence that are known."""
        return len(self._tokens)

    def common(self, other: PrefixChain, most: int) -> int:
        """Return how many of the first `most` tokens, which both have, `other` shares from the
        start; 0 for another tenant or adapter, or with inputs that are not text."""
        if self._start != other._start or self._inputs or other._inputs:
            return 0
        whole, size = most // self.block_size, self.block_size
        ours, theirs = self.extend(whole), other.extend(whole)
        blocks = bisect_left(range(whole), True, key=lambda at: ours[at] != theirs[at])
        rest = slice(blocks * size, min(most, (blocks + 1) * size))
        pairs = zip(self._tokens[rest], other._tokens[rest], strict=True)
        return rest.start + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def kept_for(self, block: int) -> float:
        """Return the seconds for which a block is to be retained; 0 if the request did not ask."""
        begin = block * self.block_size
        return max((one.seconds for one in self.retained if begin < one.tokens), default=0.0)

    def before(self, block: int) -> bytes:
        """Return the key of the prefix before a block."""
        return self.keys[block - 1] if block else self._start

    def plain(self, begin: int, end: int) -> list[int]:
        """Return the tokens begin … end of one block, or [] if an input that is not text overlaps
        the block."""
        if self._inputs and self._links(begin // self.block_size * self.block_size):
            return []
        return self._tokens[begin:end]

    def handed(self, first: int, blocks: int) -> Handed | None:
        """Return the data with which another engine computes the first `blocks` and lends those
        from `first` on. Returns None if an input that is not text is among them."""
        upto = blocks * self.block_size
        if any(one.first < upto for one in self._inputs):
            return None
        tokens, key = self._tokens[: upto + 1], self.extend(blocks)[blocks - 1]
        return Handed(tokens, self.salt, self.adapter, key, first, blocks)

    def rest(self, upto: int) -> bytes:
        """Return a key for the first `upto` tokens, whose last block is not full."""
        whole = upto // self.block_size
        rest = array("i", self._tokens[whole * self.block_size : upto]).tobytes()
        return blake2b(self.before(whole) + rest, digest_size=KEY_BYTES, person=b"rest").digest()

    def _links(self, begin: int) -> bytes:
        """Return the bytes that inputs overlapping the block at `begin` add to its link."""
        end = begin + self.block_size
        return b"".join(
            array("q", (_MARK, one.first - begin, one.length)).tobytes()
            + _digest(repr(one.content))
            for one in self._inputs
            if one.first < end and begin < one.first + one.length
        )

    def fork(self, tokens: list[int]) -> PrefixChain:
        """Return an independent copy of the chain for `tokens` that begin like its own. The n
        choices of a request share a prompt."""
        twin = PrefixChain.__new__(PrefixChain)
        twin.block_size = self.block_size
        twin._tokens = tokens
        twin._inputs = self._inputs
        twin._hasher = self._hasher.copy()
        twin._start = self._start
        twin.keys = self.keys.copy()
        twin.salt, twin.adapter = self.salt, self.adapter
        twin.tenant = self.tenant
        twin.retained = self.retained
        twin.marks = []
        return twin
