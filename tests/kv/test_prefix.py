"""Keys of prefixes: equal exactly when everything that decides over the KV is equal."""

from __future__ import annotations

from headrace.kv import PrefixChain


def keys(
    tokens: list[int], size: int = 4, salt: str = "", adapter: str | None = None
) -> list[bytes]:
    return list(PrefixChain(size, salt, adapter).extend(tokens, len(tokens) // size))


def test_a_key_stands_for_the_whole_prefix() -> None:
    one, two = keys([1, 2, 3, 4, 5, 6, 7, 8]), keys([9, 2, 3, 4, 5, 6, 7, 8])
    assert one == keys([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert one[0] != two[0]
    assert one[1] != two[1], "the second block is equal, what is before it is not"


def test_salt_adapter_and_block_size_separate() -> None:
    tokens = list(range(64))
    roots = [
        keys(tokens), keys(tokens, salt="a"), keys(tokens, salt="b"), keys(tokens, adapter="a"),
        keys(tokens, adapter=""), keys(tokens, salt="a', 'b"), keys(tokens, salt="a", adapter="b"),
        keys(tokens, size=8), keys(tokens, salt="\ud800"),
    ]  # fmt: skip
    everything = [key for chain in roots for key in chain]
    assert len(set(everything)) == len(everything)


def test_tokens_are_not_confused_with_their_bytes() -> None:
    assert keys([256, 0, 0, 0]) != keys([0, 1, 0, 0])
    assert keys([0, 0, 0, 2**31 - 1])


def test_keys_are_made_step_by_step_or_at_once() -> None:
    tokens = list(range(40))
    chain = PrefixChain(4)
    chain.extend(tokens[:9], 2)
    chain.extend(tokens[:9], 1)
    assert chain.extend(tokens, 10) == keys(tokens)


def test_a_fork_goes_its_own_way() -> None:
    chain = PrefixChain(2)
    chain.extend([1, 2, 3, 4], 2)
    twin = chain.fork()
    assert twin.extend([1, 2, 3, 4, 5, 6], 3) == keys([1, 2, 3, 4, 5, 6], size=2)
    assert chain.extend([1, 2, 3, 4, 7, 8], 3) == keys([1, 2, 3, 4, 7, 8], size=2)


def test_keys_do_not_change_between_versions() -> None:
    """Other tiers and machines name blocks by them: a change here is a change of format."""
    assert keys([1, 2, 3, 4])[0].hex() == "13a0b0ad15d6086ce4f6e7d1b04f1381"
