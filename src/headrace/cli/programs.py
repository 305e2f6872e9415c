"""`headrace programs`: foreign programs, inspected and run."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
import typer

from ..base.errors import InvalidRequest, PackageAbsent, file_errors
from ..base.foreign import Undecodable, any_json
from ..base.names import nearest
from ..loader.catalog import CATALOG
from ..loader.open import fetched
from ..loader.progress import ProgressLine
from ..programs import Inspection, ProgramLimits, inspected
from ..programs.confined import ConfinedProgram
from ..programs.drawn import random_nodes
from ..programs.files import read
from ..programs.onnx import MOST_RANK, Port
from .flags import argument, flag
from .models import size

command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_MADE = re.compile(r"(random|zeros)(?::(\d{1,9}(?:x\d{1,9})*))?")
_ALLOWED = {"b": "b", "f": "iuf"}
"""Kind of an input's elements → allowed kinds of the JSON values; by default integers."""
MOST_SHOWN = 4096
"""Most printed elements of an output; a file has all."""
MOST_INPUT = 1 << 30
"""Most bytes of an input."""

File = Annotated[
    str,
    argument(
        "An .onnx file, or of the catalog: vad-silero, ocr-pp-v4/det.onnx.", show_default=False
    ),
]
Inputs = Annotated[
    list[str] | None,
    flag(
        "name=VALUE: @FILE.npy, a JSON number or list, random or zeros, with the shape if the "
        "program leaves it open (random:1x3x48x320). Others: states zeros, the rest random.",
        "--input",
        show_default=False,
    ),
]
CacheDir = Annotated[Path | None, flag("Where models are kept.", "--cache-dir", show_default=False)]
Memory = Annotated[
    float, flag("GB of weights, and of values in a run.", "--memory", min=0.001, max=1e6)
]
Seconds = Annotated[float, flag("Time limit of a run.", "--seconds", min=0.001, max=1e6)]
Seed = Annotated[
    int, flag("Of the program's draws, and of random inputs.", "--seed", min=0, max=2**63)
]


@command.command()
def inspect(
    file: File,
    given: Inputs = None,
    rows: Annotated[int, flag("Rows to try together.", "--rows", min=2, max=256)] = 4,
    memory: Memory = 4.0,
    seconds: Seconds = 30.0,
    seed: Seed = 0,
    as_json: Annotated[bool, flag("Print one JSON object.", "--json")] = False,
    cache_dir: CacheDir = None,
) -> None:
    """Show a program's operators, shapes, states and random nodes, its cost in a process that may
    only compute, and whether rows may go together; refuse what may not be loaded."""
    limits = ProgramLimits(memory=int(memory * 1e9), seconds=seconds)
    found = inspected(_path(file, cache_dir), limits)
    report = _described(found)
    try:
        report |= _measured(ConfinedProgram(found, limits), given or [], rows, seed)
    except PackageAbsent as absent:
        report["not measured"] = absent.message
    if as_json:
        print(json.dumps(report))
        return
    for name, value in report.items():
        for at, line in enumerate(value if isinstance(value, list) else [value]):
            shown = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in str(line))
            print(f"{'' if at else name:14}{shown}")


@command.command()
def run(
    file: File,
    given: Inputs = None,
    output: Annotated[
        Path | None, flag("An .npz file of all outputs.", "--output", show_default="JSON")
    ] = None,
    memory: Memory = 4.0,
    seconds: Seconds = 30.0,
    seed: Seed = 0,
    cache_dir: CacheDir = None,
) -> None:
    """Run a program once, in a process that may only compute; print its outputs as JSON, or write
    them to a file."""
    limits = ProgramLimits(memory=int(memory * 1e9), seconds=seconds)
    program = ConfinedProgram(inspected(_path(file, cache_dir), limits), limits)
    try:
        program.start()
        feed = _feed(program, given or [], seed)
        begun = time.perf_counter()
        found = program.run(feed, seed=seed)
        took = time.perf_counter() - begun
    finally:
        program.close()
    if output is None:
        shown = {name: _shown(value) for name, value in found.items()}
        print(json.dumps({"outputs": shown, "seconds": round(took, 6)}))
        return
    with (
        file_errors(InvalidRequest, f"{output} cannot be written"),
        output.open("wb") as target,
    ):
        _save(target, found)
    print(f"{output}: {', '.join(found)}")


def _path(name: str, cache_dir: Path | None) -> Path:
    """Return the file for a path or a catalog name; download it if needed."""
    path = Path(
        os.path.expanduser(name)
    )  # Unlike Path's own, it keeps the name of an unknown user.
    entry, _, inner = name.partition("/")
    with suppress(OSError, ValueError):
        if path.is_file() or entry not in CATALOG:
            return path
    programs = [one.path for one in CATALOG[entry].files if one.path.endswith(".onnx")]
    inner = inner or "".join(programs[: len(programs) == 1])
    if inner not in programs:
        there = f"it has: {', '.join(f'{entry}/{one}' for one in programs) or 'none'}"
        wrong = f"{entry} has no program {inner!r:.80}{nearest(inner, programs)}; {there}"
        raise InvalidRequest(wrong, param="file")
    with ProgressLine(sys.stderr) as bars:
        return fetched(entry, cache_dir=cache_dir, progress=bars) / inner


