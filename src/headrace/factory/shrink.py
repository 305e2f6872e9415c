"""`headrace quantise`: a model's files in fewer bits, published only if they pass their gate.

Everything is made in a work folder next to the result. The result gets its name when it is
complete, was loaded by our own loader, and is within the allowed loss.
"""

from __future__ import annotations

import html
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ..base.config import EngineOptions, option
from ..base.errors import InvalidRequest, OptionError, file_errors
from ..base.modelfiles import ModelFiles
from ..bench.accuracy import stdlib_corpus, windows
from ..engine.simulator.described import make_case
from ..loader.gguf_model import gguf_of
from ..loader.open import open_local, open_model
from ..loader.partial import check_space, file_sha256
from ..loader.progress import Progress
from ..quantise.imatrix import write_imatrix
from ..quantise.text import TOKENS, Text, TextSample, sample
from ..quantise.work import WorkFolder
from ..roofline.composition import Composition, decode_step, prefill_step
from ..roofline.counts import Case
from ..roofline.hardware import Hardware
from ..roofline.hardware_files import find_hardware
from ..roofline.machine import calibration_path
from ..roofline.page import charts, page, table
from ..roofline.plot import Chart, Series
from ..roofline.step import step_time
from ..roofline.weights import WeightBytes, from_tensors, parse_format
from ..text.load import load_tokenizer
from . import to_compressed, to_gguf
from .key import canonical, digest_of, hardware_class
from .mix import KINDS, Budget, Losses, Mix, best_mix, kinds_of, predicted, weigh
from .quantise import (
    BUILT_IN,
    HELD_OUT,
    NO_TEXT,
    Calibration,
    Quantised,
    importances,
    named_after,
    quantise_files,
    recipe_of,
    text_of,
)
from .source import find_source, model_path

CHOICE = "mix"
"""File of a work folder: the types under a budget."""
PRICED = {
    "int8": "int8",
    "int4": "int4",
    "w8a8": "int8",
    "fp8": "fp8",
    "w4a16": "int4",
    "nvfp4": "nvfp4",
}
"""Prefix of a target → format of the roofline."""


@dataclass(frozen=True, slots=True)
class QuantiseWish:
    """Model, target, and the thresholds of the result."""

    engine: EngineOptions = field(default_factory=EngineOptions)
    to: str = ""
    text: str = option(
        BUILT_IN,
        "Text to calibrate on: a UTF-8 file, .jsonl with `text` or `messages`, an importance "
        f"matrix of llama.cpp, {BUILT_IN}, or {NO_TEXT}.",
    )
    tokens: int = option(TOKENS, "Tokens of it, spread evenly.", min=2)
    out: Path | None = option(None, "The result; none: named after both.")
    windows: int = option(HELD_OUT[1], "Windows of text for the gate.", min=1)
    imatrix: Path | None = option(None, "Also write llama.cpp's importance matrix here.")
    least_share: float | None = option(
        None, "Share of the original's perplexity to keep; none: by the format.", min=0
    )
    budget: str | None = option(
        None, "A mix of a GGUF's types: size (400MB), or a decode step's time here (20ms)."
    )


