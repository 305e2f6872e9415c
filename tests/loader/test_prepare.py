"""Taking weights: each once, of the right shape, nothing left; each error names the weight."""

from __future__ import annotations

import pytest
import torch

from headrace.base.arch import ModelArch
from headrace.base.errors import ModelFileError, UnsupportedModel
from headrace.kernels.model import Model
from headrace.kernels.reference import ReferenceOperators
from headrace.kernels.weights import BlockWeight, DenseWeight
from headrace.loader.prepare import prepare
from headrace.loader.weight_source import WeightSource
from headrace.models.registry import FAMILIES, describe

ARCH = ModelArch(
    family="llama",
    vocab_size=10,
    hidden=8,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=4,
    intermediate=12,
    max_context=32,
    norm_eps=1e-6,
)


def weights(arch: ModelArch = ARCH) -> dict[str, torch.Tensor | BlockWeight]:
    return {name: torch.randn(shape) for name, shape in describe(arch).tensors().items()}


def build(named: dict, arch: ModelArch = ARCH) -> Model:
    return prepare(
        describe(arch),
        WeightSource(named.items()),
        ReferenceOperators(torch.float32),
        device="cpu",
        dtype="float32",
        max_context=32,
    )


def test_every_weight_is_counted() -> None:
    named = weights()
    assert build(named).weights.nbytes == sum(weight.nbytes for weight in named.values())


@pytest.mark.parametrize("name", sorted(describe(ARCH).tensors()))
def test_missing_or_misshapen(name: str) -> None:
    named = weights()
    full = named.pop(name)
    with pytest.raises(ModelFileError, match=f"lacks the weight {name}"):
        build(named)
    with pytest.raises(ModelFileError, match=name):
        build({**named, name: full[:-1]})


def test_left_over() -> None:
    extra = {"model.layers.2.mlp.up_proj.weight": torch.zeros(1), "who.am.i": torch.zeros(1)}
    with pytest.raises(ModelFileError, match=r"2 weights .*layers.2.mlp.up_proj.weight, who.am.i"):
        build({**weights(), **extra})


def test_rope_buffers_of_old_checkpoints_do_not_matter() -> None:
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    build({**weights(), buffer: torch.zeros(2)})


def test_twice() -> None:
    with pytest.raises(ModelFileError, match="twice"):
        WeightSource([("a", torch.zeros(1)), ("a", torch.zeros(1))])


def test_vector_in_blocks() -> None:
    source = WeightSource([("norm", BlockWeight("Q8_0", torch.zeros(34).byte(), (32,)))])
    with pytest.raises(ModelFileError, match=r"norm is a vector, .*Q8_0"):
        source.take_vector("norm", 32)


def test_kinds() -> None:
    source = WeightSource(
        [
            ("a", torch.zeros(2, 2, dtype=torch.bfloat16)),
            ("b", torch.zeros(2)),
            ("c", BlockWeight("Q4_K", torch.zeros(1, 144).byte(), (1, 256))),
        ]
    )
    assert source.kinds() == {"bfloat16", "Q4_K"}


def test_tied_table_is_held_once_even_from_blocks() -> None:
    arch = ModelArch(
        **{name: getattr(ARCH, name) for name in ModelArch.__dataclass_fields__}
        | {"tied_embedding": True, "hidden": 32, "layers": 0}
    )
    named = weights(arch)
    blocks = torch.randint(0, 255, (10, 34), dtype=torch.uint8)
    blocks[:, 1] = 0x20
    named["model.embed_tokens.weight"] = BlockWeight("Q8_0", blocks, (10, 32))
    model = build(named, arch)
    refs = {ref.role: ref for ref in model.graph.weights()}
    table, head = (model.weights.weight(refs[role]) for role in ("embed", "logits"))
    assert isinstance(table, DenseWeight)
    assert isinstance(head, DenseWeight)
    assert table.data.data_ptr() == head.data.data_ptr()
    assert model.weights.nbytes == 10 * 32 * 4 + 32 * 4


def test_unknown_family() -> None:
    arch = ModelArch(
        **{name: getattr(ARCH, name) for name in ModelArch.__dataclass_fields__}
        | {"family": "mamba"}
    )
    with pytest.raises(
        UnsupportedModel, match=r"'mamba' .*supported are: .*bert, cohere"
    ) as raised:
        build(weights(), arch)
    assert all(family in raised.value.message for family in FAMILIES)
