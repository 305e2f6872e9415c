"""A part of a model in a worker: one step graph with its weights, then its KV and program."""

from __future__ import annotations

from collections.abc import Mapping

from ..base.graph import Graph
from ..base.step import PoolShape
from ..kernels.arrays import Array, tensor
from ..kernels.backend import Shelf
from ..kernels.operators import StepLimits
from ..kernels.prepared import Prepared
from ..kernels.program import CallByCall, Program, Provider
from ..kernels.weights import LoraWeight
from ..loader.prepare import prepare
from ..loader.weight_source import WeightSource
from .kv_tensors import PoolMemory, allocate_kv, leave_biases_out
from .loading import choose_operators, inference_of
from .options import Resolved, WorkerOptions


class Part:
    """One step graph that serves: loaded by the constructor, run after `allocate`."""

    def __init__(
        self,
        graph: Graph,
        source: WeightSource,
        options: WorkerOptions,
        resolved: Resolved,
        max_context: int,
        *,
        shelf: Shelf | None = None,
        beside: Part | None = None,
        shared: Prepared | None = None,
    ) -> None:
        """Choose the operators and load the weights. `beside`: a part that computes at other times,
        whose threads serve this one too. `shared`: weights that are used where `source` has none.
        """
        self._device = resolved.device
        self.operators: Provider
        self.operators, self.decisions = choose_operators(
            graph, options, resolved, source, shelf, None if beside is None else beside.operators
        )
        self.inference = inference_of(self.operators)
        with self.inference():
            self.model = prepare(
                graph,
                source,
                self.operators,
                device=resolved.device,
                dtype=resolved.dtype,
                max_context=max_context,
                shared=shared,
            )

    def activations(self, rows: Array) -> Array:
        """Return fp32 rows of the host as the operators take activations."""
        if self.operators.host:
            return rows
        model = self.model
        like = next(ref for ref in model.graph.weights() if ref.role == "vector")
        return tensor(rows).to(model.weights.vector(like))

    @property
    def headless(self) -> bool:
        """Whether the model's head is on a later pipeline stage."""
        commons = self.model.commons
        return commons is not None and commons.stage + 1 < commons.stages

    def allocate(
        self,
        pool: PoolShape,
        limits: StepLimits,
        *,
        memory: PoolMemory | None = None,
        additions: Mapping[tuple[str, ...], LoraWeight] | None = None,
    ) -> None:
        """Make the KV of a pool and whatever the backend prepares for whole steps. `memory`,
        `additions`: see `allocate_kv` and `CallByCall`."""
        with self.inference():
            self.cache = allocate_kv(pool, self._device, host=self.operators.host, memory=memory)
            leave_biases_out(self.model, self.operators.name, self.cache)
            self.plain = CallByCall(
                self.model, self.operators, self.cache, self.operators.drawing, additions
            )
            self.program: Program = self.operators.compile(self.plain, limits) or self.plain
