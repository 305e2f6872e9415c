"""What a provider of operators answers, and what it is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ..base.config import Decision
from ..base.graph import AttentionSpec, Graph, Node
from .program import Provider

if TYPE_CHECKING:
    import numpy.typing as npt


class Shelf(Protocol):
    """Where a backend's repacked weights are kept between starts (`loader.panels.PanelShelf`)."""

    def kind(self, name: str) -> str | None:
        """Kind of the panels that are kept under a name; None where none are."""

    def find(
        self, name: str, kind: str, shape: tuple[int, int], size: int
    ) -> npt.NDArray[Any] | None:
        """uint8[size], read-only, or None where it is not kept."""

    def refuse(self, why: str) -> None:
        """Reject what `find` gave: it cannot be right, and nothing more of it is handed out."""

    def keep(
        self,
        name: str,
        kind: str,
        shape: tuple[int, int],
        data: npt.NDArray[Any],
        replace: Callable[[npt.NDArray[Any]], None],
    ) -> bool:
        """Take what was packed. True: `data` may go, nobody reads it, and `replace` will get the
        same bytes; False: only if they come to lie on the shelf."""


@dataclass(frozen=True, slots=True)
class Question:
    """For what a backend is asked."""

    device: str
    """"cpu" or "cuda"."""
    dtype: str
    """Type of activations: "float32", "bfloat16" or "float16"."""
    kv_dtype: str
    """"float32", "bfloat16", "float16", "fp8" or "int8"."""
    graph: Graph
    """What the model computes: asked for is who serves its kinds of nodes."""
    weights: frozenset[str]
    """Kinds among the model's matrices: a ggml type name, the dtype of a dense one ("float32",
    "bfloat16", "float16"), or "packed4" and the like for a `PackedWeight` of so many bits."""
    threads: int = 1
    deterministic: bool = False
    """Rows must be invariant, also where that costs time."""
    quantise: str = "auto"
    """"auto": weights as they come; "fp8": dense matrices of layers become fp8 at load."""
    asked: bool = False
    """The backend was named by the user: it may serve where it would not offer itself."""
    shelf: Shelf | None = None
    """Where repacked weights are kept; None: they are repacked at each start."""
    beside: Provider | None = None
    """Operators of another model here, which never compute at the same time: their threads serve
    both."""

    def nodes(self, kind: str) -> list[Node]:
        return [node for node in self.graph.nodes if node.kind == kind]

    @property
    def attentions(self) -> list[AttentionSpec]:
        return [each for each in self.graph.attentions() if isinstance(each, AttentionSpec)]

    @property
    def bidirectional(self) -> bool:
        return any(each.bidirectional for each in self.attentions)

    def head_sizes(self) -> list[int]:
        """Sizes of the heads that have pages in the KV cache, each once."""
        return sorted({each.size for each in self.attentions if not each.bidirectional})


class Backend(Protocol):
    """A provider of operators."""

    @property
    def name(self) -> str: ...

    def supports(self, kind: str, question: Question) -> str | None:
        """Does it compute the nodes of this kind? None: yes. Otherwise the reason why not, as half
        a sentence."""
        ...

    def build(self, question: Question) -> Provider:
        """The operators of the kinds that it supports; others are never called."""
        ...


@runtime_checkable
class Explaining(Protocol):
    """A backend that decides more than which operators it serves."""

    def decisions(self) -> list[Decision]:
        """What else it decided, with reasons. Asked of backends that serve an operator."""
        ...
