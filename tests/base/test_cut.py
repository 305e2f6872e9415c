"""The pass that shares a model among ranks: what each rank computes, and where they meet."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.absorb import absorbed
from headrace.base.cut import cut, even, head_shares, refusal
from headrace.base.errors import OptionError
from headrace.base.graph import AttentionSpec, Graph
from headrace.base.layout import ONE, Layout
from headrace.loader.open import open_model
from headrace.models.reader import from_hf
from headrace.models.registry import describe
from tiny import encoder, families
from tiny.kept import Kept

DEFAULT = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
"""Qwen2.5-Coder-0.5B."""
DENSE = (
    "qwen2",
    "qwen3",
    "llama",
    "mistral-window",
    "gemma3",
    "gemma4",
    "phi3",
    "cohere2",
    "starcoder2",
)
MIXTURES = (
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
    "granitemoe",
    "gemma4-mixture",
    "llama4",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
)
STATES = ("lfm2", "granitemoehybrid", "nemotron_h", "qwen3_next", "qwen3_5_moe")


@pytest.fixture
def graph_of(kept: Kept):
    def graph(name: str) -> Graph:
        return absorbed(describe(open_model(str(kept(families.make, name))).arch))

    return graph


@given(st.integers(0, 5000), st.integers(1, 64), st.integers(1, 64))
def test_even_shares_differ_by_a_grain(whole: int, ranks: int, grain: int) -> None:
    bounds = even(whole, ranks, grain)
    assert bounds[0] == 0
    assert bounds[-1] == whole
    shares = [b - a for a, b in pairwise(bounds)]
    assert all(bound % grain == 0 or bound == whole for bound in bounds)
    assert max(shares) - min(shares) <= 2 * grain - 1


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 24))
def test_every_head_has_one_rank_and_its_keys_are_there(kv: int, queries: int, ranks: int) -> None:
    heads = kv * queries
    shares = head_shares(heads, kv, ranks)
    assert len(shares) == ranks
    assert [share.first for share in shares[1:]] == [
        share.first + share.queries for share in shares[:-1]
    ]
    assert sum(share.queries for share in shares) == heads
    for share in shares:
        if share.queries:
            assert share.queries % share.kv_heads == 0
        each = share.queries // share.kv_heads
        for head in range(share.queries):
            # Which KV head the kernels read, and which the model means.
            assert share.kv_first + head // each == (share.first + head) // queries


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", [*DENSE, *MIXTURES, *STATES])
def test_ranks_have_every_output_of_a_product_once(graph_of, name: str, ranks: int) -> None:
    graph = graph_of(name)
    parts = [cut(graph, ranks, rank) for rank in range(ranks)]
    taken: dict[tuple[str, ...], list[tuple[int, int, int]]] = {}
    whole = {ref.names: ref.rows for node in graph.nodes for ref in node.weights}
    meetings = [
        [node.spec.bounds for node in one.nodes if node.kind == "exchange"] for one in parts
    ]
    assert meetings == [meetings[0]] * ranks, "ranks meet at the same places, in the same columns"
    assert meetings[0]
    for part in parts:
        for node in part.nodes:
            for ref in node.weights:
                if ref.cut and ref.width:
                    taken.setdefault((ref.role, *ref.names), []).extend(ref.cut)
    assert taken
    kv = {f"{part}_proj" for part in "kv"}
    for (_, *names), runs in taken.items():
        rows = whole[tuple(names)]
        for which, size in enumerate(rows):
            found = sorted({(first, count) for of, first, count in runs if of == which})
            # Ranks may have the same keys and values.
            if not any(word in names[which] for word in kv) and "qkv" not in names[which]:
                assert len(found) == sum(of == which for of, _, _ in runs)
            ends = [0, *(first + count for first, count in found)]
            assert ends[:-1] == [first for first, _ in found]
            assert ends[-1] == size


def test_most_of_the_default_model_is_shared() -> None:
    """The shapes of Qwen2.5-Coder-0.5B: 14 heads over 2, 3 and 4 ranks."""
    graph = describe(from_hf(DEFAULT))
    for ranks in (2, 3, 4):
        for rank in range(ranks):
            part = cut(graph, ranks, rank)
            numbers = sum(ref.numbers for ref in part.weights() if ref.role in ("linear", "logits"))
            whole = sum(ref.numbers for ref in graph.weights() if ref.role in ("linear", "logits"))
            assert 1 / ranks * 0.9 < numbers / whole < 1 / ranks * 1.1, (ranks, rank)
            assert {spec.heads for spec in part.attentions()} <= {3, 4, 7}


def test_ranks_have_each_latent_head_once(kept: Kept) -> None:
    files = open_model(str(kept(families.make, "deepseek_v2", qk_nope_head_dim=32)))
    graph = absorbed(describe(files.arch))
    parts = [cut(graph, 4, rank) for rank in range(4)]
    for kind in ("absorb", "unpack"):
        runs = [
            [
                (ref.first, ref.copies)
                for node in part.nodes
                if node.kind == kind
                for ref in node.weights
            ]
            for part in parts
        ]
        assert runs[0]
        for layer in zip(*runs, strict=True):
            heads = [first + at for first, copies in layer for at in range(copies)]
            assert heads == list(range(6))


def test_an_encoder_is_not_shared(kept: Kept) -> None:
    graph = describe(open_model(str(kept(encoder.make))).arch)
    with pytest.raises(OptionError, match="reads both ways") as raised:
        cut(graph, 2, 0)
    assert raised.value.param == "layout"


def test_more_ranks_than_heads_are_refused(graph_of) -> None:
    assert refusal(graph_of("qwen2"), 6) is None
    assert "6 heads are too few" in (refusal(graph_of("qwen2"), 7) or "")
    assert all(
        isinstance(spec, AttentionSpec) for spec in cut(graph_of("qwen2"), 6, 5).attentions()
    )


@pytest.mark.parametrize("text", ["TP2", "TP2·PP4", "PP3", "TP2·DP4·EP8", "1"])
def test_a_layout_is_read_as_it_is_written(text: str) -> None:
    assert str(Layout.parse(text)) == text
    assert Layout.parse(text.replace("·", ".").lower()) == Layout.parse(text)


@pytest.mark.parametrize("text", ["", "2", "TP", "TP0", "TP2+PP2", "TP99999", "XP2", "TP2.EP3"])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="layout") as raised:
        Layout.parse(text)
    assert raised.value.param == "layout"


def test_one_is_nothing_shared() -> None:
    assert Layout.parse("1") == ONE
    assert Layout.parse("EP2") == Layout.parse("TP2.EP2")
    assert ONE.devices == 1
