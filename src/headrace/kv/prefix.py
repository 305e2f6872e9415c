"""Names for prefixes: the key of block i stands for every token up to that block's end.

The key is the running BLAKE2b digest (16 bytes) of a root and of the tokens as 32-bit integers,
read at each block border; so each key contains its predecessor, and two sequences share key i if
and only if they agree on the root and on the first (i + 1) * block_size tokens. The root holds
what else decides over the content of KV: the tenant's salt, the adapter, the block size.

Tokens come from strangers. A hash for which collisions can be made would hand one tenant the KV
of another, so a cryptographic one is used; measured, it costs about a microsecond a block, and
each token is hashed once in the life of its sequence. Keys do not depend on the process: they
can name blocks in another tier or on another machine.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

KEY_BYTES = 16


class PrefixChain:
    """The keys of one sequence's full blocks, made as far as they were asked for."""

    __slots__ = ("_block_size", "_hasher", "keys")

    def __init__(self, block_size: int, salt: str = "", adapter: str | None = None) -> None:
        root = repr((block_size, salt, adapter)).encode("utf-8", "surrogatepass")
        self._block_size = block_size
        self._hasher = blake2b(len(root).to_bytes(8, "little") + root, digest_size=KEY_BYTES)
        self.keys: list[bytes] = []

    def extend(self, tokens: list[int], blocks: int) -> list[bytes]:
        """Keys of at least the first `blocks` full blocks; `tokens` only ever grows."""
        keys, size = self.keys, self._block_size
        done = len(keys)
        if done < blocks:
            assert blocks * size <= len(tokens)
            packed = array("i", tokens[done * size : blocks * size]).tobytes()
            update, digest, step = self._hasher.update, self._hasher.digest, 4 * size
            for at in range(0, len(packed), step):
                update(packed[at : at + step])
                keys.append(digest())
        return keys

    def fork(self) -> PrefixChain:
        """A chain that goes on by itself from here: the n choices of a request share a prompt."""
        twin = PrefixChain.__new__(PrefixChain)
        twin._block_size = self._block_size
        twin._hasher = self._hasher.copy()
        twin.keys = self.keys.copy()
        return twin
