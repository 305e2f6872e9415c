"""The quantised matrices of a safetensors checkpoint: AWQ, GPTQ, compressed-tensors, FP8.

Headers are checked at once; matrices are read, without torch, when they are taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..base.errors import UnsupportedModel
from ..kernels.checkpoint_values import values
from ..kernels.weights import FP8_BLOCK, Fp8Weight, LateWeight, PackedWeight
from ..quant.checkpoint import LAYOUTS, load, order_of, shape_of
from ..quant.schemes import Scheme
from .safetensors_file import StoredTensor

_CODES = {
    "awq": ("I32",),
    "gptq": ("I32",),
    "packed": ("I32",),
    "int8": ("I8",),
    "nvfp4": ("U8",),
    "fp8": ("F8_E4M3",),
}
"""Layout → safetensors' names for the type of its codes."""


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """One matrix [out, in], or some of its rows, read when it is taken."""

    scheme: Scheme
    parts: Mapping[str, StoredTensor]
    """Tensors that it is made of, by suffix."""
    name: str
    shape: tuple[int, int]
    order: npt.NDArray[np.intp] | None = None
    """Rows to take; None: all."""

    @property
    def host_dtype(self) -> str:
        """Return the kind as `Question.weights` names it."""
        return "fp8" if self.scheme.layout == "fp8" else f"packed{self.scheme.bits}"

    def read(self) -> PackedWeight | Fp8Weight:
        """Read its codes and scales as host arrays; raises `ModelFileError`."""
        stored = {suffix: each.read() for suffix, each in self.parts.items()}
        found = load(self.scheme, stored, self.name)
        return found if self.order is None else picked(found, self.order, self.name)

    def late(self, name: str) -> LateWeight:
        """Return a late weight under the model's `name`; only the order of its inputs is read now.
        Raises `ModelFileError`."""
        named = {key: one.read() for key, one in self.parts.items() if key.endswith("g_idx")}

        def read() -> PackedWeight | Fp8Weight:
            return replace(self.read(), name=name)

        order = order_of(self.scheme, named, self.shape[1], self.name)
        return LateWeight(name, self.shape, order, read)

    def values(self) -> npt.NDArray[np.float32]:
        """Return the values [shape] in fp32; raises `ModelFileError`."""
        return values(self.read())


def picked(
    weight: PackedWeight | Fp8Weight, order: npt.NDArray[np.intp], name: str
) -> PackedWeight | Fp8Weight:
    """Return some rows of a weight. Raises `UnsupportedModel` if they share scales with others."""
    if isinstance(weight, PackedWeight):
        assert weight.offsets is not None
        return replace(
            weight,
            codes=weight.codes[order],
            scales=weight.scales[order],
            offsets=weight.offsets[order],
            shape=(len(order), weight.shape[1]),
        )
    scales = weight.scales
    if weight.blocked:
        runs = order[: len(order) // FP8_BLOCK * FP8_BLOCK].reshape(-1, FP8_BLOCK)
        whole = len(order) % FP8_BLOCK == 0 and not (runs[:, 0] % FP8_BLOCK).any()
        if not whole or (np.diff(runs, axis=1) != 1).any():
            raise UnsupportedModel(
                f"{name}: rows of several matrices share a block's scale; supported: heads of "
                f"multiples of {FP8_BLOCK} rows"
            )
        scales = scales[runs[:, 0] // FP8_BLOCK]
    elif len(scales) > 1:
        scales = scales[order]
    return Fp8Weight(weight.data[order], scales)


class QuantisedMatrices:
    """Matrices of one checkpoint written by `scheme`, by the module that they belong to."""

    def __init__(self, scheme: Scheme, stored: Mapping[str, StoredTensor]) -> None:
        """Find the matrices. Raises `ModelFileError` if a matrix's tensors do not fit together."""
        layout = LAYOUTS[scheme.layout]
        self._found: dict[str, QuantisedMatrix] = {}
        """Matrices by the name of the tensor with the codes."""
        self.members: set[str] = set()
        """Names of all tensors that belong to a matrix."""
        self._modules: set[str] = set()
        for main, header in stored.items():
            module, _, suffix = main.rpartition(".")
            # In the plain layouts a dense weight has the same suffix but a different type.
            if suffix != layout.main or header.dtype not in _CODES[scheme.layout]:
                continue
            names = {each: f"{module}.{each}" for each in (layout.main, *layout.others)}
            parts = {each: stored[full] for each, full in names.items() if full in stored}
            shape = shape_of(scheme, {each: one.shape for each, one in parts.items()}, module)
            self._found[main] = QuantisedMatrix(scheme, parts, module, shape)
            self.members |= {names[each] for each in parts}
            self._modules.add(module)

    def __contains__(self, module: str) -> bool:
        return module in self._modules

    def shapes(self) -> Iterator[tuple[str, str, tuple[int, int]]]:
        """Yield (module, name of the tensor with its codes, [out, in]) of each matrix."""
        for main, matrix in self._found.items():
            yield matrix.name, main, matrix.shape

    def find(self, main: str) -> QuantisedMatrix | None:
        """Return the matrix whose codes are in the tensor `main`; None if it has no codes."""
        return self._found.get(main)
