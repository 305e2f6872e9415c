"""Hardware as its ceilings: rates, bandwidths, memory, links."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from ..base.errors import OptionError
from ..base.sections import read_rows
from .curves import CURVES
from .efficiency import Efficiency

LEAST_RATE, LEAST_BANDWIDTH, MOST_INT8 = 1e9, 1e9, 30
"""Bounds of a CPU that runs models at all: FLOP/s, B/s, int8 rate over fp32 rate."""


@dataclass(frozen=True, slots=True)
class Loop:
    """Time that a server adds to the device's, in seconds (`bench.loop` measures it)."""

    gateway_seconds: float = 1e-3
    """HTTP, template and tokens, before a request reaches the engine; one request after another."""
    step_seconds: float = 0.0
    """Planning, booking and sending between two steps; overlapped with a step at depth 2."""
    row_seconds: float = 0.0
    """Planning, booking and sending for each sequence of a step."""
    answer_seconds: float = 0.0
    """From a step's end to its tokens at the client: text, HTTP, and the client's own reading."""
    hitch_rate: float = 0.0
    """Interruptions per second of a step, if client and server share the cores that compute."""
    hitch_seconds: float = 0.0
    """Mean length of an interruption; lengths are exponential."""

    def around(self, rows: int) -> float:
        """Return the seconds added to a step of `rows` sequences."""
        return self.step_seconds + rows * self.row_seconds


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device. Rates in FLOP/s without sparsity, bandwidths in B/s, sizes in bytes."""

    name: str
    rates: dict[str, float]
    """By type of the product: float32, bfloat16, float16, fp8, int8, fp4."""
    bandwidth: float
    memory: int
    cache: int = 0
    """Last-level cache; an operator's activations that fit into half of it do not count against
    `bandwidth`."""
    cache_bandwidth: float = 0.0
    link_bandwidth: float = 0.0
    """Bandwidth in one direction to the other devices of a node."""
    link_latency: float = 5e-6
    """Latency of one collective."""
    node_devices: int = 8
    """Devices that the links connect; beyond them it is the fabric."""
    fabric_bandwidth: float = 0.0
    """Bandwidth in one direction per device to other nodes; 0: unknown, taken as the link's."""
    tile_rows: int = 1
    """Rows of a product are computed in multiples of this."""
    kind: str = "cuda"
    efficiency: Efficiency = field(default_factory=Efficiency)
    loop: Loop = Loop()
    source: str = ""

    def rate(self, compute: str) -> float:
        """Return the FLOP/s in a type; types that the device lacks run in the next wider one."""
        for name in (compute, "bfloat16", "float16", "float32"):
            if name in self.rates:
                return self.rates[name]
        raise OptionError(f"{self.name} has no rate for {compute}", param="hardware")

    def compute_type(self, format: str, dtype: str) -> str:
        """Return the type in which a product with weights of this format runs.

        fp8, nvfp4 and mxfp4 in their own type if the device has it; int8, and on a CPU every
        integer format (activations are quantised too), as int8; all else in the activations' type.
        """
        own = {"fp8": "fp8", "nvfp4": "fp4", "mxfp4": "fp4", "int8": "int8"}.get(format)
        if own is None and self.kind == "cpu" and format[0] in "QITi":
            own = "int8"
        return own if own in self.rates else dtype

    def implausible(self) -> str | None:
        """Return why a calibrated CPU's figures cannot be right: other load disturbed them. None:
        they can.

        Int8 products are 4 (AVX-512 VNNI) to 30 (AMX) times as quick as fp32 ones.
        """
        if self.kind != "cpu":
            return None
        fp32, int8 = self.rates["float32"], self.rates.get("int8")
        if fp32 < LEAST_RATE or self.bandwidth < LEAST_BANDWIDTH:
            return f"fp32 {fp32 / 1e9:.3g} GFLOP/s, {self.bandwidth / 1e9:.3g} GB/s"
        if int8 is not None and not fp32 / 2 < int8 < MOST_INT8 * fp32:
            return f"int8 {int8 / 1e9:.3g} GOP/s beside fp32 {fp32 / 1e9:.3g} GFLOP/s"
        return None

    def fitted(self, efficiency: Efficiency) -> Hardware:
        return replace(self, efficiency=efficiency)


MIB = 2**20


def _datasheet(row: str) -> Hardware:
    """Read a row of `devices.txt`."""
    row, source = (part.strip() for part in row.split("|"))
    name, *rates, bandwidth, memory, cache, cached, link, fabric, latency, node, tile = row.split()
    types = "float32", "bfloat16", "fp8", "int8", "fp4"
    told = {type_: _scaled(rate, 12) for type_, rate in zip(types, rates, strict=True)}
    told["float16"] = told["bfloat16"]
    giga = memory.removesuffix("G")
    return Hardware(
        name,
        {type_: rate for type_, rate in told.items() if rate},
        _scaled(bandwidth, 12),
        int(memory) * MIB if giga == memory else int(giga) * 10**9,
        int(cache) * MIB,
        _scaled(cached, 12),
        _scaled(link, 9),
        _scaled(latency, -6),
        int(node),
        _scaled(fabric, 9),
        int(tile),
        kind="rocm" if name.startswith("MI") else "cuda",
        source=source,
    )


def _scaled(figure: str, exponent: int) -> float:
    """Parse a figure with its power of ten: a product of the two would be rounded once more."""
    return float(f"{figure}e{exponent}")


_DATASHEETS = {
    one.name: one for one in read_rows(Path(__file__).with_name("devices.txt"), _datasheet)
}
_SAME_PARTS = {"B300": "B200", "GB200": "B200", "GB300": "B200"}
"""Devices without measured tables → a measured one with the same multiprocessors. The shares are
the same, of other ceilings. Published rows of GB200 bear it out (docs/roofline.md)."""


def _with_curves(name: str) -> Hardware:
    device, measured = _DATASHEETS[name], _SAME_PARTS.get(name, name)
    if measured not in CURVES:
        return device
    source = f"curves of operators measured on {measured}, the rest assumed"
    return device.fitted(replace(device.efficiency, curves=CURVES[measured], source=source))


DEVICES = {name: _with_curves(name) for name in _DATASHEETS}
"""By name; "this" is the calibrated machine (`load_hardware`)."""
