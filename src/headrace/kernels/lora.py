"""Low-rank additions to products (LoRA, Hu et al. 2021), many of them in one batch.

An adapter adds (α / r) · B · A to some matrices of its model. Adapters are in slots; each token of
a step has its adapter's slot, or none. The additions of a slot are one product over its tokens,
even if other slots' tokens are between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .reference_product import product
from .weights import LoraWeight

TokenGroups = Sequence[tuple[int, torch.Tensor]]
"""(slot, places [n] int64 of its tokens in the step), for each slot in the step."""


def add_lora(y: torch.Tensor, x: torch.Tensor, groups: TokenGroups, weight: LoraWeight) -> None:
    """Add up · (down · x[n]) to y[n] for every token n of a group; x [N, in], y [N, out], in place.

    A token's sum does not depend on the other tokens.
    """
    for slot, places in groups:
        if not weight.ranks[slot]:
            continue
        inner = product(x[places], weight.down[slot])
        rank = inner.shape[1] // len(weight.up)
        first = 0
        for part, up in enumerate(weight.up):
            out = up.shape[2]
            added = product(inner[:, part * rank : (part + 1) * rank], up[slot].T)
            y[:, first : first + out].index_add_(0, places, added)
            first += out
