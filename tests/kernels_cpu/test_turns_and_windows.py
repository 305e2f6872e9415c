"""Ropes that turn by axes, and windows of attention to both sides, against the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.base.arch import ModelArch, Rope
from headrace.base.errors import EngineFault
from headrace.base.graph import AttentionSpec, Graph, Node, Value
from headrace.base.scatter import scattered
from headrace.base.verify import verify
from headrace.kernels.cpu.library import LibraryAbsent
from headrace.kernels.cpu.operators import CpuOperators
from headrace.kernels.operators import GroupBatch, KvLayer, StepBatch
from headrace.kernels.prepared import RopeTable
from headrace.kernels.reference import ReferenceOperators
from headrace.kernels.rope import inverse_frequencies, rope_table
from headrace.models.registry import describe
from headrace.roofline.hardware import DEVICES
from headrace.roofline.slices import part_seconds

REF = ReferenceOperators(torch.float32)
POSITIONS = 64


@pytest.fixture(scope="module")
def ops() -> CpuOperators:
    try:
        return CpuOperators(2)
    except LibraryAbsent as absent:
        pytest.skip(f"the CPU library is not built: {absent}")


def step(tokens: int, axes: int, *, seed: int = 1) -> StepBatch:
    draw = torch.Generator().manual_seed(seed)
    bounds = torch.tensor([0, tokens], dtype=torch.int32)
    places = torch.arange(tokens)
    batch = StepBatch(
        places, places, bounds, bounds[1:], [], torch.zeros(0, dtype=torch.int64), tokens, tokens
    )
    batch.turns = torch.randint(0, POSITIONS, (axes, tokens), generator=draw)
    return batch


def table(spec: AttentionSpec) -> RopeTable:
    assert spec.rope is not None
    cos, sin = rope_table(spec.rope, spec.turned, POSITIONS)
    return RopeTable(torch.from_numpy(cos), torch.from_numpy(sin))


@pytest.mark.parametrize("size", [16, 72, 80])
@pytest.mark.parametrize("tokens", [1, 23])
def test_heads_of_an_encoder_turn_by_rows_and_columns(
    ops: CpuOperators, size: int, tokens: int
) -> None:
    torch.manual_seed(3)
    rope = Rope(1e4, "axial", axes=(0,) * (size // 4) + (1,) * (size // 4))
    spec = AttentionSpec(0, 3, 3, size, 1.0, rope, bidirectional=True)
    batch, qkv = step(tokens, 2), torch.randn(tokens, 9 * size)
    assert batch.turns is not None
    want = REF.write(qkv, spec, (), table(spec), None, batch, 0)
    got = ops.write(qkv.clone(), spec, (), table(spec), None, batch, 0)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert torch.equal(got[:, 6 * size :], qkv[:, 6 * size :]), "V stays"
    # From the definition: halves of the frequencies turn by the row, and again by the column.
    half = torch.from_numpy(inverse_frequencies(Rope(1e4), size // 2))
    angles = torch.cat([place[:, None] * half for place in batch.turns], 1).double()
    low, high = qkv[:, : size // 2].double(), qkv[:, size // 2 : size].double()
    turned = torch.cat(
        [low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], 1
    )
    torch.testing.assert_close(got[:, :size].double(), turned, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_keys_are_written_as_their_axes_turn_them(
    ops: CpuOperators, *, norms: bool, interleaved: bool
) -> None:
    torch.manual_seed(4)
    axes = (0, 1, 2, 0, 1, 2, 0, 0) if interleaved else (0, 0, 1, 1, 1, 2, 2, 2)
    spec = AttentionSpec(0, 4, 2, 16, 1.0, Rope(1e4, axes=axes), eps=1e-6)
    batch, qkv = step(20, 3), torch.randn(20, 8 * 16)
    batch.groups = [
        GroupBatch(torch.tensor([[1, 2]], dtype=torch.int32), 16 + torch.arange(20), None)
    ]
    gains = tuple(torch.randn(2, 16)) if norms else ()
    kept = [KvLayer(*torch.zeros(2, 3, 2, 16, 16)) for _ in range(2)]
    want = REF.write(qkv, spec, gains, table(spec), kept[0], batch, 0)
    got = ops.write(qkv.clone(), spec, gains, table(spec), kept[1], batch, 0)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    q = torch.randn(20, 4 * 16)
    seen = [
        each.attend(q.clone(), spec, kv, batch, 0)
        for each, kv in zip((REF, ops), kept, strict=True)
    ]
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-5, atol=1e-5)
    # Without turns, all axes are the position.
    batch.turns = torch.arange(20).expand(3, 20).contiguous()
    same = ops.write(qkv.clone(), spec, gains, table(spec), kept[1], batch, 0).clone()
    batch.turns = None
    assert torch.equal(ops.write(qkv.clone(), spec, gains, table(spec), kept[1], batch, 0), same)


def test_a_token_sees_its_window_alone(ops: CpuOperators) -> None:
    torch.manual_seed(5)
    heads, size, lengths = 2, 20, [4, 16, 1, 36]
    spec = AttentionSpec(0, heads, heads, size, 0.3, window=36, bidirectional=True)
    batch, qkv = step(sum(lengths), 2), torch.randn(sum(lengths), 3 * heads * size)
    batch.windows = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    got = ops.attend(qkv, spec, None, batch, 0)
    torch.testing.assert_close(got, REF.attend(qkv, spec, None, batch, 0), rtol=1e-5, atol=1e-5)
    start = 0
    for length in lengths:
        own = qkv[start : start + length].contiguous()
        alone = ops.attend(own, spec._replace(window=None), None, step(length, 2), 0)
        assert torch.equal(alone, got[start : start + length])
        start += length
    whole = ops.attend(qkv, spec._replace(window=None), None, batch, 0)
    assert not torch.allclose(whole, got)


def test_a_write_of_an_encoder_is_read_and_keeps_its_width() -> None:
    spec = AttentionSpec(0, 2, 2, 16, 1.0, Rope(axes=(0,) * 8), bidirectional=True)
    qkv, turned, narrow = (Value(describe(ARCH).nodes[0].out[0].rows, w) for w in (96, 96, 32))
    write, mixed = Node("write", (qkv,), (turned,), (), spec), Value(qkv.rows, 32)
    attend = Node("attend", (turned,), (mixed,), (), spec)
    verify(Graph((write, attend), {"hidden": mixed}, (qkv,)))
    with pytest.raises(EngineFault, match="makes a value that nobody reads"):
        verify(Graph((write,), {}, (qkv,)))
    with pytest.raises(EngineFault, match=r"makes \[32\] columns, not \[96\]"):
        verify(Graph((replace(write, out=(narrow,)),), {"hidden": narrow}, (qkv,)))


ARCH = ModelArch("llama", 300, 64, 3, 4, 2, 16, 128, 256, 1e-5)


def test_further_rows_are_added_after_the_first_layers() -> None:
    graph = describe(ARCH)
    made = scattered(graph, 3)
    verify(made)
    scatters = [node for node in made.nodes if node.kind == "scatter"]
    assert [tuple(node.spec) for node in scatters] == [  # type: ignore[call-overload]
        (0, False), (64, True), (128, True), (192, True),
    ]  # fmt: skip
    for layer, node in enumerate(scatters[1:]):
        readers = [made.nodes[each] for each in made.readers(node.out[0])]
        names = [each.weights[0].names[0] for each in readers if each.kind == "norm"]
        last = layer + 1 == ARCH.layers
        name = "model.norm" if last else f"model.layers.{layer + 1}.input_layernorm"
        assert names == [f"{name}.weight"]
        assert len(readers) == (1 if last else 2)


def test_windows_cost_less_than_the_whole_picture() -> None:
    spec = AttentionSpec(0, 4, 4, 64, 1.0, bidirectional=True)
    qkv, y = Value(describe(ARCH).nodes[0].out[0].rows, 768), None
    seconds = []
    for window in (None, 64):
        y = Value(qkv.rows, 256)
        node = Node("attend", (qkv,), (y,), (), spec._replace(window=window))
        graph = Graph((node,), {"hidden": y}, (qkv,))
        seconds.append(part_seconds(graph, DEVICES["H100"], 1 << 14))
    assert seconds[1] < seconds[0] / 16
