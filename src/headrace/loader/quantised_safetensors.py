"""The quantised matrices of a safetensors checkpoint, as tensors: AWQ, GPTQ, compressed-tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ..kernels.weights import Fp8Weight, PackedWeight
from ..quant.checkpoint import LAYOUTS, load, shape_of
from ..quant.schemes import Scheme
from .safetensors_file import StoredTensor

_CODES = {
    "awq": ("I32",),
    "gptq": ("I32",),
    "packed": ("I32",),
    "int8": ("I8",),
    "fp8": ("F8_E4M3",),
}
"""Layout → how safetensors names the type of its codes."""
_BITS = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}
"""Types whose bits are what `StoredTensor.read` gives."""


class QuantisedMatrices:
    """The matrices of one checkpoint that `scheme` wrote, by the module that they belong to."""

    def __init__(self, scheme: Scheme, stored: Mapping[str, StoredTensor]) -> None:
        self._scheme, self._stored = scheme, stored
        self._parts: dict[str, dict[str, str]] = {}
        layout = LAYOUTS[scheme.layout]
        for name, header in stored.items():
            module, _, suffix = name.rpartition(".")
            # In the plain layouts a dense weight has the same suffix but not the same type.
            if suffix == layout.main and header.dtype in _CODES[scheme.layout]:
                members = {each: f"{module}.{each}" for each in (layout.main, *layout.others)}
                self._parts[module] = {
                    each: full for each, full in members.items() if full in stored
                }
        self.members = {name for parts in self._parts.values() for name in parts.values()}
        """Names of all tensors that belong to a matrix."""
        self._modules = {parts[layout.main]: module for module, parts in self._parts.items()}

    def __contains__(self, module: str) -> bool:
        return module in self._parts

    def shapes(self) -> Iterator[tuple[str, str, tuple[int, int]]]:
        """(module, name of the tensor with its codes, [out, in]) of each matrix."""
        for main, module in self._modules.items():
            shapes = {each: self._stored[name].shape for each, name in self._parts[module].items()}
            yield module, main, shape_of(self._scheme, shapes, module)

    def load(self, main: str) -> PackedWeight | Fp8Weight | None:
        """The matrix whose codes are in the tensor `main`; None where these are no codes."""
        module = self._modules.get(main)
        if module is None:
            return None
        parts = self._parts[module]
        tensors = {each: _tensor(self._stored[name]) for each, name in parts.items()}
        return load(self._scheme, tensors, module)


def _tensor(stored: StoredTensor) -> torch.Tensor:
    found: torch.Tensor = torch.from_numpy(stored.read())
    return found.view(_BITS[stored.dtype]) if stored.dtype in _BITS else found
