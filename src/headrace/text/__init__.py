"""Owns: tokenizer, incremental detokenizer, chat template, stop strings, stream router. Takes →
gives: text and messages → token ids; token ids → text. Does not know: models, sequences, HTTP.
Invariant: emitted text is never taken back and never half a character. Where does my change go:
anything between characters and token ids."""

from __future__ import annotations

from .detokenizer import IncrementalDetokenizer
from .dialects import DIALECTS, Dialect, detect_dialect, find_dialect
from .foreign import Foreign, encode_between
from .load import load_tokenizer
from .reasoning import ReasoningMarks, detect_reasoning
from .router import StreamRouter
from .stops import StopStrings
from .template import ChatTemplate, ChatTemplates, open_end
from .tokenizer import Tokenizer

__all__ = [
    "DIALECTS", "ChatTemplate", "ChatTemplates", "Dialect", "Foreign", "IncrementalDetokenizer",
    "ReasoningMarks", "StopStrings", "StreamRouter", "Tokenizer", "detect_dialect",
    "detect_reasoning", "encode_between", "find_dialect", "load_tokenizer", "open_end",
]  # fmt: skip
