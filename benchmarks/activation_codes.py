"""What other codes of activations would give: the reference with its products' inputs rounded.

    python benchmarks/activation_codes.py [--json FILE] [--models NAME ...] [--tokens 200]

Distances as in kernel_distance.py, over the first two of its texts; beside them by how much the
integer operations of a prompt would grow, from those of the products and, of smaller groups, from
the arithmetic in csrc/panel.h. Rounding depends on no other row, so each choice is one for any
number of rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from kernel_distance import Said, distance, said_by, started, texts

from headrace.base.config import DEFAULT_MODEL
from headrace.kernels import reference

Codes = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The numbers that codes of these stand for; given what size each channel has in another text."""
KINDS = ("q, k, v", "output", "gate and up", "down", "head")
NORMED = ("q, k, v", "gate and up", "head")
"""Products of what a norm gives: its channels differ, whatever the token."""
SMALLER = 20.0
"""Per cent that groups of 16 add to a unit: a conversion and a multiplication more to ten."""


def eight(x: torch.Tensor, sizes: torch.Tensor, group: int = 32) -> torch.Tensor:
    """Codes of eight bits, a scale for each `group`: with 32 what the kernels have."""
    groups = x.unflatten(-1, (-1, group))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return ((groups / scale).round() * scale).flatten(-2)


def eight_of_sixteen(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return eight(x, sizes, 16)


def sixteen(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Codes of eight bits, and what they leave out in such codes again."""
    high = eight(x, sizes)
    return high + eight(x - high, sizes)


def shifted(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Codes of eight bits of channels that stand out in their groups divided by up to 8: a weight's
    code of four bits leaves room for a multiplication by as much."""
    groups = sizes.unflatten(-1, (-1, 32))
    apart = groups / (1.5 * groups.median(-1, keepdim=True).values)
    by = apart.clamp(min=1).log2().ceil().clamp(max=3).exp2().flatten()
    return eight(x / by, sizes) * by


LARGEST = 2.39
"""Root mean square of the largest of 32 normal numbers."""


def even(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """The error of eight bits as if no number of a group stood out: what splitting, scaling or
    turning channels can reach at best."""
    groups = x.unflatten(-1, (-1, 32))
    size = groups.square().mean(-1, keepdim=True).sqrt() * (LARGEST / 127 / 12**0.5)
    return (groups + torch.randn_like(groups) * size).flatten(-2)


class Products:
    """Stands for the reference's product: rounds what each reads."""

    def __init__(self, layers: int) -> None:
        self._layers, self._plain = layers, reference.product
        self._places: dict[int, int] = {}
        self.operations = dict.fromkeys(KINDS, 0)
        self.sizes: dict[int, torch.Tensor] = {}
        self.codes: dict[str, Codes] = {}

    def __call__(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """They come in one order: four of each layer, and the head."""
        place = self._places.setdefault(matrix.data_ptr(), len(self._places))
        kind = KINDS[place % 4] if place < 4 * self._layers else "head"
        if not self.codes:
            self.operations[kind] += x.shape[0] * matrix.numel()
            self.sizes[place] = x.square().mean(0).sqrt()
            return self._plain(x, matrix)
        return self._plain(self.codes[kind](x, self.sizes[place]), matrix)


def choices() -> Iterator[tuple[str, dict[str, Codes], dict[str, float]]]:
    """What is tried, the codes by product, and by how many per cent it grows."""
    served: dict[str, Codes] = dict.fromkeys(KINDS, eight)
    yield "8 bits in groups of 32 (served)", served, {}
    yield "groups of 16", dict.fromkeys(KINDS, eight_of_sixteen), dict.fromkeys(KINDS, SMALLER)
    yield "channels that stand out shifted", dict.fromkeys(KINDS, shifted), {}
    yield "as if no number stood out in its group", dict.fromkeys(KINDS, even), {}
    for kinds in (("head",), ("down",), NORMED, (*NORMED, "down"), KINDS):
        more = dict.fromkeys(kinds, 100.0)
        yield f"16 bits: {'; '.join(kinds)}", served | dict.fromkeys(kinds, sixteen), more


def tried(model: str, tokens: int) -> dict[str, Any]:
    torch.manual_seed(0)
    *given, _, other = texts(model, tokens)
    worker = started(model, "ref", "float32", tokens)
    products = Products(worker.arch.layers)
    reference.product = products
    wanted: Said = said_by(worker, given)
    said_by(worker, [other])
    operations = products.operations
    found = {}
    for name, codes, more in choices():
        products.codes = codes
        grown = {kind: more.get(kind, 0.0) * operations[kind] for kind in KINDS}
        # A prompt needs the head for its last token alone; with 32 rows each needs it.
        layers = sum(operations.values()) - operations["head"]
        found[name] = distance(said_by(worker, given), wanted) | {
            "prompt, %": (sum(grown.values()) - grown["head"]) / layers,
            "rows, %": sum(grown.values()) / sum(operations.values()),
        }
        print(model, name, json.dumps(found[name]), flush=True)
    reference.product = products._plain
    worker.close()
    return {"tokens": len(wanted.chosen), "choices": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", nargs="+", default=(DEFAULT_MODEL, "smollm2-135m"))
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    found = {model: tried(model, options.tokens) for model in options.models}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
