"""Vectors and scores through `LLM`: equal to transformers, whatever else is in the batch."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import transformers

from headrace import LLM
from headrace.base.errors import ContextOverflow, InvalidRequest, UnsupportedModel
from headrace.loader.open import open_model
from tiny import encoder as encoders
from tiny import families
from tiny.encoder import CONTEXT, WORDS, write_modules
from tiny.kept import Kept

SMALL = {"max_sequences": 8, "threads": 2, "device": "cpu"}
ROUNDED_KV = 2.0**-8
"""Between elements of vectors of length one, with keys and values rounded to bfloat16: its numbers
lie 2^-8 apart, relative to their size."""
TEXTS = [
    "the water wheel turns",
    "a",
    "river " * 60,
    "what is the old mill race, and where?",
    "Zażółć gęślą jaźń 水 🙂",
    "one two three four five six seven " * 15,
    "é",
]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = encoders.make(tmp_path_factory.mktemp("encoder"))
    return write_modules(folder, "pooling_mode_mean_tokens", normalise=True)


@pytest.fixture(scope="module")
def embedder(encoder: Path):
    with LLM(str(encoder), **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def cross(kept: Kept) -> Path:
    return kept(encoders.make, labels=1)


@torch.inference_mode()
def hidden(folder: Path, text: str) -> torch.Tensor:
    """[tokens, D] of transformers."""
    model = transformers.AutoModel.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    return model.eval()(ids, token_type_ids=torch.zeros_like(ids)).last_hidden_state[0]


def unit(vector: torch.Tensor) -> torch.Tensor:
    return vector / vector.norm()


def test_vectors_are_those_of_transformers(embedder: LLM, encoder: Path) -> None:
    for text, output in zip(TEXTS, embedder.embed(TEXTS), strict=True):
        wanted = unit(hidden(encoder, text).mean(0))
        found = torch.tensor(output.vector)
        assert (found - wanted).abs().max() < 1e-5, text
        assert found @ wanted > 0.99999


def test_a_vector_does_not_depend_on_the_batch(embedder: LLM) -> None:
    rng = random.Random(3)
    alone = {text: embedder.embed(text)[0].vector for text in TEXTS}
    for _ in range(6):
        batch = rng.choices(TEXTS, k=rng.randint(2, 40))
        for text, output in zip(batch, embedder.embed(batch), strict=True):
            assert output.vector == alone[text], text


@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
@pytest.mark.parametrize(
    ("mode", "normalise"), [("pooling_mode_cls_token", False), ("pooling_mode_lasttoken", True)]
)
def test_pooling_is_the_models_own(
    tmp_path: Path, mode: str, normalise: bool, activation: str
) -> None:
    folder = encoders.make(tmp_path, activation=activation)
    write_modules(folder, mode, normalise=normalise)
    with LLM(str(folder), **SMALL) as llm:
        found = torch.tensor(llm.embed(TEXTS[3])[0].vector)
    wanted = hidden(folder, TEXTS[3])[0 if "cls" in mode else -1]
    assert (found - (unit(wanted) if normalise else wanted)).abs().max() < 2e-5


def test_a_part_that_is_not_run_is_refused(tmp_path: Path) -> None:
    folder = encoders.make(tmp_path)
    write_modules(folder, "pooling_mode_mean_tokens", normalise=True, extra="Dense")
    with pytest.raises(UnsupportedModel, match="'Dense'"):
        open_model(str(folder))
    write_modules(folder, "pooling_mode_max_tokens", normalise=True)
    with pytest.raises(UnsupportedModel, match="pooling_mode_max_tokens"):
        open_model(str(folder))


def test_several_labels_are_refused(kept: Kept) -> None:
    with pytest.raises(UnsupportedModel, match="3 labels"):
        open_model(str(kept(encoders.make, labels=3)))


def test_long_inputs_are_refused_or_cut_on_wish(embedder: LLM) -> None:
    long = "river " * (CONTEXT - 1)
    with pytest.raises(ContextOverflow, match=rf"prompts\[1\].*at most {CONTEXT}"):
        embedder.embed(["a", long])
    cut = embedder.embed(long, truncate_prompt_tokens=-1)[0]
    assert len(cut.prompt_token_ids) == CONTEXT
    assert cut.vector == embedder.embed("river " * (CONTEXT - 2))[0].vector
    assert len(embedder.embed(long, truncate_prompt_tokens=10)[0].prompt_token_ids) == 10
    with pytest.raises(InvalidRequest, match="truncate_prompt_tokens"):
        embedder.embed(long, truncate_prompt_tokens=CONTEXT + 1)
    with pytest.raises(InvalidRequest, match="no room"):
        embedder.embed(long, truncate_prompt_tokens=2)


def test_what_cannot_be_embedded_is_refused(embedder: LLM) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        embedder.embed("")
    with pytest.raises(InvalidRequest, match="token ids"):
        embedder.embed([[10**6]])
    with pytest.raises(InvalidRequest, match="does not generate"):
        embedder.generate("the river")


def test_an_input_is_never_split(encoder: Path) -> None:
    """A budget below the context bounds the inputs; several go into a step while they fit."""
    with LLM(str(encoder), step_tokens=64, **SMALL) as llm:
        assert llm.max_context == 64
        texts = [" ".join(WORDS[:size]) for size in (30, 5, 20, 33, 3, 3, 3, 28)]
        together = [output.vector for output in llm.embed(texts)]
        assert together == [llm.embed(text)[0].vector for text in texts]
        with pytest.raises(ContextOverflow):
            llm.embed("river " * 63)


def test_pairs_are_scored_as_by_transformers(cross: Path) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        cross, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(cross / "tokenizer.json"))
    with LLM(str(cross), **SMALL) as llm:
        outputs = llm.score("where is the river", TEXTS)
        for text, output in zip(TEXTS, outputs, strict=True):
            given = tokenizer(
                "where is the river", text, return_tensors="pt", return_token_type_ids=True
            )
            assert given["token_type_ids"].sum() > 0
            with torch.inference_mode():
                logit = model(**given).logits[0]
            assert logit.shape == (1,)
            assert output.score == pytest.approx(float(torch.sigmoid(logit)), abs=1e-5)
            assert output.prompt_tokens == given["input_ids"].shape[1]
        assert len({round(output.score, 4) for output in outputs}) == len(TEXTS)
        shuffled = llm.score("where is the river", TEXTS[::-1])
        assert [each.score for each in shuffled[::-1]] == [each.score for each in outputs]
        with pytest.raises(InvalidRequest, match="score"):
            llm.embed("the river")
        with pytest.raises(InvalidRequest, match="2 first texts and 3"):
            llm.score(["a", "b"], ["a", "b", "c"])


def test_an_embedding_model_scores_by_the_cosine(embedder: LLM) -> None:
    a, b = (torch.tensor(each.vector) for each in embedder.embed(TEXTS[:2]))
    same, other = embedder.score(TEXTS[0], TEXTS[:2])
    assert same.score == pytest.approx(1.0, abs=1e-6)
    assert other.score == pytest.approx(float(a @ b), abs=1e-6)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = families.make(tmp_path_factory.mktemp("decoder"), "qwen3")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": False}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.parametrize(
    ("kernels", "kv_dtype", "within"),
    [("ref", "auto", 1e-4), ("auto", "float32", 1e-4), ("auto", "auto", ROUNDED_KV)],
)
@pytest.mark.parametrize("mode", ["pooling_mode_lasttoken", "pooling_mode_mean_tokens"])
def test_a_decoder_embeds_too(
    decoder: Path, mode: str, kernels: str, kv_dtype: str, within: float
) -> None:
    """In chunks, beside texts that are generated, equal to the hidden states behind the norm."""
    write_modules(decoder, mode, normalise=True)
    rng = random.Random(5)
    prompts = [[rng.randrange(families.VOCAB) for _ in range(size)] for size in (1, 7, 150, 333)]
    model = transformers.AutoModel.from_pretrained(
        decoder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    vectors: list[list[list[float]]] = []
    for budget in (48, 512):
        with decoding(decoder, step_tokens=budget, kernels=kernels, kv_dtype=kv_dtype) as llm:
            vectors.append([each.vector for each in llm.embed(prompts)])
    for ids, found, whole in zip(prompts, *vectors, strict=True):
        with torch.inference_mode():
            states = model(torch.tensor([ids])).last_hidden_state[0]
        wanted = unit(states[-1] if "last" in mode else states.mean(0))
        assert (torch.tensor(found) - wanted).abs().max() < within
        assert found == whole, "chunks change nothing"


def decoding(folder: Path, **options) -> LLM:
    return LLM(str(folder), max_context=1024, **SMALL, **options)


@pytest.mark.model
@pytest.mark.slow
def test_minilm_is_its_reference() -> None:
    files = open_model("all-minilm-l6-v2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(files.path)
    model = transformers.AutoModel.from_pretrained(
        files.path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    texts = [
        "A man is eating food.",
        "Ein Mann isst etwas.",
        "x",
        "Łódź, 東京 и Ελλάδα 🙂🚀",
        "the quick brown fox jumps over the lazy dog. " * 50,
        "don't — “quotes” & <tags>\n\ttabs",
    ]
    with LLM("all-minilm-l6-v2", **SMALL) as llm:
        together = llm.embed(texts)
        for text, output in zip(texts, together, strict=True):
            given = tokenizer(text, return_tensors="pt")
            assert given["input_ids"][0].tolist() == output.prompt_token_ids
            with torch.inference_mode():
                wanted = unit(model(**given).last_hidden_state[0].mean(0))
            found = torch.tensor(output.vector)
            assert (found - wanted).abs().max() < 1e-5
            assert found @ wanted > 0.99999
            assert output.vector == llm.embed(text)[0].vector
        scores = [each.score for each in llm.score("Someone eats a meal", texts[:4])]
        assert max(scores) == scores[0]


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen2.5-coder-0.5b", "smollm2-135m"])
def test_a_model_that_writes_embeds(model: str) -> None:
    with LLM(model, max_sequences=4, max_context=512) as llm:
        same, other = llm.score(
            "def add(a, b): return a + b",
            ["def plus(x, y): return x + y", "The weather in Lisbon was warm."],
        )
        assert same.score > other.score
