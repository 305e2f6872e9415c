"""Parallelism layouts of one copy of a model: the terms of planner, simulator and server."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .arch import ModelArch
from .errors import OptionError


@dataclass(frozen=True, slots=True)
class Layout:
    """The spread of one copy of a model over devices.

    `tp` ranks share every layer, `pp` stages share the layers. Each of the `dp` groups of `tp`
    ranks has the attention of its own sequences; all share the experts (DeepSeek-V3, section 3.4).
    With `ep` the experts are whole and spread over all tp · dp ranks of a stage; without it each
    rank has a slice of every expert.
    """

    tp: int = 1
    pp: int = 1
    ep: bool = False
    dp: int = 1

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Parse the output of `str`, with either dot: `TP2`, `TP2.PP2`, `TP4.DP2.EP8`, `1`; and
        `EP2` for `TP2.EP2`. Raises `OptionError`."""
        sizes = {"TP": 1, "PP": 1, "DP": 1, "EP": 0}
        for part in [] if text.strip() == "1" else text.upper().replace("·", ".").split("."):
            found = re.fullmatch(r"(TP|PP|DP|EP)([1-9]\d{0,3})", part.strip())
            if found is None:
                raise OptionError(
                    f"layout must be parts such as TP2 or TP2.PP2, not {text!r:.80}", param="layout"
                )
            sizes[found[1]] = int(found[2])
        if sizes["TP"] == sizes["DP"] == 1 < sizes["EP"]:
            sizes["TP"] = sizes["EP"]
        layout = cls(sizes["TP"], sizes["PP"], sizes["EP"] > 0, sizes["DP"])
        if sizes["EP"] not in (0, layout.ranks):
            raise OptionError(
                f"layout {text:.80}: experts are spread over all {layout.ranks} ranks, so EP is "
                f"EP{layout.ranks}",
                param="layout",
            )
        return layout

    @property
    def ranks(self) -> int:
        """Devices of one stage, among which the experts are shared."""
        return self.tp * self.dp

    @property
    def devices(self) -> int:
        return self.ranks * self.pp

    @property
    def engines(self) -> int:
        """Batches in work at a time: one per data-parallel group and pipeline stage."""
        return self.dp * self.pp

    def __str__(self) -> str:
        parts = [
            f"{name}{size}"
            for name, size in (("TP", self.tp), ("PP", self.pp), ("DP", self.dp))
            if size > 1
        ]
        if self.ep:
            parts.append(f"EP{self.ranks}")
        return "·".join(parts) or "1"

    def refusal(self, arch: ModelArch) -> str | None:
        """Return the reason why this model cannot be spread so; None if it can."""
        if arch.heads % self.tp:
            return f"{arch.heads} heads cannot be shared by {self.tp} ranks"
        if arch.layers < self.pp:
            return f"{arch.layers} layers cannot make {self.pp} stages"
        if arch.moe is None and (self.ep or self.dp > 1):
            return "a dense model has no experts to spread"
        if arch.moe is not None:
            if self.dp > 1 and not self.ep:
                return "data-parallel attention needs the experts to be spread (EP)"
            if self.ep and arch.moe.experts % self.ranks:
                return f"{arch.moe.experts} experts cannot be shared by {self.ranks} ranks"
            if not self.ep and arch.moe.intermediate // self.tp < 64:
                return f"experts of {arch.moe.intermediate} are too narrow for {self.tp} slices"
        return None

    def verify(self, arch: ModelArch) -> None:
        reason = self.refusal(arch)
        if reason is not None:
            raise OptionError(f"layout {self}: {reason}", param="layout")


ONE = Layout()
"""The layout of a model on one device."""
