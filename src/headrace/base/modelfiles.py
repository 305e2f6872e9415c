"""A model on disk, opened but not loaded: the source for every later stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .arch import ModelArch, Pooling
from .config import Decision

TOOL_USE, RAG = "tool_use", "rag"
"""Names of the chat templates for requests with tools and with documents."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Made by `loader.open_model`; holds no tensor and imports no torch."""

    name: str
    """The user's name for it: catalog name, folder, file or hub id."""
    format: str
    """"safetensors", "gguf", "whisper" or "diffusers"."""
    path: Path
    """The folder, or the `.gguf` file."""
    weights: tuple[Path, ...]
    """The safetensors shards, or the `.gguf` file, and the one of its encoder of pictures."""
    arch: ModelArch
    tokenizer: Path | dict[str, Any]
    """`tokenizer.json`, or the `tokenizer.*` metadata of a GGUF file."""
    chat_template: str | None
    """Default chat template."""
    special: dict[str, str] = field(default_factory=dict)
    """bos_token, eos_token, … as text, for the chat template."""
    bos_id: int | None = None
    add_bos: bool = False
    eos_ids: tuple[int, ...] = ()
    """Ids that end a turn: from the config, the generation config and the tokenizer."""
    generation: dict[str, Any] = field(default_factory=dict)
    """Default sampling that the model's authors ship (temperature, top_p, …)."""
    licence: str | None = None
    pooling: Pooling = field(default_factory=Pooling)
    """The pooling of an embedding."""
    decisions: tuple[Decision, ...] = ()
    """Differences between the config and the weights, and their resolution."""
    named_templates: dict[str, str] = field(default_factory=dict)
    """Chat templates besides the default, by name."""
    labels: dict[str, int] = field(default_factory=dict)
    """Classes of pictures by their names, in lower case."""
    opened: Any = field(default=None, compare=False, repr=False)
    """The open file (`loader.gguf`, `loader.whisper`), for further reads in the same process."""

    def template_for(self, *, tools: bool = False, documents: bool = False) -> str | None:
        """Choose the chat template of a request, as transformers does for tools: `tool_use` or
        `rag` if the model has it, else the default."""
        for wanted, name in ((tools, TOOL_USE), (documents, RAG)):
            if wanted and name in self.named_templates:
                return self.named_templates[name]
        return self.chat_template

    @property
    def used_templates(self) -> tuple[str, ...]:
        """Every template that `template_for` may choose, the default first."""
        named = [self.named_templates.get(name) for name in (TOOL_USE, RAG)]
        return tuple(dict.fromkeys(one for one in (self.chat_template, *named) if one))
