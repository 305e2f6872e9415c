"""Marks of a model's reasoning in its text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    open: str
    close: str
    behind: str = ""
    """Text between reasoning and the answer's own beginning."""

    def open_in(self, prompt: str, answer: str = "") -> bool:
        """Return whether the prompt ends inside reasoning, which the model then continues.

        `answer`: the end of the prompt that is the beginning of the answer. A mark counts in it and
        right before it; one further up was written in an earlier turn.
        """
        _, mark, thoughts = prompt.rpartition(self.open)
        if not mark or self.close in thoughts:
            return False
        return answer.rstrip().endswith(thoughts.strip())


THINK = ReasoningMarks("<think>", "</think>")
HARMONY = ReasoningMarks("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant")
MARKS = (
    THINK,
    ReasoningMarks("[THINK]", "[/THINK]"),
    ReasoningMarks("<seed:think>", "</seed:think>"),
    ReasoningMarks("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningMarks("<|channel>thought\n", "<channel|>"),  # Gemma 4
)


def detect_reasoning(template: str | None) -> ReasoningMarks | None:
    """Find the marks that a chat template names: one that strips earlier reasoning, or opens it."""
    if template and HARMONY.open in template:  # Others end a turn with HARMONY.close.
        return HARMONY
    return next((marks for marks in MARKS if template and marks.close in template), None)
