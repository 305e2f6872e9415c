"""Loader of the quantised matrices of safetensors checkpoints: `PackedWeight`s of layout "rows",
and `Fp8Weight`s (`quant.fp8`). Torch-free.

A layout knows the tensors that make one matrix, the matrix's shape from theirs, and how to decode
them. The result is lossless: codes as stored, w = code · scale - zero · scale in fp32, exact where
scales are fp16 or bf16 (see `quant.ggml`); fp32 scales round each product once. If groups are not
of consecutive inputs (GPTQ's activation order), the inputs are sorted by group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..base.errors import ModelFileError, UnsupportedModel
from ..kernels.arrays import floats
from ..kernels.weights import Fp8Weight, PackedWeight
from .fp4 import fp4_weight
from .fp8 import SCALES, fp8_weight
from .schemes import Scheme

Host = npt.NDArray[Any]
Tensors = Mapping[str, Host]
"""Arrays by suffix; bf16 as its bits in uint16, as `StoredTensor.read` returns it."""
Shapes = Mapping[str, tuple[int, ...]]

MAX_GROUP = 128
"""Longest group of a `PackedWeight`: longer ones are split, their scale repeated."""


class Layout(NamedTuple):
    """Storage of one matrix."""

    main: str
    """Suffix of the tensor that holds the codes."""
    others: tuple[str, ...]
    """Suffixes of further tensors that may be present."""
    shape: Callable[[Scheme, Shapes], tuple[int, int]]
    """(out, in) of the matrix."""
    decode: Callable[[Scheme, Tensors, tuple[int, int]], tuple[Host, Host]]
    """Decoder to (codes [out, in] uint8, zeros [out, groups] fp32 in the codes' own count)."""
    scales: str
    outputs_last: bool
    """Whether scales are stored [groups, out]."""


def load(scheme: Scheme, tensors: Tensors, name: str) -> PackedWeight | Fp8Weight:
    """Load the matrix that `tensors` (by suffix) hold; `ModelFileError` if they do not fit
    together."""
    if scheme.layout == "fp8":
        return fp8_weight(tensors, scheme.strategy, name)
    if scheme.layout == "nvfp4":
        return fp4_weight(tensors, name)
    return pack(scheme, tensors, name)


def pack(scheme: Scheme, tensors: Tensors, name: str) -> PackedWeight:
    """Pack the matrix that `tensors` (by suffix) hold; `ModelFileError` if they do not fit."""
    layout = LAYOUTS[scheme.layout]
    out, width = shape_of(scheme, {key: value.shape for key, value in tensors.items()}, name)
    group = scheme.group or width
    if width % group:
        raise ModelFileError(f"{name}: {width} inputs are not a multiple of the group {group}")
    if layout.scales not in tensors:
        raise ModelFileError(f"{name}: {layout.scales} is missing")
    scales = tensors[layout.scales]
    if scales.dtype not in (np.float32, np.float16, np.uint16):
        raise ModelFileError(f"{name}: {layout.scales} must be floating point, not {scales.dtype}")
    shape = list(scales.shape)
    scales = floats(scales)
    if scales.size == 1:
        scales = np.broadcast_to(scales.reshape(1, 1), (out, 1))
    elif scales.ndim == 2:
        scales = scales.T if layout.outputs_last else scales
    else:
        scales = scales.reshape(-1, 1)
    if scales.shape != (out, width // group):
        raise ModelFileError(
            f"{name}: {layout.scales} has shape {shape}, which does "
            f"not fit {out} x {width} in groups of {group}"
        )
    if not np.isfinite(scales).all():
        raise ModelFileError(f"{name}: {layout.scales} holds numbers that are not finite")
    try:
        codes, zeros = layout.decode(scheme, tensors, (out, width))
    except (ModelFileError, UnsupportedModel) as error:
        raise type(error)(f"{name}: {error}") from None
    order = order_of(scheme, tensors, width, name)
    offsets = -(np.broadcast_to(zeros, scales.shape) * scales)
    size = group
    if group > MAX_GROUP:
        size = next((g for g in (MAX_GROUP, 64, 32, 16) if group % g == 0), group)
    repeat = group // size
    return PackedWeight(
        codes=np.ascontiguousarray(codes if order is None else codes[:, order]),
        scales=np.ascontiguousarray(np.repeat(scales, repeat, 1)),
        offsets=np.ascontiguousarray(np.repeat(offsets, repeat, 1)),
        bits=scheme.bits,
        group=size,
        shape=(out, width),
        order=order,
    )


def order_of(scheme: Scheme, tensors: Tensors, width: int, name: str) -> Host | None:
    """Return int32 [in]: the inputs group by group, by `g_idx`; None if they are in order. Raises
    `ModelFileError`."""
    stored, group = tensors.get("g_idx", tensors.get("weight_g_idx")), scheme.group or width
    # compressed-tensors fills it with -1 if it has no meaning.
    if stored is None or (stored == -1).all():
        return None
    groups = width // group
    sound = stored.shape == (width,) and stored.dtype.kind == "i"
    if not sound or stored.min() < 0 or stored.max() >= groups:
        raise ModelFileError(
            f"{name}: g_idx must name a group below {groups} for each of {width} inputs"
        )
    if (np.bincount(stored, minlength=groups) != group).any():
        raise ModelFileError(f"{name}: g_idx must name each group for {group} inputs")
    if (np.diff(stored) >= 0).all():
        return None
    return np.argsort(stored, kind="stable").astype(np.int32)


def shape_of(scheme: Scheme, shapes: Shapes, name: str) -> tuple[int, int]:
    """Return (out, in) of the matrix, from the shapes of its tensors."""
    main = LAYOUTS[scheme.layout].main
    if len(shapes.get(main, ())) != 2:
        raise ModelFileError(f"{name}: {main} must be a matrix")
    return LAYOUTS[scheme.layout].shape(scheme, shapes)


def _fields(packed: Host, bits: int, order: tuple[int, ...] | None = None) -> Host:
    """Extract fields of int32 words, low bits first, along the last axis: [r, c] → [r, c · 32 /
    bits].

    `order[i]` is the index, among the values of its word, of the field at i.
    """
    if packed.dtype != np.int32:
        raise ModelFileError(f"packed codes must be int32, not {packed.dtype}")
    four = np.ascontiguousarray(packed).view(np.uint8)
    if bits == 8:
        return four
    four = four.reshape(*packed.shape, 4)
    out = np.empty((*packed.shape, 8), np.uint8)
    for field, place in enumerate(order or range(8)):
        out[..., place] = four[..., field // 2] >> 4 if field % 2 else four[..., field // 2] & 15
    return out.reshape(len(packed), -1)


_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _awq_shape(scheme: Scheme, shapes: Shapes) -> tuple[int, int]:
    width, words = shapes["qweight"]
    return words * 8, width


def _awq(scheme: Scheme, t: Tensors, shape: tuple[int, int]) -> tuple[Host, Host]:
    """Decode qweight [in, out / 8], qzeros [groups, out / 8]."""
    zeros = _zeros(t, "qzeros", (shape[1] // (scheme.group or shape[1]), shape[0] // 8))
    codes = _fields(t["qweight"], 4, _AWQ_ORDER).T
    return codes, _fields(zeros, 4, _AWQ_ORDER).T.astype(np.float32)


def _gptq_shape(scheme: Scheme, shapes: Shapes) -> tuple[int, int]:
    words, out = shapes["qweight"]
    return out, words * (32 // scheme.bits)


def _gptq(scheme: Scheme, t: Tensors, shape: tuple[int, int]) -> tuple[Host, Host]:
    """Decode qweight [in · bits / 32, out], qzeros [groups, out · bits / 32], g_idx [in]."""
    out, width = shape
    group = scheme.group or width
    zeros = _zeros(t, "qzeros", (width // group, out * scheme.bits // 32))
    codes = _fields(t["qweight"].T, scheme.bits)
    return codes, _fields(zeros, scheme.bits).T.astype(np.float32) + scheme.zero_shift


def _packed_shape(scheme: Scheme, shapes: Shapes) -> tuple[int, int]:
    out, words = shapes["weight_packed"]
    return out, words * (32 // scheme.bits)


def _packed(scheme: Scheme, t: Tensors, shape: tuple[int, int]) -> tuple[Host, Host]:
    """Decode weight_packed [out, in · bits / 32]; weight_zero_point [out · bits / 32, groups], if
    any.

    Codes and zero points are stored with half their range added, so they are unsigned.
    """
    if "weight_shape" in t and tuple(t["weight_shape"].tolist()) != shape:
        raise UnsupportedModel(
            f"compressed-tensors: weight_shape is {t['weight_shape'].tolist()}; supported: rows "
            f"of a multiple of {32 // scheme.bits} inputs"
        )
    codes = _fields(t["weight_packed"], scheme.bits)
    if "weight_zero_point" not in t:
        return codes, np.full((1, 1), 1 << (scheme.bits - 1), np.float32)
    groups = shape[1] // (scheme.group or shape[1])
    zeros = _zeros(t, "weight_zero_point", (shape[0] * scheme.bits // 32, groups))
    return codes, _fields(zeros.T, scheme.bits).T.astype(np.float32)


def _halves_shape(scheme: Scheme, shapes: Shapes) -> tuple[int, int]:
    out, bytes_ = shapes["weight_packed"]
    return out, 2 * bytes_


def _plain_shape(scheme: Scheme, shapes: Shapes) -> tuple[int, int]:
    out, width = shapes["weight"]
    return out, width


def _int8(scheme: Scheme, t: Tensors, shape: tuple[int, int]) -> tuple[Host, Host]:
    """Decode weight [out, in] int8; weight_zero_point [out, groups] int8, if any."""
    if t["weight"].dtype != np.int8:
        raise ModelFileError(f"weight must be int8, not {t['weight'].dtype}")
    codes = t["weight"].view(np.uint8) ^ np.uint8(0x80)
    zeros = np.full((1, 1), 128, np.float32)
    if "weight_zero_point" in t:
        stored = t["weight_zero_point"].astype(np.float32)
        if stored.size not in (1, shape[0] * (shape[1] // (scheme.group or shape[1]))):
            raise ModelFileError(f"weight_zero_point is of shape {list(stored.shape)}")
        zeros = zeros + stored.reshape(shape[0] if stored.size > 1 else 1, -1)
    return codes, zeros


def _never(scheme: Scheme, t: Tensors, shape: tuple[int, int]) -> tuple[Host, Host]:
    raise AssertionError("fp8 and nvfp4 have loaders of their own: see `load`")


def _zeros(t: Tensors, suffix: str, shape: tuple[int, int]) -> Host:
    found = t.get(suffix)
    if found is None or found.shape != shape:
        has = "missing" if found is None else f"of shape {list(found.shape)}"
        raise ModelFileError(f"{suffix} is {has}; {list(shape)} is needed")
    return found


LAYOUTS: Mapping[str, Layout] = {
    "awq": Layout("qweight", ("qzeros", "scales"), _awq_shape, _awq, "scales", True),
    "gptq": Layout("qweight", ("qzeros", "scales", "g_idx"), _gptq_shape, _gptq, "scales", True),
    "packed": Layout(
        "weight_packed",
        ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
        _packed_shape,
        _packed,
        "weight_scale",
        False,
    ),
    "int8": Layout(
        "weight", ("weight_scale", "weight_zero_point"), _plain_shape, _int8, "weight_scale", False
    ),
    "nvfp4": Layout(
        "weight_packed",
        ("weight_scale", "weight_global_scale", "input_global_scale"),
        _halves_shape,
        _never,
        "weight_scale",
        False,
    ),
    "fp8": Layout("weight", (*SCALES, "input_scale"), _plain_shape, _never, "weight_scale", False),
}
