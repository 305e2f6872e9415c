"""A draft model or a head before a start: found, checked against the target, its slots planned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...base.config import Decision, EngineOptions
from ...base.errors import DoesNotFit, HeadraceError, OptionError, UnsupportedModel
from ...base.groups import block_bytes, slot_groups
from ...base.modelfiles import ModelFiles
from ...base.step import GroupShape
from ...loader import open_model
from ...loader.heads import HeadFiles, open_head
from ...models.heads import describe_head
from ...models.registry import describe
from .tokenizers import tokenizer_of

SLOTS = 8
"""Sequences that it drafts for at the same time. With more of them only almost certain drafts pay
to be verified, and a model's are not."""
SHARE = 0.0625
"""Share of the available memory for its slots."""
LEAST = 256
"""Least tokens of a slot; with less room the draft model does not fit."""
FOREIGN = 0.02
"""Share of the longer vocabulary that the other may lack at its end: files list unused rows, or
leave them out."""


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """The draft model for the worker and the memory plan."""

    path: str
    """Path from which the worker opens it again."""
    file_bytes: int
    """Size of its weights as they are stored."""
    slots: tuple[GroupShape, ...]
    """KV groups of its part."""
    decision: Decision


def plan_draft(options: EngineOptions, target: ModelFiles, available: int) -> DraftPlan:
    """Open `draft_model`, which is a model or a head for `target`, and plan its slots. `options`
    are resolved ones.

    Raises the errors of `open_model` and `open_head`, and `OptionError` or `UnsupportedModel` if it
    cannot draft for `target`. Raises `DoesNotFit` if the least slot exceeds its part of `available`
    bytes.
    """
    assert options.draft_model is not None
    folder = Path(options.cache_dir) if options.cache_dir else None
    try:
        head = open_head(options.draft_model, target)
        files = head or open_model(options.draft_model, cache_dir=folder, offline=options.offline)
    except HeadraceError as error:
        error.param = "draft_model"
        raise
    what = ""
    if isinstance(files, HeadFiles):
        what, arch, size = f"{files.arch.kind} head, ", files.arch.arch, files.nbytes
        _verify_head(files, options)
        graph = describe_head(files.arch, 1)
    else:
        arch, size = files.arch, sum(path.stat().st_size for path in files.weights)
        _verify_model(files, target)
        graph = describe(arch)
    each = sum(block_bytes(one, 1) for one in slot_groups(graph, options.kv_dtype, 1, 1))
    context = min(options.max_context or target.arch.max_context, arch.max_context)
    tokens = int(available * SHARE) // each
    least = min(LEAST, context)
    if tokens < least:
        raise DoesNotFit(
            f"draft_model {files.name} needs {least * each} bytes of cache for {least} tokens, and "
            f"{int(available * SHARE)} are its part of the memory",
            param="draft_model",
        )
    if tokens < context:
        context = tokens // options.block_size * options.block_size
    slots = max(1, min(SLOTS, options.max_sequences or 1, tokens // context))
    reason = (
        f"{what}drafts for {slots} sequences at once, each up to {context} tokens of {each} bytes "
        "in its cache"
    )
    return DraftPlan(
        str(files.path),
        size,
        slot_groups(graph, options.kv_dtype, slots, context),
        Decision("draft_model", files.name, reason),
    )


def _verify_head(files: HeadFiles, options: EngineOptions) -> None:
    if options.layout != "1":
        raise OptionError(
            f"draft_model {files.name} is a head, and ranks have none", param="draft_model"
        )
    if options.dtype != "float32":
        raise OptionError(
            f"draft_model {files.name} is a head, which needs dtype float32, not {options.dtype}",
            param="draft_model",
        )


def _verify_model(files: ModelFiles, target: ModelFiles) -> None:
    if files.arch.task != "tokens":
        raise OptionError(f"draft_model {files.name} makes no tokens", param="draft_model")
    if files.arch.recurrence is not None:
        raise UnsupportedModel(
            f"draft_model {files.name} keeps states, which do not go back to where a draft was "
            "refused",
            param="draft_model",
        )
    _verify_vocabulary(files, target)


def _verify_vocabulary(files: ModelFiles, target: ModelFiles) -> None:
    """Raise `OptionError` if an id may mean different tokens to the two models."""
    ours, its = (tokenizer_of(one).vocabulary for one in (target, files))
    both, longer = sorted((len(ours.tokens), len(its.tokens)))
    if both < (1 - FOREIGN) * longer:
        why = f"{len(its.tokens)} tokens, not {len(ours.tokens)}"
    elif ours.kind != its.kind:
        why = f"{its.kind} pieces, not {ours.kind}"
    else:
        pairs = zip(ours.tokens, its.tokens, strict=False)
        other = next((id for id, (one, two) in enumerate(pairs) if one != two), None)
        if other is None:
            return
        why = f"{its.tokens[other]!r:.40} as token {other}, not {ours.tokens[other]!r:.40}"
    raise OptionError(
        f"draft_model {files.name} has another vocabulary than {target.name}: {why}",
        param="draft_model",
    )
