"""Named weights, taken once each; a missing or left-over weight is an error that names it."""

from __future__ import annotations

from collections.abc import Iterable

from ..base.errors import ModelFileError
from ..kernels.arrays import Array, dtype_name
from ..kernels.weights import BlockWeight, DenseWeight, Fp8Weight, LateWeight, PackedWeight
from .interleaved_experts import ExpertPart
from .latent_heads import QuantisedHead, Transposed
from .q8_0 import LateBlocks, LateNumbers
from .quantised_safetensors import QuantisedMatrix
from .row_parts import PickedRows
from .safetensors_file import StoredTensor

Stored = (
    StoredTensor
    | Transposed
    | PickedRows
    | ExpertPart
    | QuantisedMatrix
    | QuantisedHead
    | LateBlocks
    | LateNumbers
)
"""Weights that are read when they are taken."""
Named = Array | Stored | BlockWeight | PackedWeight | Fp8Weight
_STORED = (
    StoredTensor, Transposed, PickedRows, ExpertPart, QuantisedMatrix, QuantisedHead, LateBlocks,
    LateNumbers,
)  # fmt: skip
_QUANTISED = (BlockWeight, PackedWeight, Fp8Weight)
Matrix = DenseWeight | BlockWeight | PackedWeight | Fp8Weight | LateWeight


class WeightSource:
    """The weights of one model under their canonical (Hugging Face) names.

    The graph's weights are *taken*; `finish` raises if any are left over. Tensors are mapped, or
    read when they are taken, so holding them costs no memory before.
    """

    def __init__(self, weights: Iterable[tuple[str, Named]]) -> None:
        self._weights: dict[str, Named] = {}
        for name, weight in weights:
            if name in self._weights:
                raise ModelFileError(f"the model holds the weight {name} twice")
            self._weights[name] = weight

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def kinds(self) -> frozenset[str]:
        """Return the kinds of the matrices, as `Question.weights` names them."""
        return frozenset(
            _kind(weight)
            for weight in self._weights.values()
            if isinstance(weight, _QUANTISED) or len(weight.shape) >= 2
        )

    def take_vector(self, name: str, *shape: int) -> Array:
        """Take the vector `name` [size], or the kernels [channels, kernel size]; raises
        `ModelFileError`."""
        weight = read_weight(self._take(name, shape))
        if isinstance(weight, _QUANTISED):
            raise ModelFileError(f"{name} is a vector, but it is stored as {_kind(weight)}")
        return weight

    def take_matrix(
        self, name: str, rows: int, width: int, *, late: bool = False, mapped: bool = False
    ) -> Matrix:
        """Take the matrix `name` [rows, width]; raises `ModelFileError`. `late`: a quantised one
        may be read when it is needed; `mapped`: a dense one may be a view of its file."""
        taken = self._take(name, (rows, width))
        if late and (
            isinstance(taken, QuantisedMatrix | LateBlocks)
            or (isinstance(taken, ExpertPart) and taken.scales is not None)
        ):
            return taken.late(name)
        if mapped and isinstance(taken, StoredTensor):
            return DenseWeight(taken.mapped(), name)
        weight = read_weight(taken)
        if isinstance(weight, _QUANTISED):
            weight.name = name
        return weight if isinstance(weight, _QUANTISED) else DenseWeight(weight, name)

    def finish(self) -> None:
        """Raise `ModelFileError` if weights are left over."""
        left = [name for name in self._weights if not name.endswith("rotary_emb.inv_freq")]
        if left:
            raise ModelFileError(
                f"the model holds {len(left)} weights that its architecture does not know: "
                + _some(left)
            )
        self._weights.clear()

    def _take(self, name: str, shape: tuple[int, ...]) -> Named:
        weight = self._weights.pop(name, None)
        if weight is None:
            raise ModelFileError(f"the model lacks the weight {name}")
        if tuple(weight.shape) != shape:
            raise ModelFileError(f"{name} has shape {tuple(weight.shape)}, expected {shape}")
        return weight


def read_weight(weight: Named) -> Array | BlockWeight | PackedWeight | Fp8Weight:
    """Return a weight with its numbers or codes; raises `ModelFileError`."""
    return weight.read() if isinstance(weight, _STORED) else weight


def _kind(weight: Named) -> str:
    if isinstance(weight, BlockWeight):
        return weight.kind
    if isinstance(weight, PackedWeight):
        return f"packed{weight.bits}"
    if isinstance(weight, Fp8Weight):
        return "fp8"
    return weight.host_dtype if isinstance(weight, _STORED) else dtype_name(weight)


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:5])
    return shown if len(names) <= 5 else f"{shown} …"
