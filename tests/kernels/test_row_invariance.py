"""A row of a result does not depend on the other rows: the reference, fp32, bit for bit."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from kernel_cases import attend, make_batch, make_kv, mixture

from headrace.kernels.operators import GroupBatch, StepBatch
from headrace.kernels.reference import ReferenceOperators
from headrace.kernels.weights import DenseWeight

OPS = ReferenceOperators(torch.float32)
SIZES = [*range(1, 34), 48, 63, 64, 65, 100, 128, 200, 256]


@pytest.fixture(params=[1, 2, 3], ids=["one thread", "two threads", "three"], autouse=True)
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("width", "out"), [(64, 96), (896, 1152), (4864, 896), (160, 1000), (256, 1)]
)
def test_linear(width: int, out: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(256, width), DenseWeight(torch.randn(out, width)), torch.ones(out)
    whole = OPS.linear(x, weight, bias)
    for rows in SIZES:
        assert torch.equal(OPS.linear(x[:rows], weight, bias), whole[:rows]), rows
        assert torch.equal(OPS.linear(x[256 - rows :], weight, bias), whole[256 - rows :]), rows


def test_rowwise() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(256, 896), torch.randn(896)
    residual, gate_up = torch.randn(256, 896), torch.randn(256, 2 * 4864)
    normed = OPS.rms_norm(x, weight, 1e-6, 1.0)
    added = OPS.add_rms_norm(x, residual.clone(), weight, 1e-6, 0.0)[0]
    gated = {act: OPS.gated(gate_up, act) for act in ("silu", "gelu_tanh", "gelu")}
    for rows in SIZES:
        part = slice(256 - rows, 256)
        assert torch.equal(OPS.rms_norm(x[part], weight, 1e-6, 1.0), normed[part])
        alone = OPS.add_rms_norm(x[part], residual[part].clone(), weight, 1e-6, 0.0)[0]
        assert torch.equal(alone, added[part])
        for act, whole in gated.items():
            assert torch.equal(OPS.gated(gate_up[part], act), whole[part]), (act, rows)


def test_moe() -> None:
    torch.manual_seed(0)
    x, router = torch.randn(64, 64), torch.randn(64, 8)
    gate_up = [DenseWeight(torch.randn(192, 64)) for _ in range(8)]
    down = [DenseWeight(torch.randn(64, 96)) for _ in range(8)]
    whole = mixture(OPS, x, router, gate_up, down, 2, True, "silu")
    for rows in (1, 2, 3, 5, 8, 31, 64):
        part = mixture(OPS, x[:rows], router[:rows], gate_up, down, 2, True, "silu")
        assert torch.equal(part, whole[:rows])


def entry_of(batch: StepBatch, entry: int, low: int, high: int) -> tuple[StepBatch, slice]:
    """Queries low … high - 1 of one entry as a batch of their own."""
    begin = int(batch.query_starts[entry])
    end = int(batch.query_starts[entry + 1])
    length = int(batch.lengths[entry]) - (end - begin) + high
    rows = slice(begin + low, begin + high)
    view = batch.groups[0]
    return (
        StepBatch(
            tokens=batch.tokens[rows],
            positions=batch.positions[rows],
            query_starts=torch.tensor([0, high - low], dtype=torch.int32),
            lengths=torch.tensor([length], dtype=torch.int32),
            groups=[GroupBatch(view.tables[entry : entry + 1], view.slots[rows], view.window)],
            sample_rows=torch.tensor([high - low - 1]),
            max_count=high - low,
            max_length=length,
        ),
        rows,
    )


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(14, 2, 64), (4, 1, 256), (5, 5, 32)])
def test_attention(heads: int, kv_heads: int, width: int, window: int | None) -> None:
    """Decodes of other lengths beside it, prompts in any chunks: the same bits."""
    torch.manual_seed(0)
    entries = [(700, 1), (0, 1), (130, 1), (127, 1), (0, 300), (333, 40), (500, 1), (255, 1)]
    batch, blocks = make_batch(entries, window=None if window is None else 10_000)
    batch.groups[0].window = window
    kv = make_kv(blocks, kv_heads, 16, width)
    q = torch.randn(len(batch.tokens), heads, width)
    whole = attend(OPS, q, kv, batch, 0, width**-0.5, None)
    for entry, (_, count) in enumerate(entries):
        cuts = {0, 1, 2, 5, count // 2, count - 1, count}
        bounds = sorted(cut for cut in cuts if 0 <= cut <= count)
        for low, high in pairwise(bounds):
            alone, rows = entry_of(batch, entry, low, high)
            part = attend(OPS, q[rows], kv, alone, 0, width**-0.5, None)
            assert torch.equal(part, whole[rows]), (entry, low, high)
