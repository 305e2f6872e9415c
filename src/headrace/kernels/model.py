"""A model as backends see it: its graph, and its weights in the backend's own form."""

from __future__ import annotations

from ..base.cut import cut, mixtures
from ..base.demand import Hidden, demand, head
from ..base.graph import EmbedSpec, Graph, WeightRef
from ..base.scatter import scattered as with_scatter
from ..base.stages import stage_of
from .arrays import Array, floats_like
from .dealing import Dealing
from .fuse import fused
from .interpret import Adding, Interpreter
from .operators import KvCache, Operators, StepBatch
from .prepared import Prepared
from .ranks import Ranks
from .timing import OperatorTimes


class Model:
    """A graph with its weights; every way to run it starts here."""

    def __init__(
        self,
        graph: Graph,
        weights: Prepared,
        full: Graph | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`full`: the whole graph, if `graph` is a rank's part of it; `ranks`: exchanges with the
        other parts."""
        self.graph, self.weights, self.ranks = graph, weights, ranks
        self.commons = None if ranks is None else ranks.memory
        self.dealing: Dealing | None = None
        """Expert placement, if ranks have whole experts."""
        self._head = head(full or graph)
        self._variants: dict[tuple[Hidden, int], Graph] = {}
        self._interpreters: dict[object, Interpreter] = {}

    def part(self, ranks: Ranks, *, dealt: bool = False) -> Model:
        """Return the part that one process computes, with the same weights; `dealt`: with whole
        experts. On the last stage, the head over chosen rows (`logits`) is not divided. Raises
        `OptionError`."""
        commons = ranks.memory
        stage = stage_of(self.graph, commons.stages, commons.stage)
        dealt = dealt and bool(mixtures(stage))
        mine = cut(stage, commons.ranks, commons.rank, dealt=dealt)
        made = Model(mine, self.weights, stage, ranks)
        if dealt:
            made.dealing = Dealing(mixtures(stage), commons.ranks, commons.rank)
        return made

    def variant(self, hidden: Hidden, *, scattered: int = 0) -> Graph:
        """Return the graph of steps with these hidden states as outputs, and logits if there is a
        head. The variant "none" is for steps without sampled rows; `scattered`: rows of other
        parts, see `scattered_of`."""
        key = hidden, scattered
        if key not in self._variants:
            graph = with_scatter(self.graph, scattered - 1) if scattered else self.graph
            self._variants[key] = demand(graph, hidden, logits=hidden != "none")
        return self._variants[key]

    def further(self, *, every: bool) -> list[str]:
        """Return the names of the outputs that `forward` returns after hidden states and logits."""
        if not self.generates:
            return []
        outputs = self.variant("every" if every else "sampled").outputs
        return [name for name in outputs if name not in ("hidden", "logits")]

    def scattered_of(self, batch: StepBatch) -> int:
        """Return the width of a step's rows from other parts as a multiple of the model's width; 0
        without such rows."""
        if batch.encoded is None:
            return 0
        return int(batch.encoded.rows.shape[1] // self.graph.outputs["hidden"].width)

    @property
    def generates(self) -> bool:
        """Whether it has a head over a vocabulary."""
        return "logits" in self.graph.outputs

    @property
    def labels(self) -> bool:
        """Whether it has a head that is applied to chosen rows (`logits`)."""
        return "labels" in self.graph.outputs

    @property
    def indices(self) -> set[str]:
        """Index arrays by which its tables are read: see `EmbedSpec.index`."""
        specs = (node.spec for node in self.graph.nodes)
        return {spec.index for spec in specs if isinstance(spec, EmbedSpec)}

    def products(self) -> list[WeightRef]:
        """Return the matrices of operator `linear`: adapters can add to these."""
        return [ref for ref in self.graph.weights() if ref.role == "linear"]

    def multiplied(self) -> int:
        """Return the number of weights in all its products except the head's."""
        products = (ref for ref in self.graph.weights() if ref.role in ("linear", "moe"))
        return sum(ref.out * ref.width * ref.copies for ref in products)

    def forward(
        self,
        ops: Operators,
        batch: StepBatch,
        cache: KvCache,
        adding: Adding | None = None,
        *,
        every: bool = False,
        times: OperatorTimes | None = None,
    ) -> tuple[Array, ...]:
        """Run a whole step, operator by operator, and return its outputs. Hidden states after the
        last norm are [N, D] if `every` is set, else [R, D] of `StepBatch.sample_rows`. fp32 logits
        are [R, V] of the sampled rows, or [0, 0] for a model without a head over a vocabulary. A
        graph's other outputs follow, see `further`; they have as many rows as hidden.

        `adding` is called after each product and may add to it; `times` around each node.
        """
        if not self.generates:
            (hidden,) = self._run("every", ops, batch, cache, adding, times)
            if self.ranks is not None:
                self.ranks.hand_on(hidden)
            return hidden, hidden[:0, :0]
        if not len(batch.sample_rows) and not every:
            (first,) = self._run("none", ops, batch, cache, adding, times)
            vocabulary = self.graph.outputs["logits"].width
            return first[:0], floats_like(first, 0, vocabulary)
        variant: Hidden = "every" if every else "sampled"
        return tuple(self._run(variant, ops, batch, cache, adding, times))

    def logits(self, ops: Operators, hidden: Array) -> Array:
        """Return fp32 logits [R, V], or an encoder's labels, for hidden [R, D] of `forward`."""
        assert self._head is not None, "a model without a head gives no logits"
        (given,) = self._head.inputs
        outputs = tuple(self._head.outputs.values())
        nodes = Interpreter(self._head.nodes, self.weights, outputs)
        return nodes.run(ops, None, None, {given: hidden})[0]

    def _run(
        self,
        hidden: Hidden,
        ops: Operators,
        batch: StepBatch,
        cache: KvCache,
        adding: Adding | None,
        times: OperatorTimes | None,
    ) -> list[Array]:
        scattered = self.scattered_of(batch)
        graph = self.variant(hidden, scattered=scattered)
        joined = None if adding is not None else ops.joined
        tokens, samples = len(batch.tokens), len(batch.sample_rows)
        key: object = hidden, scattered
        if joined is not None:
            # The backend decides which row counts have the same computation.
            device = batch.tokens.device
            classes = joined.row_class(tokens, device), joined.row_class(samples, device)
            key = hidden, scattered, *classes
        if key not in self._interpreters:
            plan = None if joined is None else joined.plan_product
            nodes = fused(graph, self.weights, plan, {"N": tokens, "R": samples})
            outputs = tuple(graph.outputs.values()) or graph.nodes[0].out
            given = self.weights, outputs, self.ranks, self.dealing
            self._interpreters[key] = Interpreter(nodes, *given)
        return self._interpreters[key].run(ops, batch, cache, {}, adding, times)
