"""Additions of a step's LoRA adapters to its products, operator by operator."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from ..base.graph import WeightRef
from .arrays import Array, tensor
from .interpret import Adding
from .lora import TokenGroups, add_lora
from .operators import StepBatch
from .weights import LoraWeight

Additions = Mapping[tuple[str, ...], LoraWeight]
"""LoRA weights, by the names of a product's tensors."""


def adding(additions: Additions, batch: StepBatch) -> Adding:
    """Return a function that adds to each product the LoRA of the slots in `batch.adapters`."""
    assert batch.adapters is not None
    slots = batch.adapters
    device = next(iter(additions.values())).down.device
    # A product has one row per token or one per sampled row; if both counts are equal, so are the
    # rows.
    groups = {len(each): _groups(each, device) for each in (slots[batch.sampled_places()], slots)}

    def add(ref: WeightRef, x: Array, y: Array) -> None:
        add_lora(tensor(y), tensor(x), groups[len(x)], additions[ref.names])

    return add


def _groups(slots: npt.NDArray[np.int32], device: torch.device) -> TokenGroups:
    return [
        (int(slot), torch.from_numpy(np.flatnonzero(slots == slot)).to(device))
        for slot in np.unique(slots[slots >= 0])
    ]
