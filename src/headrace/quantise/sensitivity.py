"""The loss of the model's distribution by a small change of each product: one backward pass.

For changes δ of a product's outputs the KL divergence is, to the second order, ½ E (g · δ)², with g
the gradient of log p(y) for a y drawn from the model's own distribution (Fisher's information).
Changes of the outputs of one product by rounding are as good as independent, so their squares are
added; those of one output at all tokens of a window act together. A sample of the text is enough:
the pass gives weights of errors, no statistic to round by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from ..base.errors import UnsupportedModel
from ..base.graph import Value, WeightRef
from ..base.modelfiles import ModelFiles
from ..kernels.interpret import Interpreter
from ..kernels.prepared import Prepared
from ..kernels.reference import ReferenceOperators
from ..kernels.weights import DenseWeight, Weight
from ..loader.gguf_model import rest
from ..loader.prepare import prepare
from ..loader.progress import Progress, Silent
from ..loader.weight_source import WeightSource
from ..loader.weights import load_weights
from ..models.registry import describe
from ..worker.kv_tensors import allocate_kv
from .batches import batch_of, pool_of
from .segments import MATRICES, GraphSegment, segments
from .solve import Floats, factor
from .statistic import Windows

TOKENS = 2048
"""Tokens of the sample, at most."""
HELD = 8
"""Share of a sample's tokens that a solution does not see, as a divisor."""
ROWS = 64
"""Tokens whose distributions over the vocabulary are held at once."""


@dataclass(frozen=True, slots=True)
class Read:
    """One use of a matrix [out, in] on the sample."""

    x: Floats | None
    """[tokens, in]: its inputs; None: a table, whose rows `chosen` are read as they are."""
    grad: Floats
    """[tokens, out]: gradients of its outputs; of a head [tokens, 1], of those that were drawn."""
    starts: npt.NDArray[np.int64] | None = None
    """First token of each window, within which all changes add up; None: of each token."""
    chosen: npt.NDArray[np.int64] | None = None
    """[tokens]: rows of the table, or the outputs that a head's draw chose."""

    def inputs(self) -> Floats | None:
        """Return Σ x² of each column [in]; None: a table has no inputs."""
        return None if self.x is None else np.einsum("ti,ti->i", self.x, self.x)

    def loss(self, off: Callable[[Any], Floats], rows: int) -> float:
        """Return the sum of KL over the tokens, in nats. `off`: function from numbers of rows to
        their error [·, in]; `rows`: rows of the matrix that are tried, spread evenly."""
        if self.chosen is not None:
            some, place = np.unique(self.chosen, return_inverse=True)
            wrong = off(some)[place]
            if self.x is not None:
                wrong = np.einsum("ti,ti->t", wrong, self.x)[:, None]
            return 0.5 * float(np.square(self.grad * wrong).sum(dtype=np.float64))
        out = self.grad.shape[1]
        some = np.linspace(0, out - 1, min(rows, out)).astype(np.int64)
        assert self.x is not None
        moved = self.grad[:, some] * (self.x @ off(some).T)
        if self.starts is not None:
            moved = np.add.reduceat(moved, self.starts, axis=0)
        return float(0.5 * np.square(moved).sum(dtype=np.float64) * out / len(some))


