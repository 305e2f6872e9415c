"""Names for prefixes of a prompt as its client sent it, which need no tokenizer.

A router that looks for the server with a prompt's prefix sees text, but a server's cache knows
blocks of tokens. Both sides name prefixes by this module: the key of the first n grains of the text
is a running hash over them. A server remembers the block of tokens for a key, and reports the key
as long as it holds that block (`kv.holdings`).

The hash is not cryptographic. A client that makes two prompts of one name gets a worse server for
its own request, since blocks are found by other keys.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from .foreign import Undecodable, json_reader

GRAIN = 512
"""Bytes of a prompt's JSON between two names: about 128 tokens of English."""
MOST_KEYS = 4096
"""Maximum names of one prompt: two million bytes."""
PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages"})
"""Routes whose bodies hold a prompt with named prefixes."""


PATH_TOLD = "/v1/prefixes/stream"
"""Route on which a server reports the prefixes in its cache."""


class _Prompt(msgspec.Struct):
    """The members of a body that decide the tokens of its prompt, unparsed."""

    model: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()


class TextPrefixes(NamedTuple):
    """The names of one prompt's prefixes, the shortest first."""

    keys: list[int]
    """Key n names the first (n + 1) grains; 64 bits."""
    size: int
    """Bytes of the whole prompt."""

    def marks(self, tokens: int) -> tuple[tuple[int, int], ...]:
        """Return (tokens, key) of each prefix, the longest first; `tokens`: those of the whole
        prompt.

        The end of a prefix is estimated by its share of the bytes alone. If parts of a text differ
        in bytes per token, it is a few blocks off, which costs a router nothing.
        """
        size = self.size
        ends = ((n + 1) * GRAIN for n in range(len(self.keys)))
        pairs = ((-(-tokens * end // size), key) for end, key in zip(ends, self.keys, strict=True))
        return tuple(reversed([*pairs]))


NOTHING = TextPrefixes([], 0)
_prompt = json_reader(_Prompt)


def text_prefixes(body: bytes | bytearray, secret: bytes) -> TextPrefixes:
    """Name the prefixes of a request's prompt. `secret`: the value of its authorisation header,
    since caches are shared within one key. Returns `NOTHING` for a body without a prompt, or
    invalid JSON."""
    if len(body) < GRAIN:
        return NOTHING
    try:
        prompt = _prompt(body)
    except Undecodable:
        return NOTHING
    # In the order in which templates write them.
    text = b"".join((prompt.tools, prompt.system, prompt.messages or prompt.prompt))
    key = xxh3_64_intdigest(b"\0".join((prompt.model, prompt.cache_salt, secret)))
    keys = []
    for begin in range(0, min(len(text), MOST_KEYS * GRAIN) - GRAIN + 1, GRAIN):
        key = xxh3_64_intdigest(text[begin : begin + GRAIN], seed=key)
        keys.append(key)
    return TextPrefixes(keys, len(text)) if keys else NOTHING


def secret_of(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return the header that identifies the caller, unchanged; empty without one."""
    found = dict(headers)
    return found.get(b"authorization") or found.get(b"x-api-key") or b""
