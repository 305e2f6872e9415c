"""Efficiency: the share of the ceilings that real kernels reach."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Curve:
    """Share of the ceilings that one class of operators reaches, by the size of a call.

    A call takes floor + depth · depth_seconds / 1000 + pieces · piece_seconds / 1000 + max(compute,
    memory) + (1 - overlap) · min(compute, memory), each at its share of the ceiling. Small calls
    are mostly floor, so their share of a ceiling rises with their size as a real kernel's does.
    """

    compute: float
    memory: float
    overlap: float = 1.0
    floor_seconds: float = 0.0
    """Time of a call with next to no work."""
    depth_seconds: float = 0.0
    """Per 1,000 of `Count.depth`: the sequential sums of a unit."""
    piece_seconds: float = 0.0
    """Per 1,000 of `Count.pieces`: the cost of beginning and ending each."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of a ceiling that kernels reach, and the extra cost of every launch and step.

    The defaults are those of well-tuned GPU libraries at large shapes; `fit.fit_efficiency`
    replaces them by values fitted to an engine's recorded steps.
    """

    product_compute: float = 0.72
    product_memory: float = 0.85
    attention_compute: float = 0.55
    attention_memory: float = 0.75
    vector_memory: float = 0.75
    network: float = 0.75
    overlap: float = 1.0
    """Share of the shorter of compute and memory time that overlaps the longer: 1 is the classic
    roofline; 0 does one after the other (unpacking that keeps the units busy while data waits)."""
    launch_seconds: float = 2.0e-6
    """Per operator call; a replayed graph leaves about this much between kernels."""
    step_seconds: float = 0.5e-3
    """Per step: inputs, sampling, and the part of scheduling that is not overlapped."""
    admitting_seconds: float = 0.0
    """Per step in addition, unless each of its tokens samples: rows that come, and their inputs."""
    source: str = "assumed"
    curves: dict[str, Curve] = field(default_factory=dict)
    """Curve by class of operator (`step.curve_names`), fitted on measured operators of every size.
    A class without one has the shares above."""

    def around(self, tokens: int, samples: int) -> float:
        """Return the fixed seconds of a step."""
        return self.step_seconds + self.admitting_seconds * (samples < tokens)

    def curve(self, kind: str, names: tuple[str, ...] = ()) -> Curve:
        """Return the first of these classes that has a curve of its own, else the kind's shares."""
        for name in names:
            if name in self.curves:
                return self.curves[name]
        if kind in ("product", "experts"):
            shares = self.product_compute, self.product_memory
        elif kind == "attention":
            shares = self.attention_compute, self.attention_memory
        elif kind == "network":
            return Curve(1.0, self.network)
        else:
            shares = 1.0, self.vector_memory
        return Curve(*shares, self.overlap, self.launch_seconds)


CPU_EFFICIENCY = Efficiency(
    product_compute=0.71,
    product_memory=0.91,
    attention_compute=1.0,
    attention_memory=0.75,
    vector_memory=1.0,
    launch_seconds=0.3e-6,
    step_seconds=0.1e-3,
    admitting_seconds=0.7e-3,
    curves={
        "product/few": Curve(0.72, 1.0, floor_seconds=0.3e-6),
        "product/many": Curve(0.71, 0.91, floor_seconds=0.3e-6),
        "attention/decode": Curve(1.0, 0.77, floor_seconds=0.3e-6),
        "attention/prefill": Curve(1.0, 0.75, floor_seconds=0.3e-6),
    },
    source="assumed as fitted on a Zen 4 with AVX-512 VNNI",
)
"""Used until `headrace roofline --measure` has fitted a machine's own. Fitted with no share above
one on the steps of `benchmarks/results/cpu_limit.json` and `cpu_truth.json` (median errors 5 and 6
%)."""
PRODUCTS = "products measured in a moment, the rest assumed"
LEAST_SHARE = 0.1
"""Share below which a measurement was disturbed."""


def of_products(few: float, many: float, float32: float) -> Efficiency:
    """Return a CPU's efficiency with measured shares of its products: of the bandwidth with few
    rows, and of the rate with many in int8 and in fp32. What is assumed was fitted to VNNI: without
    it products in int8 reach half of their rate, and those in fp32 all of it."""
    few, many, float32 = (min(max(share, LEAST_SHARE), 1.0) for share in (few, many, float32))
    known = CPU_EFFICIENCY.curves
    curves = {
        "product/few": replace(known["product/few"], compute=many, memory=few),
        "product/many": replace(known["product/many"], compute=many),
        "product/float32": replace(known["product/many"], compute=float32),
    }
    made = replace(CPU_EFFICIENCY, product_compute=many, source=PRODUCTS)
    return replace(made, curves=known | curves)