class Shrinking:
    """One run of the command, planned; `run` does it. Raises the errors of a wrong model, target or
    text."""

    def __init__(self, wish: QuantiseWish, progress: Progress | None = None) -> None:
        self.wish, self._progress = wish, progress
        self._choice: dict[str, Any] = {}
        """Types under the budget by tensor (`mix`), and their predicted loss (`KL`)."""
        engine = wish.engine
        self.files: ModelFiles = open_model(
            engine.model, cache_dir=engine.cache_dir, offline=engine.offline, progress=progress
        )
        self._folder = self.files.path if self.files.path.is_dir() else self.files.path.parent
        self._source = find_source(engine)
        self._paths = {one.path: self._folder / one.path for one in self._source.files}
        single = wish.to in to_gguf.TARGETS
        self.out = wish.out or Path(named_after(self._source.name, wish.to, single=single))
        if self.out.exists():
            raise InvalidRequest(f"{self.out} exists; choose another with --out", param="out")
        self._budget = None if wish.budget is None else Budget.parse(wish.budget)
        if (self._budget is None) is (wish.to == to_gguf.MIX):
            raise OptionError(
                f"to {to_gguf.MIX} and a budget belong together: a budget chooses the types of a "
                "GGUF's matrices",
                param="budget",
            )
        if self._budget is not None and self.files.arch.task != "tokens":
            raise InvalidRequest(
                "a budget weighs matrices by the next token's distribution, and the model makes "
                "vectors",
                param="budget",
            )
        if wish.imatrix is not None:
            _free(wish.imatrix)
        self.text: Text | None = text_of(wish.text, wish.windows)
        self.sample: TextSample | None = None
        if self.text is not None and self.text.importance is None:
            self.sample = sample(self.text, self.files, wish.tokens)
        else:
            for param, given in (("imatrix", wish.imatrix), ("budget", wish.budget)):
                if given is not None:
                    raise InvalidRequest(
                        f"{param} needs a text that goes through the model, and --text is "
                        f"{wish.text}",
                        param=param,
                    )

    def predict(self, hardware: Hardware) -> dict[str, Any]:
        """Return the predicted size, speeds and loss of the result, next to the model's."""
        losses = self.losses
        targets = self._targets(self._mix(losses, hardware))
        case = make_case(str(self.files.path), hardware)
        context = min(1024, case.arch.max_context - 1)
        found: dict[str, Any] = {}
        for name, one in (("model", case.weights), (self.wish.to, self._weights(targets))):
            priced = replace(case, weights=one)

            def rate(step: Composition, priced: Case = priced) -> float:
                return round(step.tokens / step_time(priced, hardware, step).seconds, 1)

            steps = {"prefill": prefill_step(case.arch, [min(512, case.arch.max_context)])}
            if case.arch.task == "tokens":
                steps["decode"] = decode_step(case.arch, 1, context)
            found[name] = {f"{what} tokens/s": rate(step) for what, step in steps.items()}
        found["model"]["bytes"] = sum(one.size for one in self._source.files)
        found[self.wish.to]["bytes"] = self._bytes(targets)
        if losses:
            found[self.wish.to]["KL"] = predicted(kinds_of(targets), losses)
        return found

    @cached_property
    def losses(self) -> Losses:
        """The loss of each matrix in each type, estimated on a part of the text; {} without one."""
        if self.sample is None or self.files.arch.task != "tokens":
            return {}
        kinds = KINDS if self._budget is not None else None
        return weigh(self.files, self.sample.windows, self._targets(), kinds, self._progress)

    def _mix(self, losses: Losses, hardware: Hardware | None) -> Mix | None:
        """Choose the types under the budget. `hardware`: for a budget in milliseconds."""
        if self._budget is None:
            return None
        targets, arch = self._targets(), self.files.arch
        if self._budget.nbytes is not None:

            def size(mix: Mix) -> float:
                return float(self._bytes(self._targets(mix)))

            return best_mix(targets, arch, losses, size, self._budget.nbytes, "bytes")
        hardware = hardware or find_hardware("this", calibration_path())
        case = make_case(str(self.files.path), hardware)
        step = decode_step(arch, 1, min(1024, arch.max_context - 1))

        def milliseconds(mix: Mix) -> float:
            weights = self._weights(self._targets(mix))
            return 1e3 * step_time(replace(case, weights=weights), hardware, step).seconds

        assert self._budget.seconds is not None
        return best_mix(targets, arch, losses, milliseconds, 1e3 * self._budget.seconds, "ms")

    def _targets(self, mix: Mix | None = None) -> Sequence[Any]:
        """List the tensors to quantise."""
        arch, to = self.files.arch, self.wish.to
        if to in to_gguf.TARGETS:
            return to_gguf.tensors(gguf_of(self.files), arch, to, mix)
        shards = {name: path for name, path in self._paths.items() if name.endswith(".safetensors")}
        return to_compressed.Folder(shards, to, arch).tensors

    def _bytes(self, targets: Sequence[Any]) -> int:
        """Return the bytes of the result."""
        total: int = sum(one.size for one in self._source.files)
        return total + sum(int(one.nbytes - one.dense_bytes) for one in targets)

    def _weights(self, targets: Sequence[Any]) -> WeightBytes:
        """Return the result's weights as the roofline prices them."""
        to = self.wish.to
        if to not in to_gguf.TARGETS:
            return parse_format(next(name for at, name in PRICED.items() if to.startswith(at)))
        sizes = {one.names[0]: one.nbytes for one in targets if one.names}
        kind = to_gguf.TARGETS[to].inner[0].replace("MXFP4", "mxfp4")
        return from_tensors(self.files.arch, sizes, kind)

    def run(self) -> dict[str, Any]:
        """Make the files, compare them with the model, publish them if they pass; return the
        report."""
        total = sum(one.size for one in self._source.files)
        work = self.out.with_name(f"{self.out.name}.work")
        with file_errors(OptionError, f"{self.out.parent} cannot be written", "out"):
            self.out.parent.mkdir(parents=True, exist_ok=True)
        check_space(self.out.absolute(), 2 * total, "out")
        model = digest_of(canonical(self._source.parameters()["files"]))
        wish = self.wish
        about = {"model": model, **recipe_of(wish.to, self.text, wish.tokens, wish.budget)}
        folder = WorkFolder(work, about)
        try:
            self._choose(folder)
            staged = work / "made"
            shutil.rmtree(staged, ignore_errors=True)
            made = self._made(folder, staged)
            report = self._report(about, made, staged)
            if report["gate"]["passed"] is not False:
                self._keep_importance(made, folder)
                self._publish(staged, report)
        finally:
            folder.close()
        if report["gate"]["passed"] is not False:
            shutil.rmtree(work)
        return report

    def _choose(self, folder: WorkFolder) -> None:
        """Choose the types once: a continued run keeps its first choice."""
        if self._budget is None:
            return
        if not folder.has(CHOICE):
            mix = self._mix(self.losses, None)
            assert mix is not None
            choice = {"mix": mix, "KL": predicted(mix, self.losses)}
            folder.write(CHOICE, [np.frombuffer(json.dumps(choice).encode(), np.uint8)])
            folder.commit(folder.done, (), ())
        self._choice = json.loads(folder.array(CHOICE, np.uint8).tobytes())

    def _made(self, folder: WorkFolder, staged: Path) -> Quantised:
        def write(name: str, body: Callable[[BinaryIO], None]) -> None:
            path = staged / name
            with file_errors(OptionError, f"{path} cannot be written", "out"):
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("w+b") as out:
                    body(out)
                    out.flush()
                    os.fsync(out.fileno())

        chosen: Calibration = None if self.text is None else self.text.importance
        if self.sample is not None:
            chosen = self.files, self.sample
        made = quantise_files(
            self._paths, self.wish.to, chosen, folder, write, self._progress,
            self._choice.get("mix"),
        )  # fmt: skip
        for name, path in self._paths.items():
            if name not in made.names and not made.single:
                write(name, partial(_copied, path))
        return made

    def _keep_importance(self, made: Quantised, folder: WorkFolder) -> None:
        if self.wish.imatrix is None or self.text is None or self.sample is None:
            return
        said = self.sample.said()
        part = self.wish.imatrix.with_name(f"{self.wish.imatrix.name}.part")
        try:
            with part.open("wb") as out:
                found = importances(made, folder)
                write_imatrix(out, found, self.text.name, said["windows"], said["longest"])
            os.replace(part, self.wish.imatrix)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise InvalidRequest(
                f"{self.wish.imatrix} cannot be written: {error.strerror}", param="imatrix"
            ) from None

    def _report(self, about: dict[str, str], made: Quantised, staged: Path) -> dict[str, Any]:
        # Local: kernels, which a plan does not need.
        from .compare import compare, thresholds

        names = sorted(path.relative_to(staged).as_posix() for path in staged.rglob("*.*"))
        opened = open_local(model_path(staged, names), self._source.name)
        report: dict[str, Any] = {
            "model": self._source.name, "to": self.wish.to, "digests": about,
            "hardware": hardware_class(), **made.figures(),
            "bytes": sum((staged / name).stat().st_size for name in names),
            "was": sum(one.size for one in self._source.files),
            "files": {name: file_sha256(staged / name) for name in names},
            "tensors": made.tensors,
        }  # fmt: skip
        if self._budget is not None:
            report |= {"budget": self.wish.budget, "predicted_kl": self._choice["KL"]}
        if self.text is not None:
            counts = {} if self.sample is None else self.sample.said()
            report["text"] = {"name": self.text.name, "licence": self.text.licence, **counts}
        if self.files.arch.task != "tokens":
            why = "not evaluated: the model makes vectors, and the gate reads text"
            return {**report, "gate": {"passed": None, "why": [why]}}
        found = compare(self.files, opened, self._held_out())
        share, same = thresholds(report["kinds"])
        share = share if self.wish.least_share is None else self.wish.least_share
        same = same if self.wish.least_share is None else 0.0
        wrong = found.fails(share, same)
        gate = {"passed": not wrong, "why": wrong, "least_share": share, "least_same_top": same}
        return {**report, "comparison": found.said(), "gate": gate}

    def _held_out(self) -> Sequence[npt.NDArray[np.int64]]:
        """Return the gate's windows, which no calibration reads unless the user's text contains
        them."""
        tokenizer = load_tokenizer(self.files.tokenizer, self.files.arch.vocab_size)
        characters = min(HELD_OUT[0], self.files.arch.max_context // 2)
        pieces = windows(stdlib_corpus()[0], characters, self.wish.windows)
        return [np.array(tokenizer.encode(piece, add_bos=True), np.int64) for piece in pieces]

    def _publish(self, staged: Path, report: dict[str, Any]) -> None:
        only = list(staged.iterdir())
        single = len(only) == 1 and only[0].suffix == ".gguf"
        write_report(self.out, report)  # First: no result without one.
        with file_errors(OptionError, f"{self.out} cannot be written", "out"):
            os.replace(only[0] if single else staged, self.out)


def _free(imatrix: Path) -> None:
    """Raise `InvalidRequest` unless a new file may be written here."""
    if imatrix.exists():
        raise InvalidRequest(f"{imatrix} exists; choose another with --imatrix", param="imatrix")
    if not imatrix.parent.is_dir():
        raise InvalidRequest(f"{imatrix.parent} is no folder for the imatrix", param="imatrix")


def _copied(path: Path, out: BinaryIO) -> None:
    with path.open("rb") as source:
        shutil.copyfileobj(source, out)


def write_report(out: Path, report: dict[str, Any]) -> tuple[Path, Path]:
    """Write the report next to the result as JSON and as a page; return both paths. Raises
    `OptionError`."""
    paths = out.with_name(f"{out.name}.report.json"), out.with_name(f"{out.name}.report.html")
    with file_errors(OptionError, f"the report {paths[0]} cannot be written", "out"):
        paths[0].write_text(json.dumps(report, indent=1) + "\n")
        paths[1].write_text(report_page(report))
    return paths


def report_page(report: dict[str, Any]) -> str:
    """Return the report as one page with charts."""
    gate = report["gate"]
    verdict = {True: "passed", False: "failed", None: "not evaluated"}[gate["passed"]]
    share = report["bytes"] / report["was"]
    summary = f"{report['bytes'] / 1e6:,.0f} MB, {share:.0%} of the model; gate {verdict}"
    body = "".join(f"<p>{html.escape(why)}</p>" for why in gate["why"])
    if found := report.get("comparison"):
        rows = []
        for name, value in found.items():
            shown = value
            if isinstance(value, dict):
                shown = f"{value['mean']} ({value['low']} to {value['high']})"
            rows.append([name, str(shown)])
        body += table(["figure", "value (95 % interval)"], rows)
    reached = [one for one in report["tensors"] if one.get("error")]
    if reached:
        body += charts([_errors_chart(reached)])
    cells = ("kind", "weights", "rows", "nearest", "error")
    rows = [
        [one["tensor"], *(str(one.get(name, "")) for name in cells)] for one in report["tensors"]
    ]
    body += table(["tensor", "type", "weights", "rows of text", "nearest", "kept"], rows)
    digests = {**report["digests"], **report["files"]}
    body += table(["digest of", "SHA-256"], [[name, one] for name, one in digests.items()])
    return page(f"{report['model']} as {report['to']}", summary, body)


def _errors_chart(tensors: list[dict[str, Any]]) -> Chart:
    at = list(range(1, len(tensors) + 1))
    names = [one["tensor"] for one in tensors]
    series = [
        Series(title, at, [max(one[key], 1e-12) for one in tensors], "points", names)
        for title, key in (("to the nearest", "nearest"), ("kept", "error"))
    ]
    return Chart(
        "Error of each product on the text", "tensor", "share of its square", series, log_y=True
    )
