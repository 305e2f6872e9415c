"""The query sample library: made from a seed, a user's data set, or a recorded trace.

A data set's rows have a prompt (token ids, a text or messages) and may have a ground truth. Names
are those of MLPerf's own files: `tok_input`, `input`, `output` (llama3.1-8b), `question`,
`ground_truth` (gpt-oss) and the like. JSON, JSON lines, or parquet (through DuckDB). Pickles are
refused: reading one can run any code.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.errors import InvalidRequest
from ..base.extras import needing
from .lengths import Lengths
from .material import Material
from .sounds import Recording
from .traces import load_trace
from .workload import ROLE_USER, Turn

IDS = ("tok_input", "input_ids", "prompt_token_ids", "input_tokens")
TEXTS = ("input", "prompt", "text", "question", "problem")
TRUTHS = ("ground_truth", "output", "reference", "target", "answer", "ref_output")
LENGTHS = ("output_tokens", "max_tokens", "ref_output_tokens")
MOST_BYTES = 8 * 2**30


@dataclass(frozen=True, slots=True)
class LibrarySample:
    """One request: preceding messages, the prompt, and the right answer."""

    turn: Turn
    history: tuple[dict[str, str], ...] = ()
    """Messages up to the turn's text, inclusive; empty if the turn has token ids."""
    truth: str | None = None
    recording: Recording | None = None
    """The sound of a transcription sample."""


def made(
    count: int, input: Lengths, output: Lengths, material: Material, seed: int
) -> list[LibrarySample]:
    """Make prompts from a seed: ids if `material` has a tokenizer, else text."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        tokens, answer = input.draw(rng), output.draw(rng)
        if material.ids:
            found.append(LibrarySample(Turn("", answer, ids=material.tokens(tokens, rng))))
        else:
            found.append(_said(material.text(tokens, rng), answer, None))
    return found


def from_dataset(path: Path, output: Lengths, limit: int | None) -> list[LibrarySample]:
    """Read rows of a data set; `InvalidRequest` names the bad row."""
    rng, found = random.Random(0), []
    for number, row in enumerate(_rows(path), 1):
        if limit is not None and number > limit:
            break
        try:
            found.append(_sample(row, output.draw(rng)))
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"{path}, row {number}: {error}; a row has one of {', '.join((*IDS, *TEXTS))} or "
                "messages",
                param="dataset",
            ) from None
    if not found:
        raise InvalidRequest(f"{path} holds no sample", param="dataset")
    return found


def from_trace(trace: str, material: Material, limit: int | None) -> list[LibrarySample]:
    """Make a sample of each recorded turn with its recorded history.

    LoadGen draws samples in its own order, so a turn cannot wait for the previous one. With
    recorded answers it need not.
    """
    kind, _, path = trace.partition(":")
    found = []
    for session in load_trace(kind, Path(path), material):
        history: list[dict[str, str]] = []
        if session.system:
            history.append({"role": "system", "content": session.system})
        for turn in session.turns:
            if turn.ids is not None:
                found.append(LibrarySample(turn))
                continue
            history.append({"role": turn.role, "content": turn.text})
            found.append(LibrarySample(turn, tuple(history), turn.answer))
            if turn.answer is None and turn is not session.turns[-1]:
                raise InvalidRequest(
                    f"{path}: a session of several turns needs its recorded answers "
                    '({"messages": …})',
                    param="trace",
                )
            history.append({"role": "assistant", "content": turn.answer or ""})
    return found[:limit]


def _sample(row: Any, output: int) -> LibrarySample:
    if not isinstance(row, dict):
        raise TypeError(f"{type(row).__name__} is no object")
    length = next((row[name] for name in LENGTHS if row.get(name)), None)
    tokens = output if length is None else int(length)
    if tokens < 1:
        raise ValueError("output tokens must be at least 1")
    truth = next((str(row[name]) for name in TRUTHS if row.get(name) is not None), None)
    ids = next((row[name] for name in IDS if row.get(name) is not None), None)
    if ids is not None:
        numbers = [int(one) for one in ids]
        if not numbers:
            raise ValueError("its prompt is empty")
        return LibrarySample(Turn("", tokens, ids=numbers, prompt_tokens=len(numbers)), truth=truth)
    if row.get("messages"):
        said = tuple({name: str(m[name]) for name in ("role", "content")} for m in row["messages"])
        return LibrarySample(Turn(said[-1]["content"], tokens), said, truth)
    text = next((str(row[name]) for name in TEXTS if row.get(name)), "")
    if not text:
        raise ValueError("it has no prompt")
    return _said(text, tokens, truth)


def _said(text: str, output: int, truth: str | None) -> LibrarySample:
    return LibrarySample(Turn(text, output), ({"role": ROLE_USER, "content": text},), truth)


def _rows(path: Path) -> list[Any]:
    if path.suffix in (".pkl", ".pickle"):
        raise InvalidRequest(
            f"{path} is a pickle, which could run anything: save it as JSON lines or parquet "
            "(pandas: to_json(orient='records', lines=True))",
            param="dataset",
        )
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InvalidRequest(f"{path} is larger than {MOST_BYTES >> 30} GiB", param="dataset")
        if path.suffix == ".parquet":
            return _parquet(path)
        text = path.read_text()
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        data = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path}: {error}", param="dataset") from None
    if not isinstance(data, list):
        raise InvalidRequest(f"{path} is no list of samples", param="dataset")
    return data


def _parquet(path: Path) -> list[Any]:
    with needing("parquet needs", "bench", param="dataset"):
        import duckdb
    try:
        with duckdb.connect() as database:
            found = database.execute("SELECT * FROM read_parquet(?)", [str(path)])
            names = [column[0] for column in found.description]
            return [dict(zip(names, row, strict=True)) for row in found.fetchall()]
    except duckdb.Error as error:
        raise InvalidRequest(f"{path}: {error}", param="dataset") from None
