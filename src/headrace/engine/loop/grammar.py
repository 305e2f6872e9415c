"""Grammars between the planes: the tokenizer that the worker's matchers need.

The worker must not know `text`, so the tokenizer of its matchers is made here. It takes seconds for
a large vocabulary, so it is made in a thread, when the first grammar comes. Until then, and until
its grammar is compiled, a sequence waits in the queue and holds up no others.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from ...base.modelfiles import ModelFiles
from ...base.request import Request
from ...sched.work import Work
from .tokenizers import tokenizer_of


def tokenizer_for_grammars(files: ModelFiles) -> Callable[[], Any] | None:
    """Return a function that makes the model's `llguidance.LLTokenizer`, or None without
    llguidance."""
    if find_spec("llguidance") is None:
        return None

    def make() -> Any:
        # Local: a process whose requests have no grammar does not load the library.
        from ...text.lltokenizer import grammar_tokenizer

        vocabulary = files.arch.vocab_size
        return grammar_tokenizer(tokenizer_of(files), vocab_size=vocabulary, eos_ids=files.eos_ids)

    return make


class GrammarResource:
    """A `sched.Resource`: a sequence runs once the worker has its grammar compiled."""

    def __init__(self, prepare: Callable[[str, str], bool]) -> None:
        """`prepare`: begins to compile a source for an owner; returns whether it is done."""
        self._prepare = prepare

    def verify(self, request: Request) -> None:
        """Accept: every grammar becomes ready, or fails and ends its own request."""

    def prepare(self, work: Work) -> bool:
        request = work.request
        grammar = request.spec.grammar
        # Requests that share no prefixes share no place in the queue either.
        return grammar is None or self._prepare(grammar, request.cache_salt)

    def free(self, work: Work) -> None:
        """Free nothing."""
