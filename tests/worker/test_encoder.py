"""The encoder part of a worker against transformers in fp32, slice by slice, by every backend."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

from headrace.base.encodings import EncodingName, EncodingStart
from headrace.base.errors import EngineFault, ModelFileError, UnsupportedModel
from headrace.base.groups import graph_groups
from headrace.base.modelfiles import ModelFiles
from headrace.base.sampling import SamplingParams
from headrace.base.slices import slices
from headrace.base.spec import InputSpan, RequestSpec
from headrace.base.step import Admission, BlockWrite, PoolShape, StepPlan
from headrace.dist.payloads import SealedInput
from headrace.kernels.cpu.library import LibraryAbsent, load
from headrace.kernels.cpu.pieces import LoweredPieces
from headrace.kernels.cpu.program import CpuProgram, Variant
from headrace.loader import open_model
from headrace.loader.sounds import open_sounds
from headrace.models.registry import describe
from headrace.models.sounds import describe_sounds
from headrace.speech.prompts import PreparedSound, SoundPrompts
from headrace.worker import Worker, WorkerOptions
from tiny.hearing_chat import MELS, PLACE, make

SLICES = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hearing_chat")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return make(folder)


@pytest.fixture(scope="module")
def files(folder: Path, oracle: Any) -> ModelFiles:
    del oracle
    return open_model(str(folder))


@pytest.fixture(scope="module")
def prompts(files: ModelFiles) -> SoundPrompts:
    sound = open_sounds(files)
    assert sound is not None
    return SoundPrompts(sound, "tiny")


def worker_of(files: ModelFiles, kernels: str = "auto") -> Worker:
    if kernels == "auto":
        try:
            load()
        except LibraryAbsent as absent:
            pytest.skip(f"the CPU library is not built: {absent}")
    options = WorkerOptions(
        threads=2, kernels=kernels, kv_dtype="float32", max_context=256, step_tokens=128, rows=4
    )
    worker = Worker(files, options)
    groups = graph_groups(describe(files.arch), "float32", 40)
    worker.allocate(PoolShape(16, groups))
    return worker


@pytest.fixture(scope="module")
def worker(files: ModelFiles) -> Worker:
    return worker_of(files)


def sound(seed: int, seconds: float) -> np.ndarray[Any, Any]:
    draw = np.random.default_rng(seed)
    t = np.arange(int(16_000 * seconds)) / 16_000
    tone = np.sin(2 * np.pi * (200 + 90 * seed + 50 * np.sin(3 * t)) * t) * np.sin(4 * t)
    return (0.3 * tone + 0.02 * draw.normal(size=len(t))).astype(np.float32)


def features(samples: np.ndarray[Any, Any]) -> dict[str, torch.Tensor]:
    extractor = WhisperFeatureExtractor(feature_size=MELS)
    made = extractor(
        samples,
        sampling_rate=16_000,
        return_tensors="pt",
        padding="max_length",
        return_attention_mask=True,
    )
    return {
        "input_features": made["input_features"].float(),
        "feature_attention_mask": made["attention_mask"],
    }


def start_of(prepared: PreparedSound, payload: SealedInput, slot: int = 0) -> EncodingStart:
    name = EncodingName("", prepared.digest)
    return EncodingStart(slot, name, payload.source, prepared.positions)


def encoded(
    worker: Worker,
    prompts: SoundPrompts,
    samples: np.ndarray[Any, Any],
    cuts: tuple[int, ...] = (),
) -> np.ndarray[Any, Any]:
    """Rows of a sound. `cuts`: slices of each run but the last."""
    prepared = prompts.prepare(samples)
    payload = prompts.payloads.hold("", prepared.features)
    encoder = worker.encoder
    assert encoder is not None
    encoder.take(StepPlan(0, [], [], [], [], encodings=[start_of(prepared, payload)]))
    first = 0
    for count in (*cuts, SLICES - sum(cuts)):
        encoder.run(0, first, count)
        first += count
    rows = encoder._items[0].rows
    assert rows is not None
    return rows if isinstance(rows, np.ndarray) else rows.numpy()


@pytest.mark.parametrize("count", [1_600, 1_601, 1_760, 41_237, 480_000])
def test_rows_are_those_of_transformers(
    worker: Worker, prompts: SoundPrompts, oracle: Any, count: int
) -> None:
    samples = sound(2, 30.0)[:count]
    rows = encoded(worker, prompts, samples)
    assert len(rows) == prompts.prepare(samples).rows
    prompt = torch.tensor([[1, *[PLACE] * len(rows), 2]])
    with torch.no_grad():
        seen: dict[str, torch.Tensor] = {}

        def keep(module: Any, given: Any, out: torch.Tensor) -> None:
            seen["rows"] = out

        held = oracle.model.multi_modal_projector.register_forward_hook(keep)
        # It asserts that there are as many tokens as rows.
        oracle(input_ids=prompt, attention_mask=torch.ones_like(prompt), **features(samples))
        held.remove()
    wanted = seen["rows"][0, : len(rows)].numpy()
    assert np.abs(rows - wanted).max() < 1e-4 * np.abs(wanted).max()


def test_records_run_it_where_the_library_serves_all_of_it(worker: Worker) -> None:
    assert worker.encoder is not None
    assert isinstance(worker.encoder._run, LoweredPieces)


def test_the_reference_gives_the_same_rows(
    files: ModelFiles, worker: Worker, prompts: SoundPrompts
) -> None:
    ref = encoded(worker_of(files, "ref"), prompts, sound(3, 1.0))
    rows = encoded(worker, prompts, sound(3, 1.0))
    assert np.abs(rows - ref).max() < 1e-5 * np.abs(ref).max()


def test_slices_give_the_same_bits_however_they_are_cut(
    worker: Worker, prompts: SoundPrompts
) -> None:
    """A sound depends neither on the cuts nor on another that was computed between them."""
    samples = sound(1, 2.0)
    first = encoded(worker, prompts, samples)
    encoded(worker, prompts, sound(2, 9.0))
    assert np.array_equal(encoded(worker, prompts, samples, (1, 1, 1)), first)
    encoder = worker.encoder
    assert encoder is not None
    made = [prompts.prepare(samples), prompts.prepare(sound(4, 1.0))]
    held = [prompts.payloads.hold("", one.features) for one in made]
    starts = [
        start_of(one, payload, at) for at, (one, payload) in enumerate(zip(made, held, strict=True))
    ]
    encoder.take(StepPlan(0, [], [], [], [], encodings=starts))
    for at in range(SLICES):
        encoder.run(0, at, 1)
        encoder.run(1, at, 1)
    assert np.array_equal(encoder._items[0].rows, first)
    encoder.take(StepPlan(1, [], [], [], [], dropped=[0, 1]))
    assert not encoder._items


def test_a_slice_is_half_a_layer(files: ModelFiles) -> None:
    found = open_sounds(files)
    assert found is not None
    graph = describe_sounds(found)
    cuts = slices(graph)
    assert len(cuts) - 1 == 1 + 2 * found.arch.layers == SLICES
    parts = [graph.nodes[first:last] for first, last in pairwise(cuts)]
    assert [sum(node.kind == "attend" for node in part) for part in parts] == [0, 1, 0, 1, 0]


SPEC = RequestSpec(SamplingParams(temperature=0.0, max_tokens=4), 0)


def plan_of(
    prepared: PreparedSound, payload: SealedInput, *, tenant: str, starts: bool = True
) -> StepPlan:
    """The last slices of a sound and, in the same step, a prompt that stands for it."""
    tokens = [1, 2, *[PLACE] * prepared.rows, 3]
    span = InputSpan(2, prepared.rows, "sound", prepared.digest, payload.source, prepared.positions)
    spec = RequestSpec(SPEC.sampling, 0, inputs=(span,))
    name = EncodingName(tenant, prepared.digest)
    plan = StepPlan(0, [0, 0], [0, 0], [len(tokens), SLICES], [True, True], parts=(0, 1))
    if starts:
        plan.encodings.append(EncodingStart(0, name, payload.source, prepared.positions))
    plan.admitted.append(Admission(0, 0, tokens, len(tokens), 0, spec, tenant))
    plan.blocks.append(BlockWrite(0, 0, 0, [1, 2, 3, 4]))
    return plan


@pytest.mark.parametrize("kernels", ["auto", "ref"])
def test_a_step_reads_the_rows_at_their_places(
    files: ModelFiles, prompts: SoundPrompts, oracle: Any, kernels: str
) -> None:
    one = worker_of(files, kernels)
    samples = sound(5, 0.9)
    prepared = prompts.prepare(samples)
    payload = prompts.payloads.hold("", prepared.features)
    result = one.execute(plan_of(prepared, payload, tenant="a"))
    assert result.error is None, result.error
    assert not result.failures
    prompt = torch.tensor([[1, 2, *[PLACE] * prepared.rows, 3]])
    with torch.no_grad():
        logits = oracle(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), **features(samples)
        ).logits
    assert result.tokens == [[int(logits[0, -1].argmax())], []]
    assert 0 < result.encoding < result.seconds
    if isinstance(one.text.program, CpuProgram):
        made = [kind for kind, program in one.text.program._others.items() if program is not None]
        assert made == [Variant(scattered=True)], "the whole step is one call of the library"


def test_a_row_reads_its_own_tenant_alone(files: ModelFiles, prompts: SoundPrompts) -> None:
    one = worker_of(files)
    prepared = prompts.prepare(sound(5, 0.9))
    payload = prompts.payloads.hold("", prepared.features)
    plan = plan_of(prepared, payload, tenant="a")
    plan.encodings[0] = plan.encodings[0]._replace(name=EncodingName("b", prepared.digest))
    result = one.execute(plan)
    assert "stops before what is not encoded" in (result.error or "")


def test_an_input_that_is_gone_fails_alone(files: ModelFiles, prompts: SoundPrompts) -> None:
    one = worker_of(files)
    prepared = prompts.prepare(sound(5, 0.9))
    payload = prompts.payloads.hold("", prepared.features)
    plan = plan_of(prepared, payload, tenant="a")
    payload.close()
    other = prompts.payloads.hold("", prompts.prepare(sound(6, 0.9)).features)
    gone = payload.source._replace(descriptor=other.source.descriptor)
    plan.encodings[0] = plan.encodings[0]._replace(source=gone)
    plan.rows, plan.starts, plan.counts = [0], [0], [3]
    plan.samples, plan.parts = [True], (1,)
    result = one.execute(plan)
    assert result.error is None
    assert result.tokens == [[]]
    assert "its request has ended" in result.failures[0], "another sound has its descriptor"


def test_an_input_of_another_shape_is_refused(worker: Worker, prompts: SoundPrompts) -> None:
    prepared = prompts.prepare(sound(5, 0.9))
    payload = prompts.payloads.hold("", prepared.features[:-1])
    encoder = worker.encoder
    assert encoder is not None
    encoder.take(StepPlan(0, [], [], [], [], encodings=[start_of(prepared, payload)]))
    with pytest.raises(EngineFault, match=f"{len(prepared.features) - 1} rows of {MELS} numbers"):
        encoder.run(0, 0, 1)


def test_names_tell_content_shape_and_model_apart(files: ModelFiles, prompts: SoundPrompts) -> None:
    samples = sound(1, 1.0)
    own = prompts.prepare(samples).digest
    assert own == prompts.prepare(samples.copy()).digest
    assert own != prompts.prepare(samples[:-1]).digest
    assert own != SoundPrompts(prompts.sound, "another").prepare(samples).digest


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"d_model": 130}, UnsupportedModel),
        ({"encoder_ffn_dim": 500}, UnsupportedModel),
        ({"activation_function": "relu"}, UnsupportedModel),
        ({"scale_embedding": True}, UnsupportedModel),
        ({"max_source_positions": 750}, UnsupportedModel),
        ({"encoder_layers": 3}, ModelFileError),
        ({"num_mel_bins": 80}, ModelFileError),
    ],
)
def test_what_is_not_run_is_named(
    folder: Path, files: ModelFiles, change: dict[str, Any], error: type[Exception]
) -> None:
    path = folder / "config.json"
    before = path.read_text()
    said = json.loads(before)
    said["audio_config"] |= change
    path.write_text(json.dumps(said))
    try:
        with pytest.raises(error):
            open_sounds(files)
    finally:
        path.write_text(before)
