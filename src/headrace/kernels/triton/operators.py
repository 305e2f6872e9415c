"""The public operators on an NVIDIA GPU: Triton kernels, and the library where it is at the limit.

Dense products go to cuBLASLt through torch; with `deterministic`, to our own kernel whose rows
are invariant.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...base.graph import AttentionSpec, LatentSpec, Role, RouteSpec
from ...base.recurrent import DeltaSpec, SsmSpec
from ..arrays import tensor
from ..attention_lists import plan_step
from ..attention_plan import PER_MULTIPROCESSOR, Planner
from ..cuda_graphs import CudaGraphMaker, GraphProgram
from ..draws import Drawing, DrawParameters
from ..fuse import Norm, Way
from ..operators import Dequantise, KvCache, KvLayer, StateLayer, StepBatch, StepLimits
from ..prepared import RopeTable
from ..program import CallByCall, Program
from ..ranks import ExpertShare
from ..reference import ReferenceOperators, unpack_rows
from ..weights import (
    BlockWeight,
    DenseWeight,
    Fp8Weight,
    PackedWeight,
    StackedWeight,
    TiledWeight,
    Weight,
)
from . import gated, head_products, moe, norm, rope_cache, sampling, scatter, short_conv, states
from .ahead import compiled_together, warm
from .attention_decode import attention_decode, head_tiles
from .attention_prefill import attention_prefill
from .head_products import FEW_ROWS
from .library import ScaledProducts, WideProducts
from .moe_tiles import ExpertTables
from .packed import merge_neighbours, merge_tiled, tile_weight
from .product_dense import product_dense
from .product_fp8 import (
    BLOCK,
    merge_fp8,
    product_codes,
    product_fp8,
    quantise_rows,
    quantise_weight,
)
from .product_packed import product_packed
from .product_packed_skinny import PackedSkinnyConfig, product_packed_skinny
from .product_skinny import SkinnyConfig, product_skinny
from .split import make_tickets
from .table import Table, architecture, multiplies_fp8

EXPERT_ROWS = 5
"""Mean rows of an expert up to which 7 % of them, if tokens choose at random, have more than 8."""
FEW_TOKENS = 8
"""Most tokens of an entry with which attention reads KV as fast as with one. With eight heads per
group they are 64 query rows, a tile that leaves enough registers for loads in flight."""
LATENT_SHARE = 4
"""Number of KV heads as which latents are planned. A program over them fills half of a
multiprocessor; eight programs over other heads would run on it one after the other."""
FP8_OUTS = 256
"""A matrix with fewer outputs (a router) stays as it is: nothing to gain, and its ties matter."""
Vector = torch.Tensor | None


class TritonOperators(ReferenceOperators):
    """See `Operators` for the meaning and the shapes of each method; `embed`, `add`, `select`,
    `activate` and `layer_norm` are the reference's: one kernel of the library each."""

    name = "triton"
    scatter = scatter.scatter

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        deterministic: bool = False,
        quantise: str = "auto",
        architecture: str | None = None,
    ) -> None:
        """`architecture`: a row of the table, if it is not to be that of the device."""
        super().__init__(dtype)
        self._quantise = quantise
        self._architecture = architecture
        self.deterministic = deterministic
        self.drawing = Drawing(sampling.draw, sampling.argmax)
        """Draws without a sort, and without reading anything from the device: the host never
        waits."""
        self._tables: dict[torch.device, Table] = {}
        self._experts = ExpertTables(dtype)
        self._tickets: dict[torch.device, torch.Tensor] = {}
        self._scaled, self._wide = ScaledProducts(), WideProducts()

    @property
    def joined(self) -> TritonOperators:
        return self

    def planner(self, cache: KvCache, drafts: int = 0) -> Planner:
        # One kernel for every entry where rows must be invariant: the two sum in other orders.
        few = 1 + drafts if drafts < FEW_TOKENS else 1
        heads = cache.first.k.shape[1]
        if cache.first.k is cache.first.v:
            heads, few = LATENT_SHARE, 1
        device, programs = cache.first.k.device, None
        if device.type == "cuda":
            facts = torch.cuda.get_device_properties(device)
            programs = PER_MULTIPROCESSOR * facts.multi_processor_count
        return Planner(heads, cache.windows, 0 if self.deterministic else few, programs)

    def prepare(self, weight: Weight, role: Role, dequantise: Dequantise) -> Weight:
        """Keep dense weights dense, tile packed ones, and make tables dense."""
        if isinstance(weight, StackedWeight):
            parts = [self.prepare(part, role, dequantise) for part in weight.parts]
            if all(isinstance(part, DenseWeight) for part in parts):
                return DenseWeight(torch.cat([_data(part) for part in parts]))
            whole = merge_tiled(parts) or merge_fp8(parts)
            return whole or StackedWeight(tuple(merge_neighbours(parts)))  # type: ignore[arg-type]
        if role == "heads":
            return DenseWeight(self._dense(weight, dequantise))
        if isinstance(weight, DenseWeight):
            small = weight.shape[0] < FP8_OUTS
            if self._quantise == "fp8" and role in ("linear", "moe") and not small:
                return quantise_weight(weight.data)
            return DenseWeight(weight.data.to(self.dtype).contiguous())
        if isinstance(weight, Fp8Weight):
            fp8 = multiplies_fp8(weight.data.device, self._architecture)
            if not fp8 or role not in ("linear", "moe"):
                return DenseWeight(weight.values().to(self.dtype))
            return weight.per_row()
        if isinstance(weight, BlockWeight):
            if role != "embed":
                return tile_weight(dequantise.unpack(weight), e2m1=weight.kind == "MXFP4")
            return dequantise(weight, self.dtype)
        if isinstance(weight, PackedWeight):
            if role != "embed" and weight.order is None:
                return tile_weight(weight, e2m1=weight.unit is not None)
            return DenseWeight(unpack_rows(weight).to(self.dtype))
        return weight

    def compile(self, plain: CallByCall, limits: StepLimits) -> Program | None:
        """Make CUDA graphs; compile every kernel that steps without a graph need."""
        cache = plain.cache
        if cache.first.k.device.type != "cuda":
            return None
        warm(plain, limits, self.warm_draws)
        program = GraphProgram(plain, limits, CudaGraphMaker(cache.first.k.device))
        program.capture()
        return program

    def compile_kernels(self, plain: CallByCall, limits: StepLimits) -> None:
        if plain.cache.first.k.device.type == "cuda":
            with compiled_together():
                warm(plain, limits, self.warm_draws)

    def warm_draws(self, logits: torch.Tensor) -> None:
        """Run every kernel from logits [R, V] to tokens, for each set of filters of a step."""
        one = torch.ones(len(logits), device=logits.device)
        sampling.argmax(logits)
        for top_k in (None, one.long()):
            for top_p in (None, one):
                sampling.draw(logits, DrawParameters(one, top_k, top_p, one, one.double()))

    def graph_bytes(self, plain: CallByCall, limits: StepLimits) -> int:
        """Estimate the device bytes that the graphs of `compile` will take, from a few of them."""
        device = plain.cache.first.k.device
        if device.type != "cuda":
            return 0
        return GraphProgram(plain, limits, CudaGraphMaker(device)).estimate()

    rms_norm = staticmethod(norm.rms_norm)
    add_rms_norm = staticmethod(norm.add_rms_norm)

    def plan_product(self, weight: Weight, rows: int) -> Way:
        """Return how `linear` of this weight with this many rows is computed: see
        `kernels.fuse`."""
        if isinstance(weight, Fp8Weight):
            return "codes"
        if isinstance(weight, TiledWeight):
            return "library" if self._packed_skinny(weight, rows) is None else "around"
        skinny = isinstance(weight, DenseWeight) and self._skinny(weight, rows) is not None
        return "around" if skinny else "library"

    def row_class(self, rows: int, device: torch.device) -> object:
        """Return the class of a row count. `plan_product` depends on it and the weight alone; there
        are few classes."""
        if self.deterministic:
            return None
        table = self._table(device)
        return table.skinny(rows).library, table.packed_skinny(rows).serves

    def norm_codes(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm_of: Norm, consumer: Weight
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return norm.rms_norm_codes(x, residual, *norm_of, "fp8", _code_group(consumer))

    def gated_codes(
        self, gate_up: torch.Tensor, activation: str, consumer: Weight
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return gated.gated_codes(gate_up, activation, "fp8", _code_group(consumer))

    def linear_codes(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Compute `linear` from codes. `dtype`: of the result, if it is not that of activations."""
        assert isinstance(weight, Fp8Weight)
        dtype = dtype or self.dtype
        skinny = self._skinny(weight, len(codes))
        if skinny is not None:
            tickets = self._ticket(codes.device)
            return product_skinny(codes, weight, bias, skinny, tickets, dtype, scales=scales)
        config, library = self._table(codes.device).fp8(self._rows(codes)), self._library(codes)
        return product_codes(codes, scales, weight, bias, config, dtype, library=library)

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        return self._product(x, weight, bias, x.dtype)

    def write(
        self,
        qkv: torch.Tensor,
        spec: AttentionSpec,
        norms: Sequence[torch.Tensor],
        rope: RopeTable | None,
        kv: KvLayer | None,
        batch: StepBatch,
        group: int,
    ) -> torch.Tensor:
        assert kv is not None, "no kernel for attention to both sides"
        return rope_cache.rope_and_cache(qkv.contiguous(), spec, norms, rope, kv, batch, group)

    def attend(
        self,
        q: torch.Tensor,
        spec: AttentionSpec,
        kv: KvLayer | None,
        batch: StepBatch,
        group: int,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend; entries of few tokens are cut along the KV, the others along their queries."""
        assert kv is not None, "no kernel for attention to both sides"
        assert batch.reach is None, "no kernel for tokens that see each other"
        flat, width = q, spec.size
        q = flat.view(len(flat), spec.heads, width)
        out = torch.empty_like(q)
        table, view = self._table(q.device), batch.groups[group]
        coded = kv.k_scale is not None
        plan = batch.plan
        if plan is None:
            windows = [each.window for each in batch.groups]
            plan = plan_step(batch, self.planner(KvCache([kv], [group], windows)))
            # A batch that may come again has other numbers then.
            batch.plan = None if batch.fixed else plan
        given = view, out, spec.scale, spec.softcap
        reach, rope = batch.max_length, spec.rotated or 0 if spec.latent else 0
        attention_prefill(
            q,
            kv,
            plan,
            *given,
            table.prefill(width * q.element_size() // 2, coded=coded),
            longest=reach if view.window is None else min(reach, view.window + batch.max_count),
            sinks=sinks,
            rope=rope,
            chunked=spec.chunked,
        )
        attention_decode(
            q,
            kv,
            plan,
            group,
            *given,
            table.latents(spec.heads // head_tiles(spec.heads))
            if rope
            else table.decode(width, coded=coded),
            self._ticket(q.device),
            sinks=sinks,
            rope=rope,
            chunked=spec.chunked,
        )
        return out.view_as(flat)

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        return gated.gated(gate_up.contiguous(), activation)

    def absorb(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        rotary: torch.Tensor,
        spec: LatentSpec,
        packing: Sequence[Weight],
    ) -> torch.Tensor:
        table, few = self._experts.find(packing), self.deterministic or len(q) <= FEW_ROWS
        return head_products.absorb(q, latent, rotary, spec, table, few=few)

    def unpack(
        self, mixed: torch.Tensor, spec: LatentSpec, unpacking: Sequence[Weight]
    ) -> torch.Tensor:
        table, few = self._experts.find(unpacking), self.deterministic or len(mixed) <= FEW_ROWS
        return head_products.unpack(mixed, spec, table, few=few)

    short_conv = staticmethod(short_conv.short_conv)

    def recur(
        self,
        given: Sequence[torch.Tensor],
        spec: DeltaSpec | SsmSpec,
        weights: Sequence[torch.Tensor],
        layer: StateLayer,
        batch: StepBatch,
        group: int,
    ) -> torch.Tensor:
        columns = states.FEW_COLUMNS if self.deterministic else None
        return states.recur(given, spec, weights, layer, batch, group, columns=columns)

    def multiply(self, x: torch.Tensor, gate: torch.Tensor, activation: str) -> torch.Tensor:
        return gated.multiply(x, gate, activation)

    def route(
        self, logits: torch.Tensor, spec: RouteSpec, bias: Vector, gains: Vector = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return moe.route(logits, spec, bias, gains)

    def experts(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        shares: torch.Tensor,
        gate_up: list[Weight],
        down: list[Weight],
        activation: str,
        biases: tuple[torch.Tensor, torch.Tensor] | None = None,
        inside: bool = False,
        share: ExpertShare | None = None,
    ) -> torch.Tensor:
        assert share is None, "ranks share no model on these kernels"
        experts, table = len(gate_up), self._table(x.device)
        rows = 1 if self.deterministic else -(-chosen.numel() // experts)
        # Tiles of 8 rows as long as hardly an expert has more of them.
        short = rows <= EXPERT_ROWS and not self.deterministic
        packed = table.packed_skinny(8 if short else max(16, rows))
        return moe.experts(
            x,
            chosen,
            shares,
            self._experts.find(gate_up),
            self._experts.find(down),
            experts,
            activation,
            table.moe(rows),
            packed if packed.serves else None,
            None if self.deterministic else self._ticket(x.device),
            biases,
            inside,
        )

    def logits(
        self,
        x: torch.Tensor,
        weight: Weight,
        softcap: float | None,
        home: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = self._product(x, weight, None, torch.float32, home)
        return out if softcap is None else torch.tanh_(out.div_(softcap)).mul_(softcap)

    def _product(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        home: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute a product. `home` [N, out] of `dtype`, without gaps: memory where the result may
        be written."""
        table = self._table(x.device)
        if isinstance(weight, StackedWeight | TiledWeight):
            y = x.new_empty(len(x), weight.shape[0], dtype=dtype) if home is None else home
            low = 0
            for part in weight.parts if isinstance(weight, StackedWeight) else (weight,):
                high = low + part.shape[0]
                self._part(x, part, None if bias is None else bias[low:high], y[:, low:high])
                low = high
            return y
        if isinstance(weight, Fp8Weight):
            if self._skinny(weight, len(x)) is not None:
                codes, scales = quantise_rows(x, blocked=False)
                return self.linear_codes(codes, scales, weight, bias, dtype)
            config, library = table.fp8(self._rows(x)), self._library(x)
            return product_fp8(x, weight, bias, config, dtype, library=library)
        skinny = self._skinny(weight, len(x))
        if skinny is not None:
            assert isinstance(weight, DenseWeight)
            tickets = self._ticket(x.device)
            return product_skinny(x, weight, bias, skinny, tickets, dtype, y=home)
        if self.deterministic:
            return product_dense(x, _data(weight), bias, table.dense(), dtype, y=home)
        return self._wide.linear(x, _data(weight), bias, dtype, home)

    def _part(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, y: torch.Tensor
    ) -> None:
        """Multiply by a weight or one part of a stacked one, into its columns of the result."""
        if isinstance(weight, TiledWeight):
            skinny = self._packed_skinny(weight, len(x))
            if skinny is not None:
                tickets = self._ticket(x.device)
                product_packed_skinny(x, weight, bias, skinny, tickets, y=y)
            else:
                config = self._table(x.device).packed(self._rows(x))
                product_packed(x, weight, bias, config, y=y)
        else:
            y.copy_(self._product(x, weight, bias, y.dtype))

    def linear_around(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None,
        norm: Norm | None,
        activation: str,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        tickets = self._ticket(x.device)
        if isinstance(weight, TiledWeight):
            packed = self._packed_skinny(weight, len(x))
            assert packed is not None, "see `plan_product`"
            if norm is not None:
                x = self.rms_norm(x, *norm)
            return product_packed_skinny(
                x, weight, bias, packed, tickets, residual=residual, activation=activation
            )
        assert isinstance(weight, DenseWeight), "see `plan_product`"
        config = self._skinny(weight, len(x))
        assert config is not None, "see `plan_product`"
        # The gain is applied before rms(x): in fp16 large numbers may then leave its range.
        if norm is not None and (not config.norm or x.dtype == torch.float16):
            x, norm = self.rms_norm(x, *norm), None
        return product_skinny(
            x, weight, bias, config, tickets, norm=norm, residual=residual, activation=activation
        )

    def _skinny(self, weight: Weight, rows: int) -> SkinnyConfig | None:
        """Return the cut of the product of few rows, if it serves."""
        if self.deterministic or not isinstance(weight, DenseWeight | Fp8Weight):
            return None
        coded = isinstance(weight, Fp8Weight)
        if isinstance(weight, Fp8Weight) and weight.blocked:
            return None
        config = self._table(weight.data.device).skinny(rows, coded=coded)
        return None if config.library else config

    def _packed_skinny(self, weight: TiledWeight, rows: int) -> PackedSkinnyConfig | None:
        """Return the skinny product's configuration for packed weights; None: another kernel
        serves."""
        if self.deterministic:
            return None
        config = self._table(weight.codes.device).packed_skinny(rows)
        return config if config.serves else None

    def _ticket(self, device: torch.device) -> torch.Tensor:
        """Return the tickets. They are made before anything is captured: the warm-up's first step
        comes through here."""
        if device not in self._tickets:
            self._tickets[device] = make_tickets(device)
        return self._tickets[device]

    def _library(self, x: torch.Tensor) -> ScaledProducts | None:
        """Return the library, if it may take products of 8-bit numbers with a scale per row."""
        return self._scaled if x.is_cuda and not self.deterministic else None

    def _rows(self, x: torch.Tensor) -> int:
        """Return the rows by which a cut is chosen; if it is part of the result, one cut for
        all."""
        return 1 if self.deterministic else len(x)

    def _table(self, device: torch.device) -> Table:
        if device not in self._tables:
            self._tables[device] = Table(self._architecture or architecture(device))
        return self._tables[device]


def _code_group(consumer: Weight) -> int:
    """Return the columns that share a scale in the input of a product with `consumer`; 0: all of a
    row."""
    assert isinstance(consumer, Fp8Weight), "see `plan_product`"
    return BLOCK if consumer.blocked else 0


def _data(weight: Weight) -> torch.Tensor:
    assert isinstance(weight, DenseWeight), "a weight that `prepare` did not make"
    return tensor(weight.data)
