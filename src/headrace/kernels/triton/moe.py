"""Mixture of experts: routing, placing without a sort, and grouped products.

Arithmetic. With `active` of `experts` chosen per token, N tokens touch at most N · active weight
matrices of 2 · D · I elements each. While N · active is below the number of experts the weights'
bytes bind, since each token needs other experts. Beyond that every expert is read once, and the
products become dense ones of N · active / experts rows.

The steps are all on the device, without a sort or the host:

1. `_route`: one program per token takes the `active` experts of the highest score, of groups and
   with a bias where the model has them, and their routing weights.
2. `_count`: one program per `TILE` assignments counts them by expert, and empties its part of the
   list.
3. `_place`: one program per `TILE` assignments adds up what the programs before it counted and
   writes its own to the list: by expert, each expert from a multiple of the row tile on, in
   ascending order; tiles know their expert. Steps of up to `SINGLE_TOKENS` do without both: every
   assignment is a tile, and an expert that two tokens chose comes from L2 again.
4. `moe_products`, `moe_packed`: a product per tile; rows are gathered by the list, the weights of
   all experts are found through a table of addresses. Dense, packed or fp8; for fp8 the gate writes
   codes, for the others the product takes it in where an expert has few rows.
5. `_gather`: a token adds its experts' results in ascending order of expert.

A layer of one token is 4 kernels so (route, two products, gather; with fp8 two more) instead of 9.

A row's values never depend on which other rows share its tile (row invariance).
Source of the idea: Gale et al., "MegaBlocks" (2022), without the sort.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...base.graph import RouteSpec
from .gated import gated, gated_codes, softplus
from .moe_packed import grouped_packed
from .moe_products import MoeConfig, grouped_product
from .moe_tiles import ExpertTable, Tiles
from .product_fp8 import BLOCK, quantise_rows
from .product_packed_skinny import PackedSkinnyConfig

TILE = 256
"""Assignments per program that counts or places: one number for all steps, so that none is compiled
for. Each is compared with all of its program's, and each program reads what all others counted:
both are some 60,000 numbers for 8,000 tokens to eight of 128 experts."""
COUNTED = 2048
"""Counts that are read per turn."""
COMPARED = tl.constexpr(16)
"""Assignments that all of a program's are compared with in one turn. All at once spill."""
SINGLE_TOKENS = 4
"""Most tokens for which every assignment is a tile: of 32 assignments to 128 experts 29 are of
different ones. The results are the same."""
GATE_ROWS = 16
"""Most rows of a tile that takes the gate in; larger ones need the room for two sums."""


