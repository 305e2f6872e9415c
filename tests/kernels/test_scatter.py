"""The nodes `scatter` and `window`: pass, specification, every backend, price."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.base.arch import ModelArch
from headrace.base.errors import EngineFault
from headrace.base.graph import TOKENS, Graph, Node, Rows, ScatterSpec, Value, WindowSpec
from headrace.base.scatter import scattered
from headrace.base.verify import verify
from headrace.kernels.cpu.library import LibraryAbsent
from headrace.kernels.cpu.operators import CpuOperators
from headrace.kernels.reference import ReferenceOperators
from headrace.kernels.weights import DenseWeight
from headrace.kernels.windows import windows
from headrace.models.registry import describe
from headrace.roofline.hardware import DEVICES
from headrace.roofline.slices import part_seconds

ARCH = ModelArch("llama", 300, 64, 2, 4, 2, 16, 128, 256, 1e-5)


def cpu() -> CpuOperators:
    try:
        return CpuOperators(2)
    except LibraryAbsent as absent:
        pytest.skip(f"the CPU library is not built: {absent}")


def test_every_reader_of_the_embedding_reads_the_scattered_rows() -> None:
    graph = describe(ARCH)
    made = scattered(graph)
    verify(made)
    kinds = [node.kind for node in made.nodes]
    assert kinds == ["embed", "scatter", *[node.kind for node in graph.nodes[1:]]]
    embedded = made.nodes[0].out[0]
    assert made.readers(embedded) == [1]
    assert len(made.readers(made.nodes[1].out[0])) == len(graph.readers(graph.nodes[0].out[0])) > 1
    assert list(made.weights()) == list(graph.weights())


def test_a_stage_without_an_embedding_stays_as_it_is() -> None:
    graph = describe(ARCH)
    later = Graph(graph.nodes[1:], graph.outputs, graph.nodes[0].out)
    assert scattered(later) is later


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_rows_take_their_places(host: bool, count: int) -> None:
    rng = np.random.default_rng(1)
    x, rows = rng.normal(size=(7, 40)), rng.normal(size=(count, 40))
    x, rows = x.astype(np.float32), rows.astype(np.float32)
    places = rng.permutation(7)[:count]
    wanted = x.copy()
    wanted[places] = rows
    if host:
        found = cpu().scatter(x, rows, places)
    else:
        given = torch.from_numpy(x), torch.from_numpy(rows), torch.from_numpy(places)
        found = ReferenceOperators(torch.float32).scatter(*given).numpy()
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("spec", [WindowSpec(3, 1, 1), WindowSpec(3, 2, 1), WindowSpec(2, 2)])
@pytest.mark.parametrize("of", [np.asarray, torch.from_numpy])
def test_windows_are_a_convolution_without_a_sum(spec: WindowSpec, of: Any) -> None:
    x = np.arange(33, dtype=np.float32).reshape(11, 3)
    found = np.asarray(windows(of(x), spec))
    padded = np.concatenate([np.zeros((spec.before, 3), np.float32), x])
    wanted = [
        padded[first : first + spec.width].reshape(-1)
        for first in range(0, len(padded) - spec.width + 1, spec.stride)
    ]
    assert np.array_equal(found, wanted)
    assert len(found) == spec.rows(11)


def test_a_product_of_windows_is_a_convolution() -> None:
    """On rows that overlap in memory, without a copy of them."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(21, 16)).astype(np.float32)
    kernel = rng.normal(size=(32, 16, 3)).astype(np.float32)
    ops = cpu()
    matrix = np.ascontiguousarray(kernel.transpose(0, 2, 1).reshape(32, -1))
    weight = ops.prepare(DenseWeight(matrix, "conv"), "linear", None)  # type: ignore[arg-type]
    found = ops.linear(windows(x, WindowSpec(3, 2, 1)), weight, None)
    wanted = torch.nn.functional.conv1d(
        torch.from_numpy(x.T[None]), torch.from_numpy(kernel), stride=2, padding=1
    )
    assert len(found) == 10, "the last row of the convolution reads one that is not there"
    assert np.abs(found - wanted[0].T.numpy()[:10]).max() < 1e-4


HALF, MORE = Rows("N", over=2), Rows("N", more=1)


@pytest.mark.parametrize(
    ("node", "rule"),
    [
        (Node("window", (Value(TOKENS, 4),), (Value(TOKENS, 8),), (), WindowSpec(2, 2)), "number"),
        (Node("window", (Value(TOKENS, 4),), (Value(HALF, 9),), (), WindowSpec(2, 2)), "columns"),
        (Node("window", (Value(TOKENS, 4),), (Value(HALF, 8),), (), None), "spec"),
        (
            Node("window", (Value(TOKENS, 4),), (Value(MORE, 8),), (), WindowSpec(2, 1, 2)),
            "before the first",
        ),
        (Node("scatter", (Value(TOKENS, 4),), (Value(TOKENS, 5),), (), ScatterSpec()), "columns"),
        (Node("scatter", (Value(HALF, 4),), (Value(HALF, 4),), (), ScatterSpec()), "all tokens"),
    ],
)
def test_a_wrong_node_is_refused_by_name(node: Node, rule: str) -> None:
    graph = Graph((node,), {"hidden": node.out[0]}, node.reads)
    with pytest.raises(EngineFault, match=rf"node 0 \({node.kind}\).*{rule}"):
        verify(graph)


def test_rows_of_other_parts_have_a_price() -> None:
    plain, with_rows = describe(ARCH), scattered(describe(ARCH))
    hardware = replace(DEVICES["H100"], name="any")
    spent = part_seconds(with_rows, hardware, 4096) - part_seconds(plain, hardware, 4096)
    moved = 4 * 4096 * 64 * 4
    assert moved / hardware.bandwidth < spent < 10 * moved / hardware.bandwidth
