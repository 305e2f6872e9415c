"""The pass by which layouts are priced: a rank's part of every family's graph."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.arch import Encoder, ModelArch
from headrace.base.cut import GRAIN
from headrace.base.graph import AttentionSpec, Graph
from headrace.base.sums import summed
from headrace.models.registry import describe
from headrace.roofline.known import KNOWN, known

ENCODER = ModelArch(
    family="bert",
    vocab_size=30_522,
    hidden=384,
    layers=6,
    heads=12,
    kv_heads=12,
    head_dim=32,
    intermediate=1536,
    max_context=512,
    norm_eps=1e-12,
    activation="gelu",
    encoder=Encoder(types=2, labels=1),
)


@cache
def whole(name: str) -> Graph:
    return describe(known(name)[0])


def kinds(graph: Graph) -> Counter[str]:
    return Counter(node.kind for node in graph.nodes)


@settings(max_examples=60)
@given(st.sampled_from(list(KNOWN)), st.sampled_from([2, 3, 4, 8]), st.booleans(), st.booleans())
def test_a_rank_has_its_part_of_every_product(
    name: str, ranks: int, spread: bool, sent: bool
) -> None:
    """`summed` verifies what it makes. Nodes stay in their order; parts are even to a grain or a
    head."""
    graph = whole(name)
    found = [
        node
        for node in summed(graph, ranks, whole=spread, sent=sent).nodes
        if node.kind not in ("reduce", "exchange")
    ]
    assert [node.kind for node in found] == [node.kind for node in graph.nodes]
    sizes = [0, 0]
    for mine, node in zip(found, graph.nodes, strict=True):
        for part, ref in zip(mine.weights, node.weights, strict=True):
            assert part.names == ref.names
            if ref.width and ref.role != "embed":
                sizes[0] += part.out * part.width * part.copies
                sizes[1] += ref.out * ref.width * ref.copies
        if node.kind == "linear" and mine.weights[0].width < node.weights[0].width:
            even = node.weights[0].width / ranks
            assert even <= mine.weights[0].width <= even + max(GRAIN, even)
    least = 1.0 if spread and "experts" in kinds(graph) else sizes[1] / ranks
    assert least <= sizes[0] <= sizes[1]


@pytest.mark.parametrize(
    ("name", "a_layer"),
    [("llama-3.1-8b", 2), ("deepseek-v3", 2), ("gemma-4-26b-a4b", 3), ("lfm2-1.2b", 2)],
)
def test_sums_meet_after_attention_and_after_the_feed_forward(name: str, a_layer: int) -> None:
    """Gemma 4's mixture and the feed-forward next to it have a norm each."""
    graph = summed(whole(name), 2)
    assert kinds(graph)["reduce"] == a_layer * known(name)[0].layers
    assert "exchange" not in kinds(graph)


def test_experts_that_are_sent_for_are_no_partial_sums() -> None:
    """The shared expert of DeepSeek-V3 still is."""
    arch = known("qwen3-30b-a3b")[0]
    assert kinds(summed(describe(arch), 2, whole=True, sent=True))["reduce"] == arch.layers
    arch = known("deepseek-v3")[0]
    assert kinds(summed(describe(arch), 2, whole=True, sent=True))["reduce"] == 2 * arch.layers


def test_ranks_beyond_the_kv_heads_have_a_whole_one() -> None:
    arch = known("qwen3-30b-a3b")[0]
    mine = summed(describe(arch), 8).attentions()[0]
    assert isinstance(mine, AttentionSpec)
    assert (arch.kv_heads, mine.heads, mine.kv_heads) == (4, arch.heads // 8, 1)


def test_an_encoder_is_shared_up_to_its_head() -> None:
    for arch in (ENCODER, replace(ENCODER, encoder=Encoder(types=2))):
        graph = summed(describe(arch), 2)
        assert kinds(graph)["reduce"] == 2 * arch.layers
        (one, *_) = graph.attentions()
        assert isinstance(one, AttentionSpec)
        assert one.heads == arch.heads // 2
    last = graph.nodes[-1].weights
    assert last == describe(arch).nodes[-1].weights


def test_one_rank_has_all_of_it() -> None:
    graph = whole("llama-3.1-8b")
    assert summed(graph, 1) is graph