def gains(x: Floats) -> tuple[float, float]:
    """Return the error that GPTQ leaves on inputs x [tokens, in], in that of rounding to the
    nearest: on the tokens that it was solved for, and on others. A solution of more tokens lies
    between.

    Of a solution by U with UᵀU = G⁻¹ the changes of a row are Σ e_j / U_jj · U_j, with rounding
    errors e that are alike in all columns.
    """
    rest = max(1, len(x) // HELD)
    own, other = x[:-rest], x[-rest:]
    gram = own.T @ own
    order = np.argsort(-np.diagonal(gram), kind="stable")
    upper = factor(gram[np.ix_(order, order)])
    upper /= np.diagonal(upper)[:, None]
    found = []
    for some in (own, other):
        left = float(np.square(some[:, order] @ upper.T).sum(dtype=np.float64))
        nearest = float(np.square(some).sum(dtype=np.float64))
        found.append(min(1.0, left / nearest) if nearest else 1.0)
    return min(found), max(found)


Visit = Callable[[Mapping[str, Sequence[Read]]], None]
"""Function that takes the reads of some matrices, by canonical name, before they are dropped."""


def sensitivities(
    files: ModelFiles, windows: Windows, visit: Visit, progress: Progress | None = None
) -> int:
    """Run windows through the model and back; `visit` gets the reads of each segment's matrices.
    Return the number of tokens.

    Raises `UnsupportedModel` for an operator that has no gradient.
    """
    progress = progress or Silent()
    cut = segments(describe(files.arch))
    total, longest = sum(map(len, windows)), max(map(len, windows))
    before: list[dict[Value, torch.Tensor]] = []
    values: dict[Value, torch.Tensor] = {}
    progress.start(2 * total * len(cut), "weighing", share=True)
    try:
        for segment in cut:
            before.append({value: values[value] for value in segment.graph.inputs})
            if segment is cut[-1]:
                break
            ops = _Gradients()
            with torch.inference_mode():
                values |= _run(files, segment, ops, windows, before[-1], longest)
            rest(files)
            progress.advance(total)
        values.clear()
        grads: dict[Value, torch.Tensor] = {}
        for segment in reversed(cut):
            visit(_back(files, segment, windows, before.pop(), grads, longest))
            rest(files)
            progress.advance(total)
    finally:
        progress.done()
    return total


def _run(
    files: ModelFiles,
    segment: GraphSegment,
    ops: _Gradients,
    windows: Windows,
    given: Mapping[Value, torch.Tensor],
    longest: int,
) -> dict[Value, torch.Tensor]:
    graph = segment.graph
    source = WeightSource(load_weights(files, {*graph.tensors()}))
    weights: Prepared = prepare(
        graph, source, ops, device="cpu", dtype="float32", max_context=longest
    ).weights
    ops.watch([*graph.weights()], weights, windows)
    outputs = tuple(graph.outputs.values())
    pool = pool_of(graph, windows, "float32")
    nodes = Interpreter(graph.nodes, weights, outputs)
    found = nodes.run(ops, batch_of(windows, pool), allocate_kv(pool, "cpu"), dict(given))
    return dict(zip(outputs, found, strict=True))


def _back(
    files: ModelFiles,
    segment: GraphSegment,
    windows: Windows,
    before: Mapping[Value, torch.Tensor],
    grads: dict[Value, torch.Tensor],
    longest: int,
) -> dict[str, list[Read]]:
    """Run a segment again, now back from the gradients of its outputs, and leave those of its
    inputs in `grads`."""
    ops = _Gradients()
    with torch.enable_grad():
        leaves = {value: one.clone().requires_grad_() for value, one in before.items()}
        try:
            found = _run(files, segment, ops, windows, leaves, longest)
            ends = [(found[value], grads.pop(value)) for value in found if value in grads]
            ends += ops.ends
            torch.autograd.backward([one for one, _ in ends], [grad for _, grad in ends])
        except RuntimeError as error:
            raise UnsupportedModel(
                f"a budget weighs products by gradients, and this model has a part without: "
                f"{str(error).splitlines()[0]:.120}",
                param="budget",
            ) from None
    for value, leaf in leaves.items():
        if leaf.grad is not None:
            grads[value] = grads[value] + leaf.grad if value in grads else leaf.grad
    return ops.reads()


class _Gradients(ReferenceOperators):
    """The reference in fp32 with gradients; it keeps what each product read and made."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.ends: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Inputs of heads, and their gradients."""
        self._bounds = np.zeros(1, np.int64)
        self._refs: dict[int, WeightRef] = {}
        self._kept: list[tuple[WeightRef, Any, torch.Tensor]] = []
        self._ends: list[tuple[int, Read]] = []
        self._tables: list[tuple[int, torch.Tensor, float, torch.Tensor]] = []
        self._draws = torch.Generator().manual_seed(0)

    def watch(self, refs: Sequence[WeightRef], weights: Prepared, windows: Windows) -> None:
        """Keep reads of these products over these windows."""
        self._bounds = np.cumsum([0, *map(len, windows)])
        for ref in refs:
            if ref.role == "embed":
                self._refs[id(weights.weight(ref))] = ref
            if ref.role in ("moe", "heads"):
                each = [ref.copy(number) for number in range(ref.copies)]
                self._refs |= zip(map(id, weights.copies(ref)), each, strict=True)
            elif ref.role in MATRICES:
                self._refs[id(weights.weight(ref))] = ref

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        assert isinstance(weight, DenseWeight)
        y = functional.linear(x, weight.data)
        if y.requires_grad and id(weight) in self._refs:
            y.retain_grad()
            self._kept.append((self._refs[id(weight)], x.detach(), y))
        return y if bias is None else y + bias

    def embed(self, tokens: torch.Tensor, weight: Weight, scale: float) -> torch.Tensor:
        rows = super().embed(tokens, weight, scale)
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            rows = rows.detach().requires_grad_()
            self._tables.append((id(weight), tokens, scale, rows))
        return rows

    def logits(self, x: torch.Tensor, weight: Weight, softcap: float | None) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        grad = torch.zeros_like(leaf)
        drawn, left = [], []
        for first in range(0, len(leaf), ROWS):
            some = leaf[first : first + ROWS].detach().requires_grad_()
            logs = torch.log_softmax(super().logits(some, weight, softcap), -1)
            y = torch.multinomial(logs.detach().exp(), 1, generator=self._draws)
            of_y = logs.gather(1, y)
            torch.autograd.backward([of_y.sum()])
            assert some.grad is not None
            grad[first : first + ROWS] = some.grad
            drawn.append(y)
            left.append(torch.sqrt_(-torch.expm1(of_y.detach())))
        self.ends.append((x, grad))
        # The square of these is the variance of a change under the distribution, of the draw's own.
        spread, chosen = torch.cat(left).numpy(), torch.cat(drawn)[:, 0].numpy()
        read = Read(x.detach().numpy(), spread, chosen=chosen)
        self._ends.append((id(weight), read))
        return x.new_empty(len(x), 0)

    def reads(self) -> dict[str, list[Read]]:
        """Return what each matrix read, once gradients are there."""
        found: dict[str, list[Read]] = {}
        for ref, x, y in self._kept:
            if y.grad is None:
                continue  # Nothing later reads it.
            grads, inputs = y.grad.numpy(), x.numpy()
            # An expert sees some tokens of a window; which, is not known here.
            starts = self._bounds[:-1] if len(inputs) == self._bounds[-1] else None
            ends = np.cumsum(ref.rows)
            for name, rows, end in zip(ref.names, ref.rows, ends, strict=True):
                found.setdefault(name, []).append(Read(inputs, grads[:, end - rows : end], starts))
        for weight, read in self._ends:
            found.setdefault(self._refs[weight].names[0], []).append(read)
        for weight, tokens, scale, made in self._tables:
            if made.grad is not None and weight in self._refs:
                grads = made.grad.numpy() * np.float32(scale)
                read = Read(None, grads, chosen=tokens.numpy())
                found.setdefault(self._refs[weight].names[0], []).append(read)
        return found