@triton.jit
def _route_kernel(
    router,
    bias,
    gains,
    chosen,
    shares,
    scale,
    SCORES: tl.constexpr,
    EACH: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    EACH_PADDED: tl.constexpr,
    ACTIVE_GROUPS: tl.constexpr,
    BEST: tl.constexpr,
    ACTIVE: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """Route one token. Experts are GROUPS groups of EACH; see `RouteSpec`."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_PADDED)
    member = tl.arange(0, EACH_PADDED)
    real = (group < GROUPS)[:, None] & (member < EACH)[None, :]
    number = group[:, None] * EACH + member[None, :]
    at = router + token * (GROUPS * EACH) + number
    wish = tl.load(at, mask=real, other=float("-inf")).to(tl.float32)
    if SCORES != "softmax":
        masses = 1.0 / (1.0 + tl.exp(-wish)) if SCORES == "sigmoid" else tl.sqrt_rn(softplus(wish))
        total = 1.0 + 0.0 * tl.sum(tl.sum(tl.where(real, masses, 0.0), 1), 0)
        wish = tl.where(real, masses, float("-inf"))
    else:
        masses = tl.exp(wish - tl.max(tl.max(wish, 1), 0))
        total = tl.sum(tl.sum(masses, 1), 0)
    if bias is not None:
        own = tl.load(bias + number, mask=real, other=0.0).to(tl.float32)
        wish = tl.where(real, masses / total + own, float("-inf"))
    # Whatever overflowed, `ACTIVE` experts are chosen, each once: their numbers become addresses.
    # That a logit was NaN shows in the shares, which are then NaN, and in the row's result.
    wish = tl.where(wish == wish, wish, float("-inf"))
    if GROUPS > 1:
        rest = wish
        worth = tl.zeros([GROUPS_PADDED], tl.float32)
        for _ in tl.static_range(BEST):
            largest = tl.max(rest, 1)
            worth += largest
            same = (rest == largest[:, None]) & real
            first = tl.min(tl.where(same, member[None, :], EACH_PADDED), 1)
            rest = tl.where(member[None, :] == first[:, None], float("-inf"), rest)
        worth = tl.where(worth == worth, worth, float("-inf"))
        open = tl.zeros([GROUPS_PADDED], tl.int32)
        for _ in tl.static_range(ACTIVE_GROUPS):
            free = (open == 0) & (group < GROUPS)
            largest = tl.max(tl.where(free, worth, float("-inf")), 0)
            best = tl.min(tl.where(free & (worth == largest), group, GROUPS_PADDED), 0)
            open = tl.where(group == best, 1, open)
        wish = tl.where((open == 1)[:, None], wish, float("-inf"))
        there = real & (open == 1)[:, None]
    else:
        there = real
    # In ascending order of expert, with the padding of groups between them.
    PLACES: tl.constexpr = GROUPS_PADDED * EACH_PADDED
    ranks = tl.reshape(wish, [PLACES])
    masses = tl.reshape(masses, [PLACES])
    expert = tl.reshape(number, [PLACES])
    allowed = tl.reshape(there.to(tl.int32), [PLACES]) == 1
    kept = tl.zeros([PLACES], tl.int32)
    for _ in tl.static_range(ACTIVE):
        free = (kept == 0) & allowed
        largest = tl.max(tl.where(free, ranks, float("-inf")), 0)
        # The smallest number among equals.
        best = tl.min(tl.where(free & (ranks == largest), expert, GROUPS * EACH), 0)
        kept = tl.where((expert == best) & allowed, 1, kept)
    if NORMALISE:
        # The added part is 0, or NaN if a logit that was not chosen is NaN.
        lost = 0.0 * total
        total = tl.sum(tl.where(kept == 1, masses, 0.0), 0) + lost
        if SCORES != "softmax":
            total += 1e-20
    # Written in ascending order of expert: the place among the kept ones.
    place = tl.cumsum(kept, 0) - 1
    to = token * ACTIVE + place
    tl.store(chosen + to, expert, mask=kept == 1)
    found = masses / total
    if gains is not None:
        found *= tl.load(gains + expert, mask=kept == 1, other=0.0).to(tl.float32)
    tl.store(shares + to, found * scale, mask=kept == 1)


@triton.jit(do_not_specialize=["assignments", "places", "tiles"])
def _count_kernel(
    chosen,
    counts,
    listed,
    tile_expert,
    assignments,
    places,
    tiles,
    EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write counts [parts, EXPERTS]: how many of each TILE assignments chose an expert."""
    part = tl.program_id(0)
    index = part * TILE + tl.arange(0, TILE)
    if part * TILE < assignments:
        real = index < assignments
        expert = tl.load(chosen + index, mask=real, other=0)
        found = tl.histogram(expert, EXPERTS, mask=real)
        tl.store(counts + part * EXPERTS + tl.arange(0, EXPERTS), found)
    nothing = tl.full([TILE], -1, tl.int32)
    tl.store(listed + index, nothing, mask=index < places)
    tl.store(tile_expert + index, nothing, mask=index < tiles)


@triton.jit(do_not_specialize=["assignments", "parts"])
def _place_kernel(
    chosen,
    counts,
    listed,
    tile_expert,
    assignments,
    parts,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Write each assignment to its place: after all experts before its own, each in whole tiles,
    and after the earlier assignments of its expert."""
    own = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    count = tl.zeros([EXPERTS], tl.int32)
    before = tl.zeros([EXPERTS], tl.int32)
    for at in range(0, parts, PARTS):
        part = at + tl.arange(0, PARTS)
        cell = part[:, None] * EXPERTS + experts[None, :]
        found = tl.load(counts + cell, mask=(part < parts)[:, None], other=0)
        count += tl.sum(found, 0)
        before += tl.sum(tl.where((part < own)[:, None], found, 0), 0)
    tiles = (count + ROWS - 1) // ROWS
    first = (tl.cumsum(tiles, 0) - tiles) * ROWS + before
    place = tl.arange(0, TILE)
    index = own * TILE + place
    real = index < assignments
    expert = tl.load(chosen + index, mask=real, other=0)
    slot = tl.gather(first, expert, 0)
    for at in range(0, TILE, COMPARED):
        other = at + tl.arange(0, COMPARED)
        there = own * TILE + other
        theirs = tl.load(chosen + there, mask=there < assignments, other=-1)
        ahead = (expert[:, None] == theirs[None, :]) & (other[None, :] < place[:, None])
        slot += tl.sum(ahead.to(tl.int32), 1)
    tl.store(listed + slot, index, mask=real)
    # The first assignment of a tile names the tile's expert.
    tl.store(tile_expert + slot // ROWS, expert, mask=real & (slot % ROWS == 0))


@triton.jit
def _gather_kernel(
    parts, shares, biases, chosen, y, width, ACTIVE: tl.constexpr, TILE: tl.constexpr
):
    """Add up the results of a token's experts; `biases` [experts, width] of these are part of the
    results. Without `shares` they are added as they are."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for place in tl.static_range(ACTIVE):
        if shares is not None:
            share = tl.load(shares + token * ACTIVE + place)
        at = (token * ACTIVE + place) * width + column
        part = tl.load(parts + at, mask=column < width, other=0.0).to(tl.float32)
        if biases is not None:
            expert = tl.load(chosen + token * ACTIVE + place).to(tl.int64)
            own = biases + expert * width + column
            part += tl.load(own, mask=column < width, other=0.0).to(tl.float32)
        if shares is not None:
            part *= share
        total += part
    tl.store(y + token * width + column, total.to(y.dtype.element_ty), mask=column < width)


def route(
    router: torch.Tensor,
    spec: RouteSpec,
    bias: torch.Tensor | None = None,
    gains: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route logits [N, experts] → experts [N, active] int32 in ascending order, routing weights
    fp32. `bias` [experts] is for the choice alone, `gains` [experts] are factors on the routing
    weights."""
    tokens, experts = router.shape
    chosen = torch.empty(tokens, spec.active, dtype=torch.int32, device=router.device)
    shares = torch.empty(tokens, spec.active, dtype=torch.float32, device=router.device)
    each = experts // spec.groups
    _route_kernel[(tokens,)](
        router,
        bias,
        gains,
        chosen,
        shares,
        spec.scale,
        SCORES=spec.scores,
        EACH=each,
        GROUPS=spec.groups,
        GROUPS_PADDED=triton.next_power_of_2(spec.groups),
        EACH_PADDED=triton.next_power_of_2(each),
        ACTIVE_GROUPS=spec.active_groups,
        BEST=min(spec.best, each),
        ACTIVE=spec.active,
        NORMALISE=spec.normalise,
        num_warps=1,
    )
    return chosen, shares


def place(chosen: torch.Tensor, experts: int, rows: int) -> Tiles:
    """List the assignments of experts [N, active] by expert, in tiles of `rows`."""
    assignments = chosen.numel()
    if len(chosen) <= SINGLE_TOKENS:
        return Tiles(chosen, chosen, assignments, rows, experts, single=True)
    # Every expert that has a token may leave one tile unfilled.
    tiles = assignments // rows + min(experts, assignments)
    device = chosen.device
    padded, parts = triton.next_power_of_2(experts), triton.cdiv(assignments, TILE)
    counts = torch.empty(parts, padded, dtype=torch.int32, device=device)
    listed = torch.empty(tiles * rows, dtype=torch.int32, device=device)
    tile_expert = torch.empty(tiles, dtype=torch.int32, device=device)
    # There are more places than assignments, and than tiles.
    _count_kernel[(triton.cdiv(tiles * rows, TILE),)](
        chosen,
        counts,
        listed,
        tile_expert,
        assignments,
        tiles * rows,
        tiles,
        EXPERTS=padded,
        TILE=TILE,
        num_warps=4,
    )
    _place_kernel[(parts,)](
        chosen,
        counts,
        listed,
        tile_expert,
        assignments,
        parts,
        EXPERTS=padded,
        ROWS=rows,
        TILE=TILE,
        PARTS=max(1, COUNTED // padded),
        num_warps=4,
    )
    return Tiles(listed, tile_expert, assignments, rows, experts, single=False)


def experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    gate_up: ExpertTable,
    down: ExpertTable,
    count: int,
    activation: str,
    config: MoeConfig,
    packed: PackedSkinnyConfig | None = None,
    tickets: torch.Tensor | None = None,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    inside: bool = False,
) -> torch.Tensor:
    """Compute x [N, D], results of `route`, tables of [2I, D] and [D, I] of `count` experts → [N,
    D].

    `packed`: packed experts take the products of few rows, cut so; with `tickets` their input may
    be split. `biases`: of all experts, [count · 2I] and [count · D]; the gate is a kernel of its
    own then, which adds the first. `inside`: routing weights multiply the experts' inputs; each
    assignment has a row of its own for that.
    """
    tokens, width = x.shape
    active = shared = chosen.shape[1]
    if inside:
        x, shared = (x[:, None] * shares.to(x.dtype)[:, :, None]).flatten(0, 1), 1
    few = packed if gate_up.packed is not None and down.packed is not None else None
    rows = config.rows if few is None else few.rows
    tiles = place(chosen, count, rows)
    of_gate_up, of_down = biases or (None, None)
    if few is not None:
        within = activation if of_gate_up is None else ""
        acted = grouped_packed(x, gate_up, tiles, shared, few, tickets, within)
        if not within:
            acted = gated(acted, activation, of_gate_up, chosen)
        parts = grouped_packed(acted, down, tiles, 1, few, tickets)
    else:
        given = gate_up, down, tiles, chosen, activation, config, of_gate_up
        acted, scales = _gate_up(x, shared, *given)
        parts = grouped_product(acted, down, tiles, 1, config, dtype=x.dtype, scales=scales)
    y = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    _gather_kernel[(tokens, triton.cdiv(width, 1024))](
        parts,
        None if inside else shares,
        of_down,
        chosen,
        y,
        width,
        ACTIVE=active,
        TILE=1024,
        num_warps=4,
    )
    return y


def _gate_up(
    x: torch.Tensor,
    shared: int,
    gate_up: ExpertTable,
    down: ExpertTable,
    tiles: Tiles,
    chosen: torch.Tensor,
    activation: str,
    config: MoeConfig,
    biases: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the inputs of `down`: act(gate) · up [assignments, I]; or its codes, and their
    scales."""
    values, scales, dtype = x, None, x.dtype
    if gate_up.blocked is not None:
        values, scales = quantise_rows(x, blocked=gate_up.blocked)
    dense = gate_up.blocked is None and gate_up.packed is None
    if dense and down.blocked is None and config.rows <= GATE_ROWS and biases is None:
        gate = grouped_product(x, gate_up, tiles, shared, config, activation)
        return gate, None
    inner = grouped_product(values, gate_up, tiles, shared, config, dtype=dtype, scales=scales)
    if down.blocked is None:
        return gated(inner, activation, biases, chosen), None
    group = BLOCK if down.blocked else 0
    return gated_codes(inner, activation, "fp8", group, biases, chosen)
