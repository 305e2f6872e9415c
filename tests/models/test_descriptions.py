"""Every family's graph is legal, whatever is wanted of it, and names what its files hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from headrace.base.absorb import absorbed
from headrace.base.arch import (
    BeyondText,
    Chunks,
    Encoder,
    Mla,
    ModelArch,
    Moe,
    Recurrence,
    Rope,
    Uneven,
)
from headrace.base.demand import Hidden, demand, head
from headrace.base.denoising import (
    CausalEncoder,
    Decoder,
    Denoiser,
    NoiseSolver,
    PictureConvSpec,
    TextEncoder,
    Unet,
    UnetLevel,
)
from headrace.base.errors import EngineFault, UnsupportedModel
from headrace.base.graph import AttentionSpec, ExpertsSpec, Graph
from headrace.base.groups import graph_groups
from headrace.base.ranking import Feature, Ranker
from headrace.base.verify import verify
from headrace.models.registry import FAMILIES, describe
from headrace.models.t5 import describe_texts
from headrace.models.vae import describe_decoder

ARCH = ModelArch(
    family="llama",
    vocab_size=40,
    hidden=32,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate=48,
    max_context=64,
    norm_eps=1e-5,
)
MOE = Moe(experts=4, active=2, intermediate=16)
SHAPES: dict[str, dict[str, Any]] = {
    "bert": {"encoder": Encoder(types=2, labels=1), "kv_heads": 4},
    "dlrm_dcnv2": {
        "beyond": BeyondText(
            ranker=Ranker((Feature("a", True),), (Feature("b", False, 9),), 8, (8,), 2, 4, (6,))
        )
    },
    "dit": {
        "beyond": BeyondText(denoiser=Denoiser(1, 8, 2, 10, 1, NoiseSolver("ddim"))),
        "kv_heads": 4,
    },
    "pixart": {
        "beyond": BeyondText(
            denoiser=Denoiser(
                4,
                8,
                2,
                0,
                8,
                NoiseSolver("ddim"),
                Decoder(3, (16, 8), 2, 4, True, True, 1.0, 0.0),
                TextEncoder(90, 24, 2, 12, 40, 2, 1e-6, 8, 20, "gelu_tanh", True, 30),
            )
        ),
        "kv_heads": 4,
    },
    "unet": {
        "beyond": BeyondText(
            denoiser=Denoiser(
                4,
                7,
                1,
                0,
                4,
                NoiseSolver("ddim"),
                Decoder(3, (16, 8), 2, 4, True, True, 1.0, 0.0),
                clip=CausalEncoder(90, 24, 2, 40, 2, 1e-5, "quick_gelu", 30, 86),
                unet=Unet(
                    (UnetLevel(16, 1, 1, 2), UnetLevel(32, 1, 0, 2)),
                    (UnetLevel(32, 2, 0, 2), UnetLevel(16, 2, 1, 2)),
                    UnetLevel(32, 1, 1, 2),
                    4,
                    1e-5,
                ),
            )
        ),
        "kv_heads": 4,
    },
    "lfm2": {"recurrence": Recurrence("conv", (0, 2), 3, 32)},
    "granitemoehybrid": {"recurrence": Recurrence("ssm", (0, 2), 4, 48, True, 2, 4, 4, 8)},
    "nemotron_h": {
        "recurrence": Recurrence("ssm", (0,), 4, 48, True, 2, 4, 4, 8, bare=(1,)),
        "activation": "relu2",
    },
    **{
        key: {"recurrence": Recurrence("delta", (0, 2), 4, 48, False, 2, 4, 4, 8)}
        for key in ("qwen3_5", "qwen3_5_moe", "qwen3_next")
    },
    "deepseek_v2": {"mla": Mla(16, None, 4, 4, 8), "moe": replace(MOE, shared_intermediate=24)},
    "deepseek_v3": {"mla": Mla(16, 12, 4, 4, 8), "moe": replace(MOE, dense_layers=1)},
    "gemma3": {"windows": (8, 8, None), "local_rope": Rope(1e3), "tied_embedding": True},
    "llama4": {
        "windows": (8, None, 8),
        "nope": (False, True, False),
        "chunks": Chunks(normed=True, growth=0.1, every=4),
        "moe": replace(MOE, scores="sigmoid", inside=True, shared_intermediate=16, dense_at=(1,)),
    },
    "gemma4": {
        "windows": (8, None, None),
        "local_rope": Rope(1e3),
        "uneven": Uneven(16, 1, one_product=True, shared=1, wide=True, embedded=6),
        "moe": MOE,
    },
    "glm4_moe": {
        "moe": replace(MOE, scores="sigmoid", bias=True, groups=2, shared_intermediate=24),
        "rope": Rope(share=0.5),
    },
    "cohere2": {"windows": (8, 8, None), "nope": (False, False, True)},
    "exaone4": {"qk_norm": True},
    "glm4": {"fused": ("gate_up",), "rope": Rope(share=0.5, interleaved=True)},
    "granitemoe": {"moe": MOE, "residual_scale": 0.5},
    "minimax_m2": {"moe": replace(MOE, scores="sigmoid", bias=True), "whole_qk_norm": True},
    "olmo2": {"qk_norm": True, "whole_qk_norm": True},
    "phi3": {"fused": ("qkv", "gate_up")},
    "starcoder2": {"qkv_bias": True, "output_bias": True},
    "granite": {"residual_scale": 0.5, "logits_scale": 0.25},
    "olmoe": {"moe": MOE, "qk_norm": True, "whole_qk_norm": True},
    "smollm3": {"nope": (False, True, False)},
    "gpt_oss": {
        "moe": replace(MOE, clamped=True),
        "sinks": True,
        "qkv_bias": True,
        "windows": (8, None, 8),
    },
    "mixtral": {"moe": MOE},
    "qwen2": {"qkv_bias": True, "output_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True, "moe": replace(MOE, dense_at=(1,))},
}
"""Features of a family that Llama lacks."""


def arch_of(family: str) -> ModelArch:
    return replace(ARCH, family=family, **SHAPES.get(family, {}))


# A text that attends to an input has more attentions: tests/models/test_whisper_graphs.py. A ranker
# has none, and a denoiser has no head.
@pytest.mark.parametrize(
    "family", sorted({*FAMILIES} - {"whisper", "dit", "pixart", "unet", "dlrm_dcnv2"})
)
def test_every_question_is_a_legal_graph(family: str) -> None:
    graph = describe(arch_of(family))
    questions: tuple[Hidden, ...] = ("none", "sampled", "every")
    for hidden in questions:
        asked = demand(graph, hidden, logits=hidden != "none")
        verify(asked)
        assert set(asked.tensors()) <= set(graph.tensors())
    end = head(graph)
    assert end is not None
    verify(end)
    states = {spec.layer for spec in graph.recurrent()}
    recurrence = arch_of(family).recurrence
    bare = () if recurrence is None else recurrence.bare
    assert len(graph.attentions()) + len(states) + len(bare) == ARCH.layers


def test_a_ranker_is_bags_crosses_and_layers() -> None:
    graph = describe(arch_of("dlrm_dcnv2"))
    cross = ["linear", "linear", "multiply", "add"]
    kinds = ["embed", "linear", "activate", "embed", *2 * cross, "linear", "activate", "linear"]
    assert [node.kind for node in graph.nodes] == kinds
    assert graph.outputs["hidden"].width == 1
    assert demand(graph, "every").nodes == graph.nodes
    assert graph.tensors()["bags.b.weight"] == (9, 8)
    assert graph.tensors()["cross.layers.1.up.weight"] == (16, 4)
    assert graph_groups(graph, "float32") == (), "it keeps nothing between two steps"


def test_a_denoiser_computes_conditions_once_for_each_entry() -> None:
    graph = describe(arch_of("dit"))
    assert demand(graph, "every").nodes == graph.nodes
    assert graph.outputs["hidden"].width == 4
    assert len(graph.attentions()) == ARCH.layers
    rows = {name: [node for node in graph.nodes if node.out[0].rows.name == name] for name in "NR"}
    products = [node.weights[0].names[0] for node in rows["R"] if node.kind == "linear"]
    assert len(products) == 3 * ARCH.layers + 1
    assert all("norm1" in name or name == "proj_out_1.weight" for name in products)
    assert [node.kind for node in rows["N"]].count("modulate") == 2 * ARCH.layers
    assert graph_groups(graph, "float32") == (), "the cache keeps nothing between two steps"


def test_a_pipeline_is_three_parts() -> None:
    arch = arch_of("pixart")
    graph = describe(arch)
    kinds = [node.kind for node in graph.nodes]
    assert kinds.count("attend") == 2 * ARCH.layers, "to its own patches, and to the text"
    assert graph_groups(graph, "float32") == ()
    across = [node for node in graph.nodes if node.kind == "attend" and len(node.reads) > 1]
    for node in across:
        wrong = replace(node, reads=node.reads[:1] * 2)
        nodes = tuple(wrong if one is node else one for one in graph.nodes)
        with pytest.raises(EngineFault, match="goes from N over T to N"):
            verify(Graph(nodes, graph.outputs))
    texts, decoder = describe_texts(arch), describe_decoder(arch)
    verify(texts)
    verify(decoder)
    assert all(one.reach == 32 for one in texts.attentions() if isinstance(one, AttentionSpec))
    out = decoder.outputs["hidden"]
    assert (out.width, out.rows.of(64)) == (3, 256)
    conv = next(node for node in decoder.nodes if node.kind == "conv" and node.spec.up == 2)
    wrong = replace(conv, spec=conv.spec._replace(up=1))
    nodes = tuple(wrong if one is conv else one for one in decoder.nodes)
    with pytest.raises(EngineFault, match="makes another number of rows"):
        verify(Graph(nodes, decoder.outputs, decoder.inputs))


def test_a_unet_has_rows_of_several_sizes() -> None:
    arch = arch_of("unet")
    graph = describe(arch)
    rows = [one.out[0].rows.of(49) for one in graph.nodes if one.kind == "conv"]
    assert [*dict.fromkeys(rows)] == [7**2, 4**2]
    assert graph.outputs["hidden"].rows.of(2 * 49) == 98
    assert graph_groups(graph, "float32") == ()
    kinds = Counter(node.kind for node in graph.nodes)
    assert (kinds["conv"], kinds["beside"], kinds["attend"]) == (20, 4, 8)
    wrongs = {
        "makes another number of rows": lambda one: one.kind == "conv",
        r"makes \[64\] columns, not \[32\]": lambda one: one.kind == "beside",
        "reads rows of N by rows of R": lambda one: one.kind == "modulate",
        "goes from N over T to N": lambda one: one.kind == "attend" and len(one.reads) > 1,
    }
    for match, of in wrongs.items():
        node = next(filter(of, graph.nodes))
        wrong = replace(node, reads=node.reads[:1] * (1 if node.kind == "beside" else 2))
        if isinstance(node.spec, PictureConvSpec):
            wrong = replace(node, spec=node.spec._replace(stride=2))
        nodes = tuple(wrong if one is node else one for one in graph.nodes)
        with pytest.raises(EngineFault, match=match):
            verify(Graph(nodes, graph.outputs))


def test_rows_of_entries_are_where_they_belong() -> None:
    """What a node reads by entry has a row for each of them, and nothing else has."""
    graph = describe(arch_of("dit"))
    for kind, many in (("norm", 3), ("modulate", 3)):
        node = next(one for one in graph.nodes if one.kind == kind and len(one.reads) == many)
        wrong = replace(node, reads=(node.reads[0], *[node.reads[0]] * 2))
        nodes = tuple(wrong if one is node else one for one in graph.nodes)
        with pytest.raises(EngineFault, match="reads rows of N by rows of R"):
            verify(Graph(nodes, graph.outputs))


def test_windowed_layers_have_their_window_and_their_rope() -> None:
    specs = describe(arch_of("gemma3")).attentions()
    assert all(isinstance(spec, AttentionSpec) for spec in specs)
    assert [(spec.kind, spec.window, spec.rope) for spec in specs] == [
        ("sliding", 8, Rope(1e3)),
        ("sliding", 8, Rope(1e3)),
        ("full", None, Rope()),
    ]


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_latents_are_absorbed_and_keep_their_weights(family: str) -> None:
    described = describe(arch_of(family))
    found = absorbed(described)
    assert found.tensors() == described.tensors()
    shared = [spec for spec in found.attentions() if isinstance(spec, AttentionSpec)]
    assert [(spec.kv_heads, spec.size, spec.latent) for spec in shared] == [(1, 20, True)] * 3
    for hidden in ("none", "sampled", "every"):
        verify(demand(found, hidden, logits=hidden != "none"))
    # What is no latent's is the same object.
    assert absorbed(describe(ARCH)) is describe(ARCH)


def test_layers_of_llama4_have_chunks_or_no_positions() -> None:
    graph = describe(arch_of("llama4"))
    found = [
        (spec.chunked, spec.behind, spec.growth, spec.rope is None)
        for spec in graph.attentions()
        if isinstance(spec, AttentionSpec)
    ]
    chunk = (True, True, None, False)
    assert found == [chunk, (False, False, (0.1, 4, 1), True), chunk]
    inside = [node.spec.inside for node in graph.nodes if isinstance(node.spec, ExpertsSpec)]
    assert inside == [True, True]


def test_layers_of_gemma4_differ() -> None:
    graph = describe(arch_of("gemma4"))
    found = [
        (spec.layer, spec.kv_heads, spec.size, spec.values, spec.window)
        for spec in graph.attentions()
        if isinstance(spec, AttentionSpec)
    ]
    assert found == [
        (0, 2, 8, "normed", 8),
        (1, 1, 16, "keys", None),
        (1, 1, 16, "elsewhere", None),
    ]
    tensors = graph.tensors()
    assert "model.layers.1.self_attn.v_proj.weight" not in tensors
    assert "model.layers.2.self_attn.k_proj.weight" not in tensors
    assert tensors["model.layers.1.mlp.up_proj.weight"] == (48, 32)
    assert tensors["model.layers.2.mlp.up_proj.weight"] == (96, 32)
    groups = graph_groups(describe(arch_of("gemma4")), "k8v4")
    assert [(group.layers, group.arrays[1].shape) for group in groups] == [
        ((1,), (1, 8)),
        ((0,), (2, 4)),
    ]


def test_a_tied_table_is_one_tensor_in_two_roles() -> None:
    graph = describe(arch_of("gemma3"))
    roles = [ref.role for ref in graph.weights() if "model.embed_tokens.weight" in ref.names]
    assert roles == ["embed", "logits"]
    assert "lm_head.weight" not in graph.tensors()
    assert "lm_head.weight" in describe(ARCH).tensors()


def test_tensors_of_latent_attention_are_those_of_the_checkpoints_and_kv_b_by_head() -> None:
    tensors = describe(arch_of("deepseek_v3")).tensors()
    at = "model.layers.1.self_attn."
    assert {name.removeprefix(at): shape for name, shape in tensors.items() if at in name} == {
        "q_a_proj.weight": (12, 32),
        "q_a_layernorm.weight": (12,),
        "q_b_proj.weight": (32, 12),
        "kv_a_proj_with_mqa.weight": (20, 32),
        "kv_a_layernorm.weight": (16,),
        **{f"k_b_proj.{head}.weight": (16, 4) for head in range(4)},
        **{f"v_b_proj.{head}.weight": (8, 16) for head in range(4)},
        "o_proj.weight": (32, 32),
    }
    assert "model.layers.0.mlp.gate_proj.weight" in tensors
    assert tensors["model.layers.2.mlp.experts.3.down_proj.weight"] == (32, 16)


def test_a_family_that_nobody_described() -> None:
    with pytest.raises(
        UnsupportedModel, match=r"'mamba' is not supported; supported are: .*bert"
    ) as told:
        describe(replace(ARCH, family="mamba"))
    assert "gpt_oss" in str(told.value)
