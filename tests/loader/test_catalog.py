"""The catalog: every entry is whole, is on the page, and is proposed where it fits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.base.config import DEFAULT_MODEL
from headrace.base.errors import ModelNotFound
from headrace.loader import open_model
from headrace.loader.catalog import CATALOG, PROPOSED, TASKS, proposed, read_catalog
from headrace.speech.finding import hears

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
GIB = 2**30


def test_each_task_has_models_by_size() -> None:
    assert len(CATALOG) >= 20
    assert {model.task for model in CATALOG.values()} == set(TASKS)
    order = [(list(TASKS).index(model.task), model.size) for model in CATALOG.values()]
    assert order == sorted(order)
    assert DEFAULT_MODEL in CATALOG


@pytest.mark.parametrize("name", CATALOG)
def test_an_entry_is_whole(name: str) -> None:
    model = CATALOG[name]
    assert model.name == name
    assert model.size < model.memory < 2 * model.size + GIB
    paths = [file.path for file in model.files]
    if model.gguf is not None:
        assert paths == [model.gguf]
    elif model.task == "program":
        assert any(path.endswith(".onnx") for path in paths)
    else:
        assert {"config.json", "tokenizer.json"} <= set(paths)
        assert ("model.bin" if model.speech else "model.safetensors") in paths
    assert hears(name) == model.speech
    for file in model.files:
        assert re.fullmatch(r"[0-9a-f]{64}", file.sha256)
        if file.hub is not None and not file.parts:
            # Without wheels, a file that the hub replaced would be lost.
            assert re.fullmatch(r"[0-9a-f]{40}", file.hub.revision)


def test_the_page_lists_the_catalog() -> None:
    rows = re.findall(
        r"^\| `([\w.-]+)`(?: \(default\))? \| (\w+) \| (.+?) \| (\S+ .B) \|", PAGE, re.M
    )
    listed = {name: (task, what) for name, task, what, _ in rows}
    assert listed == {model.name: (model.task, model.what) for model in CATALOG.values()}
    for name, _, _, size in rows:
        number, unit = size.split()
        shown = float(number) * {"MB": 1e6, "GB": 1e9}[unit]
        assert shown == pytest.approx(CATALOG[name].size, rel=0.02)


def test_the_proposed_model_fits() -> None:
    for device, names in PROPOSED.items():
        assert proposed(device, 0) is None
        for free in (2, 4, 8, 16, 32, 64):
            found = proposed(device, free * GIB)
            fitting = [name for name in names if CATALOG[name].memory <= free * GIB]
            assert found is None or found.name in fitting
        best = proposed(device, 512 * GIB)
        assert best is not None
        assert best.name == names[0]
        assert all(CATALOG[name].task == "chat" for name in names)


def test_reading_keeps_files_with_their_wheels() -> None:
    digest = "0" * 64
    text = f"# comment\n\n[a] chat | A | MIT | o/r@{'1' * 40}\na.gguf 3 {digest}\n\n"
    text += f"[b] embed | B | MIT |\nx 3 {digest}\n+ p==1 m/x 1 {digest}\n"
    text += f"+ q==2 m/y 2 {digest}\ny 1 {digest}\n"
    read = read_catalog(text)
    assert read["a"].files[0].hub is not None
    assert read["a"].files[0].hub.revision == "1" * 40
    assert [part.package for part in read["b"].files[0].parts] == ["p", "q"]
    assert read["b"].files[1].parts == ()
    assert read["b"].files[1].hub is None


@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5", "Qwen3-8B", "qwen3:8b", "whisper-tinny"])
def test_a_near_name_is_suggested(name: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        open_model(name)
    assert re.search(r"org/name:q4_k_m; did you mean [\w.-]+\?$", caught.value.message)
