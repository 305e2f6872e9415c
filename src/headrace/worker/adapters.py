"""LoRA adapters of one worker: on the host by name, on the device by slot.

A sequence names its adapter when it takes a row. An adapter without a slot gets a free one, or the
slot of an adapter that no row uses. The control plane never lets more adapters run than there are
slots. A batch in which no row has an adapter does not use this module.

In a process group each rank holds the part of an adapter that its own products need: the same rows
of B as of the product, A whole, and nothing of layers on another pipeline stage.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from safetensors import safe_open

from ..base.errors import EngineFault, ModelFileError
from ..base.graph import WeightRef
from ..base.step import Admission
from ..kernels.weights import LoraWeight
from ..loader.adapters import AdapterFiles
from .features import RowFeature
from .rows import Rows


@dataclass(slots=True)
class _Host:
    """One adapter's additions to one product, in the shapes of a slot."""

    product: int
    down: torch.Tensor
    up: tuple[torch.Tensor, ...]
    rank: int = 0


class Adapters(RowFeature):
    """LoRA adapters as a row feature. Calls come from the worker's thread. A row's slot stands in
    `Rows.columns`, from which a step's batch takes it."""

    def __init__(
        self,
        products: Sequence[WeightRef],
        *,
        slots: int,
        rank: int,
        device: str,
        dtype: torch.dtype,
    ) -> None:
        self.slots, self.rank = slots, rank
        self._products = list(products)
        self._where = {
            name.removesuffix(".weight"): (index, part)
            for index, product in enumerate(self._products)
            for part, name in enumerate(product.names)
        }
        self._weights = [
            LoraWeight(
                torch.zeros(slots, len(p.names) * rank, p.width, device=device, dtype=dtype),
                tuple(
                    torch.zeros(slots, rank, out, device=device, dtype=dtype) for out in _rows(p)
                ),
                np.zeros(slots, np.int32),
            )
            for p in self._products
        ]
        self.additions = {
            product.names: weight
            for product, weight in zip(self._products, self._weights, strict=True)
        }
        """LoRA weights by the names of the product's tensors."""
        self._host: dict[str, list[_Host]] = {}
        self._in_slot: OrderedDict[str, int] = OrderedDict()
        """Slot by name, the least recently used first."""
        self._rows: dict[int, str] = {}
        self._table: Rows | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of the slots on the device."""
        return sum(weight.nbytes for weight in self._weights)

    @property
    def loaded(self) -> list[str]:
        return sorted(self._host)

    def load(self, name: str, files: AdapterFiles) -> None:
        """Read an adapter into host memory. Raises `ModelFileError` and then changes nothing."""
        if name in self._host:
            raise EngineFault(f"an adapter {name!r} is loaded")
        found: dict[int, _Host] = {}
        with safe_open(files.weights, framework="pt") as file:
            for module, scale in files.scales.items():
                if module not in self._where:
                    continue  # Another pipeline stage has its layer.
                index, part = self._where[module]
                host = found.setdefault(index, self._empty(index))
                at = f"base_model.model.{module}.lora_"
                a, b = (file.get_tensor(f"{at}{half}.weight").float() for half in "AB")
                if not (bool(a.isfinite().all()) and bool(b.isfinite().all())):
                    raise ModelFileError(f"{files.weights.name}: {module} is not finite")
                host.down[part * self.rank : part * self.rank + len(a)] = a
                host.up[part][: len(a)] = _cut(b, self._products[index], part).T * scale
                host.rank = max(host.rank, len(a))
        self._host[name] = list(found.values())

    def unload(self, name: str) -> None:
        """Forget an adapter; rows that have it keep its slot until they leave."""
        self._host.pop(name, None)
        if name in self._in_slot and name not in self._rows.values():
            self._empty_slot(self._in_slot.pop(name))

    def bind(self, rows: Rows) -> None:
        """Release all rows and use this table from now on."""
        self.release(list(self._rows))
        self._table = rows

    def admit(self, admission: Admission) -> bool:
        """Give a row its adapter. Raises `EngineFault` if the adapter is not loaded."""
        row, name = admission.row, admission.spec.adapter
        if name is None:
            return False
        if name not in self._in_slot:
            if name not in self._host:
                raise EngineFault(f"no adapter {name!r} is loaded")
            self._fill(self._free_slot(), name)
        self._in_slot.move_to_end(name)
        self._rows[row] = name
        assert self._table is not None
        self._table.columns["adapter"][row] = self._in_slot[name]
        return True

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            name = self._rows.pop(row, None)
            if name is not None and name not in self._host and name not in self._rows.values():
                self._empty_slot(self._in_slot.pop(name))

    def _free_slot(self) -> int:
        used = set(self._in_slot.values())
        for slot in range(self.slots):
            if slot not in used:
                return slot
        held = set(self._rows.values())
        idle = next((name for name in self._in_slot if name not in held), None)
        if idle is None:
            raise EngineFault(f"more than {self.slots} adapters are to run at the same time")
        slot = self._in_slot.pop(idle)
        self._empty_slot(slot)
        return slot

    def _fill(self, slot: int, name: str) -> None:
        for host in self._host[name]:
            weight = self._weights[host.product]
            weight.down[slot].copy_(host.down)
            for target, source in zip(weight.up, host.up, strict=True):
                target[slot].copy_(source)
            weight.ranks[slot] = host.rank
        self._in_slot[name] = slot

    def _empty_slot(self, slot: int) -> None:
        for weight in self._weights:
            weight.ranks[slot] = 0

    def _empty(self, index: int) -> _Host:
        product = self._products[index]
        return _Host(
            index,
            torch.zeros(len(product.names) * self.rank, product.width),
            tuple(torch.zeros(self.rank, rows) for rows in _rows(product)),
        )


def _rows(product: WeightRef) -> list[int]:
    """Return the outputs of each tensor, or of its cut."""
    if not product.cut:
        return list(product.rows)
    parts = range(len(product.rows))
    return [sum(count for at, _, count in product.cut if at == part) for part in parts]


def _cut(b: torch.Tensor, product: WeightRef, part: int) -> torch.Tensor:
    """Return the rows of B of tensor `part` that this rank computes, concatenated."""
    runs = [b[first : first + count] for at, first, count in product.cut if at == part]
    return torch.cat(runs) if runs else b[: _rows(product)[part]]