def _described(found: Inspection) -> dict[str, Any]:
    described = found.described
    drawn = [f"{node.op} {node.name}: from the seed" for node in random_nodes(described)]
    counts = [f"{name} ×{count}" for name, count in found.operators.most_common()]
    outside = [f"{name}, {len(one):,} bytes" for name, one in found.outside.items()]
    return {
        "file": f"{found.name}, {len(found.data):,} bytes, SHA-256 {found.sha256}",
        "format": f"ONNX opset {described.opsets.get('', 0)}, of {described.producer or 'nobody'}",
        "inputs": [str(port) for port in described.inputs],
        "outputs": [str(port) for port in described.graph.outputs],
        "operators": ", ".join(counts),
        "weights": f"{found.weights:,} bytes",
        "other files": outside or "none",
        "states": [f"{one.input} ← {one.output}" for one in found.states] or "none",
        "random": drawn or "none",
        "loops": f"{found.loops}: only the time limit ends one" if found.loops else "none",
    }


def _measured(program: ConfinedProgram, given: list[str], rows: int, seed: int) -> dict[str, Any]:
    try:
        trial = program.start()
        feed = _feed(program, given, seed)
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in feed.items())
        report = {"load": f"{size(trial.memory)}, {trial.seconds:.2f} s"}
        try:
            report["run"] = f"{program.warm(feed) / 1e6:.3f} ms for {shapes}"
        except InvalidRequest as refused:
            if given:
                raise
            return report | {"run": f"not with random inputs of size 1; name --input: {refused}"}
        found = program.prove(feed, rows)
    finally:
        program.close()
    timed = f": {found.joined_ns / 1e6:.2f} ms of CPU, {found.alone_ns / 1e6:.2f} one by one"
    words = "together" if found.together else "one by one"
    report[f"{rows} rows"] = f"{words}, {found.reason}{timed if found.alone_ns else ''}"
    return report


def _feed(program: ConfinedProgram, given: list[str], seed: int) -> dict[str, Any]:
    """Make the inputs: those named on the command line, zeros for states, otherwise random."""
    values = dict(one.partition("=")[::2] for one in given)
    ports = program.inputs
    for name, value in values.items():
        if name not in ports or not value:
            allowed = f"allowed is name=VALUE with a name of: {', '.join(ports)}"
            wrong = f"--input {name:.80}={value:.80}{nearest(name, ports)}; {allowed}"
            raise InvalidRequest(wrong, param="input")
    draw = np.random.default_rng(seed)
    made = dict.fromkeys(ports, "random") | {one.input: "zeros" for one in program.states}
    return {name: _value(port, (made | values)[name], draw) for name, port in ports.items()}


def _value(port: Port, text: str, draw: np.random.Generator) -> Any:
    if text.startswith("@"):
        return _stored(Path(text[1:]))
    made = _MADE.fullmatch(text)
    if made is None:
        try:
            value, due = any_json(text), np.dtype(port.type)
            if np.size(value) and np.asarray(value).dtype.kind not in _ALLOWED.get(due.kind, "iu"):
                raise ValueError
            return np.array(value, due)
        except (Undecodable, ValueError, OverflowError, TypeError):
            allowed = f"@FILE.npy, a JSON number or list of {port.type}, random or zeros [:SHAPE]"
            wrong = f"--input {port.name:.80}={text:.80}; allowed are {allowed}"
            raise InvalidRequest(wrong, param="input") from None
    shape = [dim if isinstance(dim, int) else 1 for dim in port.dims or ()]
    shape = [int(one) for one in made[2].split("x")] if made[2] else shape
    kind = np.dtype(port.type)
    if len(shape) > MOST_RANK:
        wrong = f"has {len(shape)} dimensions, at most {MOST_RANK} are allowed"
        raise InvalidRequest(f"--input {port.name:.80}={text:.80} {wrong}", param="input")
    if prod(shape) * 8 > MOST_INPUT:
        raise InvalidRequest(f"--input {port.name:.80}={text:.80} has more than {size(MOST_INPUT)}")
    if made[1] == "zeros":
        return np.zeros(shape, kind)
    if kind.kind == "f":
        return draw.standard_normal(shape).astype(kind)
    return draw.integers(0, 2, shape).astype(kind)


def _stored(path: Path) -> Any:
    data = read(path, MOST_INPUT)
    with suppress(Exception):  # The header is Python's syntax, and fails in many ways.
        found = np.load(io.BytesIO(data), allow_pickle=False)
        if isinstance(found, np.ndarray):
            return found
    raise InvalidRequest(f"{path} is no .npy file of numbers", param="input")


def _save(target: BinaryIO, found: Mapping[str, Any]) -> None:
    """Write an .npz file; arrays may have any name."""
    with zipfile.ZipFile(target, "w") as archive:
        for name, value in found.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, value, allow_pickle=False)


def _shown(value: Any) -> dict[str, Any]:
    """Return an output as JSON; numbers that JSON lacks as text."""
    found: dict[str, Any] = {"datatype": str(value.dtype), "shape": list(value.shape)}
    if value.size > MOST_SHOWN:
        return found | {"left out": f"{value.size:,} elements; --output FILE.npz has them"}
    flat = value.reshape(-1).tolist()
    return found | {"data": [one if np.isfinite(one) else str(one) for one in flat]}
