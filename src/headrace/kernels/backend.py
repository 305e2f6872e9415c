"""The interface of an operator provider, and the question that it is asked."""

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
    """Cache of a backend's repacked weights between starts (`loader.panels.PanelShelf`)."""

    def kind(self, name: str) -> str | None:
        """Return the kind of the panels kept under a name, or None."""

    def find(
        self, name: str, kind: str, shape: tuple[int, int], size: int
    ) -> npt.NDArray[Any] | None:
        """Return uint8[size], read-only, or None if it is not kept."""

    def refuse(self, why: str) -> None:
        """Reject as damaged the bytes that `find` gave; they are not handed out any more."""

    def keep(
        self,
        name: str,
        kind: str,
        shape: tuple[int, int],
        data: npt.NDArray[Any],
        replace: Callable[[npt.NDArray[Any]], None],
    ) -> bool:
        """Take packed weights. True: `data` may be freed, and `replace` will get the same bytes.
        False: `replace` gets them only if they end up on the shelf."""


@dataclass(frozen=True, slots=True)
class Question:
    """Model and options that a backend should serve."""

    device: str
    """"cpu" or "cuda"."""
    dtype: str
    """Type of activations: "float32", "bfloat16" or "float16"."""
    kv_dtype: str
    """"float32", "bfloat16", "float16", "fp8" or "int8"."""
    graph: Graph
    """Graph of the model; backends are asked which kinds of its nodes they serve."""
    weights: frozenset[str]
    """Kinds among the model's matrices: a ggml type name, the dtype of a dense one ("float32",
    "bfloat16", "float16"), or "packed4" and the like for a `PackedWeight` of that many bits."""
    threads: int = 1
    deterministic: bool = False
    """Whether rows must be invariant even if that costs time."""
    quantise: str = "auto"
    """"auto": weights as stored; "fp8": dense matrices of layers become fp8 at load."""
    asked: bool = False
    """Whether the user named the backend: it may then serve where it does not offer itself."""
    shelf: Shelf | None = None
    """Cache of repacked weights; None: they are repacked at each start."""
    beside: Provider | None = None
    """Operators of another model in this process. The two never compute at the same time, so they
    share threads."""

    def nodes(self, kind: str) -> list[Node]:
        return [node for node in self.graph.nodes if node.kind == kind]

    @property
    def attentions(self) -> list[AttentionSpec]:
        return [each for each in self.graph.attentions() if isinstance(each, AttentionSpec)]

    @property
    def bidirectional(self) -> bool:
        return any(each.bidirectional for each in self.attentions)

    def head_sizes(self) -> list[int]:
        """Return the distinct head sizes in the KV cache, ascending."""
        return sorted({each.size for each in self.attentions if not each.bidirectional})


class Backend(Protocol):
    """A provider of operators."""

    @property
    def name(self) -> str: ...

    def supports(self, kind: str, question: Question) -> str | None:
        """Return None if this backend computes the nodes of this kind, else the reason why not, as
        half a sentence."""
        ...

    def build(self, question: Question) -> Provider:
        """Build the operators of the supported kinds; others are never called."""
        ...


@runtime_checkable
class Explaining(Protocol):
    """A backend that decides more than its list of operators."""

    def decisions(self) -> list[Decision]:
        """Return its other decisions, with reasons. Called on backends that serve an operator."""
        ...
