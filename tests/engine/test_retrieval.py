"""Retrieval by beams through the one loop, scheduler and worker: transformers' items and scores."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.base.config import EngineOptions
from headrace.base.errors import ContextOverflow, OptionError
from headrace.base.items import ItemCatalogue, RetrievalWish
from headrace.base.outputs import FoundItems
from headrace.base.request import Request
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.engine.catalogue import open_catalogue
from headrace.engine.loop.build import Built, build
from headrace.engine.loop.draft_model import tokenizer_of
from headrace.loader.open import open_model
from tiny import catalogue, families
from tiny.kept import Kept

EXACT: dict[str, Any] = {
    "device": "cpu", "threads": 2, "quantise": "none", "kv_dtype": "float32", "kv_memory": "16MiB"
}  # fmt: skip
CLOSE = 2e-4
Found = list[tuple[tuple[int, ...], float]]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def opened(options: EngineOptions) -> ItemCatalogue:
    files = open_model(options.model)
    found = open_catalogue(options, files, partial(tokenizer_of, files))
    assert found is not None
    return found


class Shop:
    """An engine with a catalogue, and the model in float64."""

    def __init__(self, folder: Path, file: Path, **options: Any) -> None:
        self.files = open_model(str(folder))
        self.options = EngineOptions(model=str(folder), items=str(file), **{**EXACT, **options})
        self.built: Built = build(self.options, self.files)
        self.catalogue = opened(self.options)

    def add(self, name: str, prompt: list[int], beams: int, count: int = 0, salt: str = "") -> None:
        wish = RetrievalWish(count or beams, beams)
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        spec = RequestSpec(sampling, seed=1, task="items", retrieval=wish)
        self.built.core.add(Request(id=name, prompt=prompt, spec=spec, cache_salt=salt))

    def read(self, output: object) -> Found:
        assert isinstance(output, FoundItems)
        paths = [tuple(self.catalogue.path(item)) for item in output.items]
        return list(zip(paths, output.scores, strict=True))

    def run(self) -> dict[str, Found]:
        found: dict[str, Found] = {}
        core = self.built.core
        while core.has_work:
            for delta in core.turn():
                assert delta.error is None, delta.error
                if delta.finish is not None and delta.output is not None:
                    assert delta.request_id not in found, "one answer"
                    found[delta.request_id] = self.read(delta.output)
            core.scheduler.check_integrity()
        return found

    def ask(self, prompt: list[int], beams: int, **more: Any) -> Found:
        self.add("one", prompt, beams, **more)
        return self.run()["one"]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 997 + place).randrange(300) for place in range(length)]


def same(found: Found, wanted: Found) -> None:
    """Equal items and scores; neighbours whose scores are nearer than our error may change."""
    assert [score for _, score in found] == pytest.approx([s for _, s in wanted], abs=CLOSE)
    expected = dict(wanted)
    for path, score in found:
        if path in expected:
            assert score == pytest.approx(expected[path], abs=CLOSE)
        else:
            assert score == pytest.approx(wanted[-1][1], abs=CLOSE)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("items") / "items.jsonl"
    catalogue.make(found)
    return found


@pytest.fixture(scope="module")
def paths(file: Path) -> catalogue.Paths:
    return catalogue.make(file)


@pytest.fixture(scope="module")
def folder(kept: Kept) -> Path:
    return kept(families.make, "qwen3")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def shop(folder: Path, file: Path, paths: catalogue.Paths) -> Any:
    made = Shop(folder, file, max_sequences=16)
    yield made
    made.built.close()


@pytest.mark.parametrize("beams", [1, 4, 16, 50])
def test_items_and_scores_are_those_of_transformers(
    shop: Shop, model: Any, paths: catalogue.Paths, beams: int
) -> None:
    prompt = prompt_of(37, beams)
    found = shop.ask(prompt, beams)
    assert len({path for path, _ in found}) == len(found) == beams
    assert {path for path, _ in found} <= set(paths.values())
    same(found, catalogue.plain_beams(model, prompt, paths, beams))
    if beams > 1:  # Else `generate` is greedy, and scores nothing.
        same(found, catalogue.transformers_beams(model, prompt, paths, beams))


def test_512_beams_find_every_item_of_a_smaller_catalogue(
    shop: Shop, model: Any, paths: catalogue.Paths
) -> None:
    """They are 32 times the rows. No path is cut, so each score is that of its own tokens."""
    prompt = prompt_of(50)
    found = shop.ask(prompt, 512)
    assert {path for path, _ in found} == set(paths.values())
    same(found, catalogue.plain_beams(model, prompt, paths, 512))
    assert shop.ask(prompt, 512, count=3) == found[:3]


def test_several_at_once_beside_a_text_have_the_bits_of_each_alone(shop: Shop) -> None:
    asked = {str(n): (prompt_of(20 + 9 * n, n), 1 + 7 * n) for n in range(5)}
    alone = {name: shop.ask(prompt, beams) for name, (prompt, beams) in asked.items()}
    shop.built.core.add(Request(id="text", prompt=prompt_of(30), spec=RequestSpec(GREEDY, seed=1)))
    for name, (prompt, beams) in asked.items():
        shop.add(name, prompt, beams, salt=f"fresh {name}")
    assert shop.run() == alone


@pytest.mark.parametrize(
    "options",
    [
        {"max_sequences": 3, "step_tokens": 16},
        {"max_sequences": 64, "block_size": 64},
        {"kv_memory": "330KiB", "max_sequences": 24, "max_context": 160},
        {"threads": 1, "speculate": "ngram"},
        {"depth": 2},
    ],
)
def test_neither_steps_nor_rows_nor_blocks_change_a_bit(
    shop: Shop, folder: Path, file: Path, options: dict[str, Any]
) -> None:
    asked = {str(n): prompt_of(60 + n, n) for n in range(3)}
    wanted = {name: shop.ask(prompt, 40) for name, prompt in asked.items()}
    other = Shop(folder, file, **options)
    for name, prompt in asked.items():
        other.add(name, prompt, 40)
    assert other.run() == wanted
    other.built.close()


def test_a_prompt_is_computed_once(shop: Shop) -> None:
    """All beams share its blocks, and a beam computes one token. So does a second request."""
    core, prompt = shop.built.core, prompt_of(90, 8)
    computed = []
    for _ in range(2):
        shop.add("one", prompt, 8)
        total = 0
        while core.has_work:
            core.turn()
            total += core.scheduler.stats().tokens
        computed.append(total)
    assert computed[0] == 90 + 8 + 8
    assert computed[1] <= 1 + 8 + 8


def test_preempted_beams_begin_again(shop: Shop, folder: Path, file: Path) -> None:
    """With an empty index each beam computes its prompt in chunks, and a text comes between."""
    prompt, urgent = prompt_of(64, 3), RequestSpec(GREEDY, seed=1)
    wanted = shop.ask(prompt, 10)
    other = Shop(folder, file, max_sequences=1, step_tokens=16, policy="priority")
    core, found, turns, preempted = other.built.core, list[Found](), 0, set[int]()
    other.add("one", prompt, 10)
    while core.has_work:
        if turns % 8 == 1 and turns < 60:
            core.scheduler.reset()
            text = prompt_of(12, turns)
            core.add(Request(id=f"t{turns}", prompt=text, spec=urgent, priority=-5))
        for delta in core.turn():
            assert delta.error is None, delta.error
            if delta.output is not None:
                found.append(other.read(delta.output))
                preempted.add(delta.preemptions)
        core.scheduler.check_integrity()
        turns += 1
    assert found == [wanted]
    assert min(preempted) > 2
    other.built.close()


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 6])
def test_an_abort_ends_all_beams_with_one_answer(shop: Shop, turns: int) -> None:
    core = shop.built.core
    shop.add("gone", prompt_of(40, 6), 60)
    shop.add("stays", prompt_of(40, 7), 5)
    ended = []
    for _ in range(turns):
        ended += [d for d in core.turn() if d.finish is not None and d.request_id == "gone"]
    core.abort("gone")
    while core.has_work:
        for delta in core.turn():
            if delta.finish is not None:
                ended += [delta]
        core.scheduler.check_integrity()
    assert sorted(d.request_id for d in ended) == ["gone", "stays"]
    assert next(d for d in ended if d.request_id == "gone").finish == "abort"
    assert core.scheduler.kv.usage == 0


@pytest.mark.parametrize("name", ["gemma3", "llama4", "lfm2", "granitemoehybrid-dense"])
def test_families_with_windows_and_states(
    kept: Kept, file: Path, paths: catalogue.Paths, name: str
) -> None:
    from transformers import AutoModelForCausalLM

    folder = kept(families.make, name)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    made, prompt = Shop(folder, file, max_sequences=16), prompt_of(70, 4)
    same(made.ask(prompt, 12), catalogue.plain_beams(exact, prompt, paths, 12))
    made.built.close()


def test_the_reference_kernels_agree(
    folder: Path, file: Path, paths: catalogue.Paths, model: Any
) -> None:
    made, prompt = Shop(folder, file, kernels="ref", max_sequences=16), prompt_of(37, 2)
    same(made.ask(prompt, 12), catalogue.plain_beams(model, prompt, paths, 12))
    made.built.close()


def test_a_prompt_without_room_for_an_item_is_refused(shop: Shop) -> None:
    most = shop.built.core.scheduler.max_context
    with pytest.raises(ContextOverflow, match="an item 3"):
        shop.add("one", [1] * (most - 2), 2)
    assert len(shop.ask([1] * (most - 3), 2)) == 2


def test_the_digest_is_in_the_fingerprint(
    shop: Shop, folder: Path, file: Path, tmp_path: Path
) -> None:
    lines = file.read_text().splitlines(keepends=True)
    (tmp_path / "same").write_text("".join(reversed(lines)))
    (tmp_path / "less").write_text("".join(lines[1:]))
    prints = []
    for name in ("same", "less"):
        other = Shop(folder, tmp_path / name)
        prints.append(other.built.identity.fingerprint)
        other.built.close()
    assert prints[0] == shop.built.identity.fingerprint
    assert prints[1] != prints[0]


GOOD = '{"item": "a", "ids": [1, 2]}'


@pytest.mark.parametrize(
    ("lines", "match"),
    [
        ([], "no items"),
        (["nothing"], "line 1 .* not JSON"),
        (["[" * 5000], "not JSON"),
        ([GOOD, '{"item": "b"}'], "line 2 .* it must be"),
        (['{"item": "a", "ids": [1], "price": 3}'], "it must be"),
        (['{"item": 7, "ids": [1]}'], "a text of 1 to"),
        (['{"item": "", "ids": [1]}'], "a text of 1 to"),
        (['{"item": "a", "ids": []}'], "a list of 1 to 8"),
        (['{"item": "a", "ids": [1, 2, 3, 4, 5, 6, 7, 8, 9]}'], "a list of 1 to 8"),
        (['{"item": "a", "ids": 5}'], "a list of 1 to 8"),
        (['{"item": "a", "ids": [true]}'], "True is not an id"),
        (['{"item": "a", "ids": [1000]}'], "1000 is not an id from 0 to 999"),
        (['{"item": "a", "ids": [-1]}'], "-1 is not an id"),
        (['{"item": "a", "ids": [1e3]}'], "1000.0 is not an id"),
        (['{"item": "a", "ids": ["<no_such>"]}'], "'<no_such>' is not a token"),
        ([GOOD, '{"item": "a", "ids": [1, 3]}'], "'a' is in line 1 already"),
        ([GOOD, '{"item": "b", "ids": [1, 2]}'], "items 'a' and 'b' have equal ids"),
        ([GOOD, '{"item": "b", "ids": [1, 2, 3]}'], "'b' has 3 ids, others 2"),
        (['{"item": "' + "a" * 20_000 + '", "ids": [1]}'], "at most 16,384 bytes"),
    ],
)
def test_a_catalogue_that_is_wrong_is_refused(
    folder: Path, tmp_path: Path, lines: list[str], match: str
) -> None:
    (tmp_path / "items").write_text("\n".join(lines))
    options = EngineOptions(model=str(folder), items=str(tmp_path / "items"))
    with pytest.raises(OptionError, match=match) as caught:
        opened(options)
    assert caught.value.param == "items"


def test_too_many_items_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.base.items.MOST_ITEMS", 1)
    (tmp_path / "items").write_text(GOOD + '\n{"item": "b", "ids": [1, 3]}')
    options = EngineOptions(model=str(folder), items=str(tmp_path / "items"))
    with pytest.raises(OptionError, match="more than 1 items"):
        opened(options)


def test_where_no_items_are_retrieved(folder: Path, file: Path, kept: Kept) -> None:
    def wrong(match: str, **options: Any) -> None:
        chosen = EngineOptions(**{"model": str(folder), "items": str(file), **EXACT, **options})
        with pytest.raises(OptionError, match=match):
            build(chosen, open_model(chosen.model)).close()

    wrong("prefix_cache on", prefix_cache=False)
    wrong("cannot read the catalogue", items=str(file.parent / "none"))
    wrong("cannot read the catalogue", items=str(file.parent))
