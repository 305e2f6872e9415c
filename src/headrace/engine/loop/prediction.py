"""The roofline's view of an opened model: the bytes of its tensors by role."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable

from ...base.arch import ModelArch
from ...base.config import Decision, EngineOptions
from ...base.hardware import hardware
from ...base.layout import Layout
from ...base.modelfiles import ModelFiles
from ...base.step import StepPlan
from ...kv.tiers import Computing
from ...loader.gguf_model import gguf_of
from ...loader.names import from_gguf_name, from_hf_name
from ...loader.shards import read_headers
from ...loader.whisper import whisper_of
from ...models.pipeline import parts_beside
from ...models.registry import describe
from ...roofline.composition import compose, compose_plan
from ...roofline.counts import Case
from ...roofline.formats import GGML, usual_format
from ...roofline.machine import this_hardware
from ...roofline.routing import typical_skew
from ...roofline.slices import part_seconds
from ...roofline.step import Estimate, StepModel
from ...roofline.weights import WeightBytes, from_roles, from_tensors
from ...sched.price import StepPrices, least, paying
from .draft_law import verifying
from .start import resolve

_SAFETENSORS = {
    "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "fp8", "I8": "int8",
    "U8": "int4", "I32": "int4",
}  # fmt: skip
CODED, STORED = 34 / 32, {2: "float16", 4: "float32"}
"""Bytes of a number in blocks of eight bits; formats by the bytes of a number."""
_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8}


def tensor_bytes(files: ModelFiles) -> tuple[dict[str, int], str]:
    """Return (bytes of each tensor by its Hugging Face name, the format of most of them)."""
    sizes: dict[str, int] = {}
    formats: Counter[str] = Counter()
    if files.format == "gguf":
        for name, info in gguf_of(files).tensors.items():
            canonical = from_gguf_name(name, files.arch)
            if canonical is not None:
                sizes[canonical] = info.nbytes
                formats[GGML.get(info.type.name, info.type.name)] += info.nbytes
    else:
        # Of a pipeline only the denoiser's folder, which is the first.
        own = (one for one in files.weights if one.parent == files.weights[0].parent)
        for name, stored in read_headers(tuple(own)).items():
            canonical = from_hf_name(name, files.arch)
            if canonical is not None:
                size = math.prod(stored.shape) * _BYTES[stored.dtype]
                sizes[canonical] = size
                formats[_SAFETENSORS.get(stored.dtype, "float32")] += size
    return sizes, usual_format(formats, "float32")


def case_of(files: ModelFiles, *, dtype: str, kv_dtype: str, coded: bool = False) -> Case:
    """Return the roofline's case of this model as its file stores it; `coded`: see
    `stored_weights`."""
    skew, weights = typical_skew(files.arch), stored_weights(files, coded=coded)
    return Case(files.arch, weights, dtype, kv_dtype, Layout(), skew)


def stored_weights(files: ModelFiles, *, coded: bool = False) -> WeightBytes:
    """Return the bytes of the file's own tensors, or of all as they are served: of a Whisper's
    decoder, and of a model whose products are made `coded` while they load."""
    whisper = whisper_of(files)
    if whisper is not None:
        return _as_served(files.arch, whisper.files.file_bytes, coded=whisper.coded)
    if coded:
        return _as_served(files.arch, 4, coded=True)
    tensors, format = tensor_bytes(files)
    numbered = (re.search(r"(layers?|blocks)\.\d+\.", name) for name in tensors)
    assert any(numbered), "a model has layers"
    return from_tensors(files.arch, tensors, format)


def _as_served(arch: ModelArch, wide: int, *, coded: bool) -> WeightBytes:
    """Return the bytes of weights with `wide` bytes a number; `coded`: products have eight
    bits."""
    kinds = ("linear", "logits") if coded else ()
    sizes = (
        (one.purpose, _layer_of(one.names[0]), one.numbers * (CODED if one.role in kinds else wide))
        for one in describe(arch).weights()
    )
    return from_roles(arch, sizes, "Q8_0" if coded else STORED[wide])


def _layer_of(name: str) -> int | None:
    layer = re.search(r"(?:layers|blocks)\.(\d+)\.", name)
    return int(layer[1]) if layer else None


def serving_types(files: ModelFiles) -> tuple[str, str]:
    """Return (dtype, kv_dtype) with which a server of this model would start on this machine's
    CPU."""
    options = resolve(EngineOptions(model=files.name, device="cpu"), files, hardware()).options
    return options.dtype, options.kv_dtype


def step_predictor(
    files: ModelFiles, *, device: str, dtype: str, kv_dtype: str, coded: bool = False
) -> StepPredictor | None:
    """Return the roofline's predictor of plans, or None if the hardware is not known.

    Costs tens of microseconds per step. `headrace roofline --calibrate` makes a CPU known, and
    `--measure` fits it to real steps.
    """
    known = this_hardware(device)
    if known is None:
        return None
    model = StepModel(case_of(files, dtype=dtype, kv_dtype=kv_dtype, coded=coded), known)
    return StepPredictor(model, coded=coded)


def drawing_seconds(predict: object) -> dict[str, float]:
    """Return `face.ServingEngine.memory`'s prices of a model that draws; {} for another one, and on
    hardware that is not known."""
    if not isinstance(predict, StepPredictor) or not predict.draws:
        return {}
    return {
        f"step_seconds_{entries}": predict.drawing(entries).seconds for entries in (1, 2)
    } | predict.beside()


def draft_prices(predict: StepPredictor | None) -> StepPrices:
    """Return the prices of drafts with which an engine begins."""
    return StepPrices(least if predict is None else predict.verifying)


def computing(predict: StepPredictor | None, step_tokens: int) -> Computing:
    """Return the roofline's seconds to compute a part of a prompt. If it does not know this
    machine, every load is taken to be quicker."""
    if predict is None:
        return lambda start, tokens: float("inf")
    return lambda start, tokens: predict.prefill(start, tokens, step_tokens)


def drafts_that_pay(options: EngineOptions, files: ModelFiles) -> Decision:
    """Return the chances from which an engine verifies drafts before it has run a step."""
    asked = resolve(options, files, hardware()).options
    known = step_predictor(files, device=asked.device, dtype=asked.dtype, kv_dtype=asked.kv_dtype)
    prices = draft_prices(known)
    chances = {running: paying(running, prices) for running in (1, 8, 32)}
    told = (f"{one} from {chance:.0%}" for one, chance in chances.items() if chance <= 1)
    source = "the roofline" if known is not None else "a guess"
    return Decision(
        "drafts that pay",
        ", ".join(told) or "none",
        f"sequences at once, and the chance of one draft each; by {source} until steps show more",
    )


class StepPredictor:
    """Predictor of the time and work of plans as they come, in order.

    It remembers which rows pool: those end in a vector, so they need no logits.
    """

    def __init__(self, model: StepModel, *, coded: bool = False) -> None:
        """`coded`: see `case_of`."""
        self._model, self._coded = model, coded
        self._pooling: dict[int, bool] = {}
        self._inputs: dict[int, int] = {}
        """Positions of the encoded inputs that rows attend to."""
        self.slices: Callable[[int], float] | None = None
        """Seconds of slices of an encoder part, by their number times the units of the input."""
        self._units: dict[int, int] = {}
        """Units of the encodings by slot."""

    def verifying(self, tokens: int) -> float:
        """Return the seconds of a step that verifies `tokens` of one sequence."""
        return verifying(self._model, tokens)

    def prefill(self, start: int, tokens: int, step_tokens: int) -> float:
        """Return the seconds to compute `tokens` of one prompt after `start` others."""
        arch, end = self._model.case.arch, start + tokens
        return sum(
            self._model.estimate(compose(arch, [at], [min(step_tokens, end - at)], 0)).seconds
            for at in range(start, end, step_tokens)
        )

    def __call__(self, plan: StepPlan) -> Estimate:
        if not plan.parts:
            return self._text(plan)
        self._units |= {start.slot: start.units for start in plan.encodings}
        texts = plan.texts
        entries = zip(plan.rows[texts:], plan.counts[texts:], strict=True)
        assert self.slices is not None
        spent = sum(self.slices(self._units[slot] * count) for slot, count in entries)
        if not texts:
            return Estimate(spent, 0.0, 0.0, 0.0)
        estimate = self._text(plan.first_part())
        return estimate._replace(seconds=estimate.seconds + spent)

    @property
    def draws(self) -> bool:
        """Whether its model draws pictures."""
        return self._model.case.arch.denoiser is not None

    def drawing(self, entries: int) -> Estimate:
        """Return the time and work of a step with so many entries of pictures."""
        arch = self._model.case.arch
        assert arch.denoiser is not None, "the model draws no pictures"
        at_once = entries if arch.denoiser.unet is None else 1
        counts = [arch.denoiser.tokens] * at_once
        found = self._model.estimate(compose(arch, [0] * at_once, counts))
        return Estimate(*(one * entries / at_once for one in found))

    def beside(self) -> dict[str, float]:
        """Return the seconds of an item of each part beside the denoiser, the largest."""
        arch, hardware = self._model.case.arch, self._model.hardware
        return {
            f"{name}_seconds": part_seconds(graph, hardware, units, coded=self._coded)
            for name, (graph, units) in parts_beside(arch).items()
        }

    def _text(self, plan: StepPlan) -> Estimate:
        arch = self._model.case.arch
        if arch.denoiser is not None:
            return self.drawing(plan.tokens // arch.denoiser.tokens)
        for admission in plan.admitted:
            self._pooling[admission.row] = not admission.spec.predicts
            if arch.cross is not None:
                self._inputs[admission.row] = sum(one.units for one in admission.spec.inputs)
        inputs = [self._inputs[row] for row in plan.rows] if arch.cross is not None else []
        if arch.task == "tokens" and any(self._pooling.get(row) for row in plan.rows):
            sampled = plan.drafts + sum(
                sample and not self._pooling.get(row)
                for row, sample in zip(plan.rows, plan.samples, strict=True)
            )
            return self._model.estimate(compose(arch, plan.starts, plan.counts, sampled, inputs))
        return self._model.estimate(compose_plan(arch, plan, inputs))
