"""Keys of prefixes: equal exactly when everything that decides over the KV is equal."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from headrace.base.arch import ModelArch, Rope
from headrace.base.config import EngineOptions
from headrace.base.groups import graph_groups
from headrace.base.identity import Identity
from headrace.base.request import Request
from headrace.base.sampling import SamplingParams
from headrace.base.spec import InputSpan, RequestSpec
from headrace.base.step import ArrayShape, PoolShape
from headrace.kv import KvManager, PrefixChain, root_of
from headrace.kv.prefix import tenant_of
from headrace.models.registry import describe

ARCH = ModelArch(
    family="qwen2",
    vocab_size=100,
    hidden=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=96,
    max_context=128,
    norm_eps=1e-6,
)


def keys(
    tokens: list[int],
    size: int = 4,
    salt: str = "",
    adapter: str | None = None,
    inputs: Sequence[InputSpan] = (),
    root: bytes = b"root",
) -> list[bytes]:
    chain = PrefixChain(root, size, tokens, salt=salt, adapter=adapter, inputs=inputs)
    return list(chain.extend(len(tokens) // size))


def test_a_key_stands_for_the_whole_prefix() -> None:
    one, two = keys([1, 2, 3, 4, 5, 6, 7, 8]), keys([9, 2, 3, 4, 5, 6, 7, 8])
    assert one == keys([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert one[0] != two[0]
    assert one[1] != two[1], "the second block is equal, what is before it is not"


def test_salt_and_adapter_separate() -> None:
    tokens = list(range(64))
    roots = [
        keys(tokens),
        keys(tokens, salt="a"),
        keys(tokens, salt="b"),
        keys(tokens, adapter="a"),
        keys(tokens, adapter=""),
        keys(tokens, salt="a', 'b"),
        keys(tokens, salt="a", adapter="b"),
        keys(tokens, salt="\ud800"),
    ]
    everything = [key for chain in roots for key in chain]
    assert len(set(everything)) == len(everything)


def test_tokens_are_not_confused_with_their_bytes() -> None:
    assert keys([256, 0, 0, 0]) != keys([0, 1, 0, 0])
    assert keys([0, 0, 0, 2**31 - 1])


def test_keys_are_made_step_by_step_or_at_once() -> None:
    tokens = list(range(40))
    growing = tokens[:9]
    chain = PrefixChain(b"root", 4, growing)
    chain.extend(2)
    chain.extend(1)
    growing += tokens[9:]
    assert chain.extend(10) == keys(tokens)


def test_a_fork_goes_its_own_way() -> None:
    one, other = [1, 2, 3, 4], [1, 2, 3, 4]
    chain = PrefixChain(b"root", 2, one)
    chain.extend(2)
    twin = chain.fork(other)
    other += [5, 6]
    one += [7, 8]
    assert twin.extend(3) == keys([1, 2, 3, 4, 5, 6], size=2)
    assert chain.extend(3) == keys([1, 2, 3, 4, 7, 8], size=2)


def pool(**changes: object) -> PoolShape:
    group = graph_groups(describe(ARCH), "bfloat16")[0]
    return PoolShape(16, (group._replace(**changes),))


def test_every_ingredient_of_the_root_separates() -> None:
    """Whatever decides over the content of a block is in every key."""
    group = pool().groups[0]
    smaller = (ArrayShape("k", (2, 32), "bfloat16"), *group.arrays[1:])
    typed = tuple(array._replace(dtype="float16") for array in group.arrays)
    roots = {
        "as it is": root_of(pool(), "weights"),
        "other weights": root_of(pool(), "others"),
        "KV type": root_of(pool(arrays=typed), "weights"),
        "shape of an array": root_of(pool(arrays=smaller), "weights"),
        "scales": root_of(PoolShape(16, graph_groups(describe(ARCH), "int8")), "weights"),
        "layers": root_of(pool(layers=group.layers[1:]), "weights"),
        "window": root_of(pool(window=64), "weights"),
        "groups": root_of(PoolShape(16, (group, group)), "weights"),
        "block size": root_of(PoolShape(32, (group,)), "weights"),
    }
    assert len(set(roots.values())) == len(roots)
    found = [key for root in roots.values() for key in keys(list(range(8)), root=root)]
    assert len(set(found)) == len(found)
    assert root_of(pool(blocks=77), "weights") == roots["as it is"], "how many there are is no part"


def test_the_engines_identity_is_in_the_root() -> None:
    """Rope, KV type, kernels and weights are parts of `Identity`; each changes its fingerprint."""
    base = Identity("weights", "arch", {"kv_dtype": "int8"}, {"attention": "cpu"}, "1")
    others = [
        dataclasses.replace(base, weights="w2"),
        dataclasses.replace(base, architecture=hashed(ARCH)),
        dataclasses.replace(
            base, architecture=hashed(dataclasses.replace(ARCH, rope=Rope(12345.0)))
        ),
        dataclasses.replace(base, options={"kv_dtype": "bfloat16"}),
        dataclasses.replace(base, kernels={"attention": "ref"}),
        dataclasses.replace(base, version="2"),
    ]
    roots = {root_of(pool(), one.fingerprint) for one in (base, *others)}
    assert len(roots) == 1 + len(others)


def hashed(arch: ModelArch) -> str:
    return Identity.of("", arch, EngineOptions(), []).architecture


IMAGE = InputSpan(6, 8, "image", b"one image")


def test_two_images_behind_equal_placeholders_never_share() -> None:
    tokens = [5] * 24
    ones = {
        "text": keys(tokens),
        "image": keys(tokens, inputs=[IMAGE]),
        "another image": keys(tokens, inputs=[IMAGE._replace(digest=b"another")]),
        "another kind": keys(tokens, inputs=[IMAGE._replace(kind="audio")]),
        "another place": keys(tokens, inputs=[IMAGE._replace(first=7)]),
        "another length": keys(tokens, inputs=[IMAGE._replace(length=9)]),
        "two of it": keys(tokens, inputs=[IMAGE, IMAGE._replace(first=14)]),
    }
    assert ones["image"] == keys(tokens, inputs=[IMAGE])
    for name, chain in ones.items():
        assert chain[0] == ones["text"][0], "what lies before any input is shared"
        others = {key for other, found in ones.items() if other != name for key in found[4:]}
        assert not set(chain[4:]) & others, "behind it nothing is"
        if name != "two of it":
            beside = {k for o, found in ones.items() if o not in (name, "two of it") for k in found}
            assert not set(chain[1:]) & (beside - {chain[0]}), name


def test_an_image_is_part_of_every_block_that_it_reaches_into() -> None:
    tokens, wide = [5] * 16, InputSpan(2, 10, "image", b"a")
    one = keys(tokens, inputs=[wide])
    other = keys(tokens, inputs=[wide._replace(digest=b"b")])
    assert not set(one) & set(other)


def test_no_tokens_pass_for_an_image() -> None:
    """A link with a mark is no link of tokens: ids are never negative."""
    chain = PrefixChain(b"root", 4, [5] * 8, inputs=[InputSpan(0, 4, "image", b"a")])
    assert chain._links(0).startswith(b"\xff" * 8)
    assert not chain._links(4)


def test_the_manager_names_by_salt_adapters_content_and_inputs() -> None:
    contents = {"a@1": "same", "a@2": "same", "b@3": "other"}
    kv = KvManager(pool(), identity="weights", adapter_content=contents.__getitem__)
    tokens = [5] * 32

    def first(
        salt: str = "", adapter: str | None = None, inputs: tuple[InputSpan, ...] = ()
    ) -> bytes:
        spec = RequestSpec(SamplingParams(), 0, adapter=adapter, inputs=inputs)
        chain = kv.chain(Request("r", tokens, spec, cache_salt=salt), tokens)
        assert chain is not None
        return chain.extend(1)[0]

    assert first(adapter="a@1") == first(adapter="a@2"), "one content under two names"
    distinct = [
        first(),
        first("salt"),
        first(adapter="a@1"),
        first(adapter="b@3"),
        first(inputs=(IMAGE,)),
    ]
    assert len(set(distinct)) == len(distinct)


def test_keys_do_not_change_between_versions() -> None:
    """Other tiers and machines name blocks by them: a change here is a change of `FORMAT`."""
    root = root_of(PoolShape(4, ()), "identity")
    assert keys([1, 2, 3, 4], root=root)[0].hex() == "9438f3110eb045e6aa789768e0d1a22b"
    assert (
        keys([1, 2, 3, 4], root=root, inputs=[IMAGE._replace(first=0)])[0].hex()
        == "b5b33cb21af5227caa8a07fedfcabe59"
    )


def test_salts_of_one_key_are_one_tenant() -> None:
    assert tenant_of("key a\0x") == tenant_of("key a\0y") == tenant_of("key a")
    assert tenant_of("key a\0x") != tenant_of("key b\0x")
