"""Hardware as its ceilings: rates, bandwidths, memory, links."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..base.errors import OptionError
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
# TFLOP/s by type (float16 as bfloat16; 0: the device lacks the type), TB/s, memory in MiB as the
# driver reports it (`nvidia-smi`, "143771MiB" on an H200: the "80 GB" of a data sheet are GiB) or
# in GB, cache in MiB and TB/s, link and fabric in GB/s of one direction, µs of a collective,
# devices that the links connect, rows of a tile. The fabric is that of the makers' DGX systems: one
# 200 Gb/s (A100) or 400 Gb/s adapter per device.
_TABLE = """
device   fp32    half    fp8    int8     fp4 memory    MiB cache  TB/s  link fabric  µs node tile
A100     19.5     312      0     624       0  2.039  81920    40     5   300     25   5    8   64
H100       67     989   1979    1979       0   3.35  81559    50     7   450     50   5    8   64
H200       67     989   1979    1979       0    4.8 143771    50     7   450     50   5    8   64
B200       75    2250   4500    4500    9000    8.0 183359   126    10   900     50   5    8  128
B300       75    2250   4500     150   14000    8.0 275040   126    10   900    100   5    8  128
GB200      80    2500   5000    5000   10000    8.0 189471   126    10   900     50   5   72  128
GB300      80    2500   5000     165   15000    8.0 284208   126    10   900    100   5   72  128
H20        44     148    296     296       0    4.0  97871    60     7   450     50   5    8   64
MI300X  163.4  1307.4 2614.9  2614.9       0    5.3 196608   256    17   448     50   5    8   64
MI355X  157.3  2516.6 5033.2  5033.2 10066.3    8.0 294912   256    17 537.6     50   5    8   64
L4       30.3     121  242.5   242.5       0    0.3  23034    48     2    32      0  15    8   64
L40S     91.6     362    733     733       0  0.864  46068    96     4    32      0  15    8   64
RTX4090  82.6   165.2  330.3   660.6       0  1.008  24564    72     4    32      0  15    8   64
RTX5090 104.8   209.5    419     838    1676  1.792  32607    96     6    64      0  15    8   64
THOR      8.1     259    517     517    1035  0.273   128G    32     1     0      0   5    8   64
ORIN      5.3    42.5      0      85       0 0.2048    64G     4     1     0      0   5    8   64
"""
_SOURCES = {
    # SXM 80 GB; L2 from the Ampere whitepaper.
    "A100": "NVIDIA A100 80GB SXM datasheet",
    # SXM column, sparsity halved out; NVLink 900 GB/s in both directions together.
    "H100": "NVIDIA H100 SXM datasheet",
    # The compute of H100 with HBM3e.
    "H200": "NVIDIA H200 SXM datasheet",
    # Dense: 4.5 PFLOPS FP8, 9 PFLOPS FP4, 64 TB/s, 1,440 GB, NVLink 14.4 TB/s.
    "B200": "NVIDIA DGX B200 datasheet / 8",
    # Table 3 (per GPU, dense), also at datacrunch.io: 14 PFLOPS FP4, 4.5 FP8, 0.15 POPS int8. HGX
    # B300 states 108 PFLOPS FP4 for eight.
    "B300": "NVIDIA Blackwell technical brief, quoted by verda.com",
    # At 1,200 W, dense: 10 PFLOPS FP4, 5 FP8, 2.5 BF16; 130 TB/s of NVLink and 576 TB/s of memory
    # in a rack of 72.
    "GB200": "NVIDIA Blackwell brief, quoted by glennklockwood.com",
    # Dense: 1,080 PFLOPS FP4, 360 FP8, 180 BF16, 576 TB/s; per device 0.165 POPS int8.
    "GB300": "NVIDIA GB300 NVL72 / 72, quoted by verda.com",
    # Hopper with fewer units (78 SMs) and all of its NVLink. It has no public data sheet; all
    # resellers print these figures: 148 TFLOPS BF16, 296 FP8 and int8, 4 TB/s.
    "H20": "NVIDIA H20 as resellers print it",
    # Dense; 256 MiB of Infinity Cache, its 17 TB/s from AMD's slides (servethehome.com); seven
    # links of 64 GB/s in one direction.
    "MI300X": "AMD Instinct MI300X; ROCm GPU specifications",
    # Dense (5 PFLOPS FP8 also at ISSCC 2026); seven links of 76.8 GB/s in one direction.
    "MI355X": "AMD Instinct MI355X; ROCm GPU specifications",
    # 485 TFLOPS FP8 and TOPS int8 with sparsity, halved; 300 GB/s; PCIe 4.0 x16.
    "L4": "NVIDIA L4 datasheet as dealers print it",
    # Dense; PCIe 4.0 x16.
    "L40S": "NVIDIA L40S datasheet",
    # Appendix A: with fp32 accumulation, dense.
    "RTX4090": "NVIDIA Ada whitepaper",
    "RTX5090": "NVIDIA RTX Blackwell whitepaper",
    # T5000: 2,070 TFLOPS FP4 sparse, 128 GB LPDDR5X at 273 GB/s; the dense rates of the wider types
    # halve from there.
    "THOR": "NVIDIA Jetson T5000 datasheet; bf16 and fp8 derived from FP4",
    # The GPU alone has 170 TOPS int8 with sparsity and 5.3 TFLOPS fp32, 4 MB of L2; half-precision
    # products are half of dense int8.
    "ORIN": "NVIDIA Jetson AGX Orin technical brief; bf16 from int8",
}


def _datasheet(row: str) -> Hardware:
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
        source=_SOURCES[name],
    )


def _scaled(figure: str, exponent: int) -> float:
    """Parse a figure with its power of ten: a product of the two would be rounded once more."""
    return float(f"{figure}e{exponent}")


_DATASHEETS = {one.name: one for one in map(_datasheet, _TABLE.strip().splitlines()[1:])}
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
