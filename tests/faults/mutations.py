"""Mutated inputs of every kind: each gives a result or a typed error, within bounds of memory.

    kind → (valid examples, what is done with one, mutated or not)

What a reader does with hostile bytes is its own matter; that it says so with one of the project's
errors is not. Anything else that is raised is a finding.
"""

from __future__ import annotations

import json
import random
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from safetensors.numpy import save

sys.path.insert(0, str(Path(__file__).parent.parent))

from headrace.base.errors import HeadraceError
from headrace.loader.gguf import GgufFile
from headrace.loader.shards import read_headers
from headrace.models.reader import from_hf
from headrace.text import ChatTemplate, load_tokenizer
from headrace.text.grammar import from_guided, from_lark, from_regex, from_schema
from headrace.text.renderer import Renderers
from tiny import talker

Try = Callable[[bytes, Path], Any]
NUMBERS = (
    b"0",
    b"-1",
    b"2147483648",
    b"4294967295",
    b"9223372036854775807",
    b"1e999",
    b"null",
    b"NaN",
    b"[]",
    b"{}",
    b'""',
    b"true",
    b"0.5",
)


def mutated(data: bytes, draw: random.Random) -> bytes:
    """A few changes of the kinds that readers trip over."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at = draw.randrange(len(out) + 1)
        match draw.randrange(8):
            case 0 if out:
                out[at % len(out)] ^= 1 << draw.randrange(8)
            case 1:
                out[at : at + draw.choice((1, 4, 8))] = draw.choice(
                    (b"\xff" * 8, b"\0" * 8, struct.pack("<Q", 2**63), struct.pack("<I", 2**31))
                )
            case 2:
                del out[at : at + draw.choice((1, 3, 64))]
            case 3:
                out[at:at] = out[at : at + draw.choice((1, 16, 256))]
            case 4:
                del out[at:]
            case 5:  # A number or a value of JSON becomes another.
                digits = [place for place, byte in enumerate(out) if chr(byte).isdecimal()]
                if digits:
                    place = draw.choice(digits)
                    out[place : place + 1] = draw.choice(NUMBERS)
            case 6:
                out[at:at] = draw.choice((b"[" * 2000, b'{"a":' * 500, b"((", b"%}", b"{{", b"\\u"))
            case _:
                other = draw.randrange(len(out) + 1)
                out[at:at] = out[other : other + 32]
    return bytes(out)


def _tokenizer(data: bytes, folder: Path) -> Any:
    path = folder / "tokenizer.json"
    path.write_bytes(data)
    tokenizer = load_tokenizer(folder)
    return tokenizer.decode(tokenizer.encode("The headrace, naïve 🙂")[:50])


def _config(data: bytes, folder: Path) -> Any:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None  # The reader of the folder says so.
    return from_hf(value) if isinstance(value, dict) else None


def _safetensors(data: bytes, folder: Path) -> Any:
    path = folder / "model.safetensors"
    path.write_bytes(data)
    return read_headers((path,))


def _gguf(data: bytes, folder: Path) -> Any:
    path = folder / "model.gguf"
    path.write_bytes(data)
    opened = GgufFile(path)
    return [opened.view(name).sum() for name in opened.tensors]


class _OneProcess(Renderers):
    """A process that goes from template to template: starting one takes a quarter of a second."""

    _kept: ClassVar[list[Any]] = []

    def _one(self) -> Any:
        while self._kept:
            renderer = self._kept.pop()
            if renderer.alive and renderer.running:
                renderer.take(self._source)
                break
        else:
            renderer = super()._one()
        self._kept.append(renderer)
        return renderer


def _template(data: bytes, folder: Path) -> Any:
    template = ChatTemplate(data.decode("utf-8", "replace"))
    template._renderers = _OneProcess(template.source)
    return template.render([{"role": "user", "content": "x"}])


def _schema(data: bytes, folder: Path) -> Any:
    return from_schema(data.decode("utf-8", "replace"), "schema")


def _lark(data: bytes, folder: Path) -> Any:
    return from_lark(data.decode("utf-8", "replace"), "grammar")


def _regex(data: bytes, folder: Path) -> Any:
    return from_regex(data.decode("utf-8", "replace"), "regex")


def _guided(data: bytes, folder: Path) -> Any:
    return from_guided(structural_tag=data.decode("utf-8", "replace"))


def _small_gguf() -> bytes:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    entries = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("llama.block_count") + struct.pack("<II", 4, 2),
        text("tokens") + struct.pack("<IIQ", 9, 8, 3) + text("a") + text("b") + text("<end>"),
        text("scores") + struct.pack("<IIQ", 9, 6, 2) + struct.pack("<ff", 1.0, 2.0),
    ]
    tensors = text("w") + struct.pack("<IQQIQ", 2, 8, 4, 0, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(entries)) + b"".join(entries) + tensors
    return head + b"\0" * (-len(head) % 32) + np.arange(32, dtype="<f4").tobytes()


TEMPLATE = (
    "{%- if messages[0].role == 'system' %}{% set first = messages[0].content | trim %}"
    "{%- else %}{% set first = 'You are ' ~ ['kind', 'able'] | join(' and ') %}{% endif %}"
    "{%- set ns = namespace(seen=0) %}{% macro turn(m, end='<end>') %}"
    "{{- m.role | upper }}: {{ m.content | replace('\n', ' ') | truncate(99) ~ end }}{% endmacro %}"
    "{%- for m in messages if m.role != 'system' %}{% set ns.seen = ns.seen + loop.index0 * 2 %}"
    "{{- turn(m) if loop.last else turn(m, end='') }}{{ m | tojson(indent=2) }}"
    "{%- for word in m.content.split(' ')[:8] | map('lower') | sort | unique %}{{ word[1:-1] }}"
    "{%- endfor %}{% endfor %}{{ '%.2f' | format(ns.seen | float) }}{{ range(9) | sum }}"
    "{%- if add_generation_prompt and not tools %}{{ '<assistant>' }}{% endif %}"
)


def examples() -> dict[str, tuple[list[bytes], Try]]:
    """kind → (valid inputs, what reads one)."""
    with tempfile.TemporaryDirectory() as name:
        folder = talker.make(Path(name) / "model")
        tokenizer = (folder / "tokenizer.json").read_bytes()
        config = (folder / "config.json").read_bytes()
    schema = {
        "type": "object",
        "required": ["a"],
        "additionalProperties": False,
        "properties": {
            "a": {"type": "integer", "minimum": 1, "maximum": 90},
            "b": {"enum": ["x", 1, None]},
            "c": {"$ref": "#/$defs/c"},
            "d": {"type": "string", "pattern": "^[a-z]{1,8}$", "maxLength": 8},
        },
        "$defs": {"c": {"anyOf": [{"type": "null"}, {"type": "array", "maxItems": 3}]}},
    }
    tag = {
        "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
        "triggers": ["<f"],
    }
    lark = b'start: item ("," item)*\nitem: NAME | "(" start ")"\nNAME: /[a-z]{1,9}/\n%ignore " "'
    tensors = {"w": np.ones((2, 3), np.float32), "b": np.zeros(3, np.float16)}
    return {
        "tokenizer": ([tokenizer], _tokenizer),
        "config": ([config], _config),
        "safetensors": ([save(tensors)], _safetensors),
        "gguf": ([_small_gguf()], _gguf),
        "template": ([talker.CHATML.encode(), TEMPLATE.encode()], _template),
        "schema": ([json.dumps(schema).encode()], _schema),
        "lark": ([lark], _lark),
        "regex": ([rb"(https?://)?[a-z0-9.-]{1,63}(:\d{2,5})?(/\S*)?"], _regex),
        "structural_tag": ([json.dumps(tag).encode()], _guided),
    }


def mutate(
    kind: str, count: int, seed: int = 0, before: Callable[[int], object] = lambda number: None
) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Try `count` mutations; returns how they ended (read, refused), and the findings: (seed of
    the mutation, what was raised). `before` is told the seed of each, before it is tried."""
    valid, attempt = examples()[kind]
    ends: Counter[str] = Counter()
    findings: list[tuple[int, str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for data in valid:
            attempt(data, folder)  # What is whole is read.
        for number in range(seed, seed + count):
            draw = random.Random(number)
            before(number)
            try:
                attempt(mutated(draw.choice(valid), draw), folder)
                ends["read"] += 1
            except HeadraceError:
                ends["refused"] += 1
            except BaseException as fault:
                if isinstance(fault, KeyboardInterrupt):
                    raise
                ends["untyped"] += 1
                findings.append((number, f"{type(fault).__name__}: {fault}"[:300]))
    return ends, findings
