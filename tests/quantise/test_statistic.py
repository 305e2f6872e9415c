"""The statistic of a calibration: every product of every family, in bounded memory, resumable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.base.errors import DoesNotFit, InvalidRequest, OptionError, Untrusted
from headrace.base.modelfiles import ModelFiles
from headrace.loader.open import open_model
from headrace.models.registry import describe
from headrace.quantise import calibrate as module
from headrace.quantise.calibrate import blas_threads, calibrate, memory_plan
from headrace.quantise.segments import MATRICES, segments
from headrace.quantise.statistic import Statistic
from headrace.quantise.work import WorkFolder
from tiny.checkpoints import hf_model, save_folder

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Gemma2": {"sliding_window": 16},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "DeepseekV3": {
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
        "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32},
}  # fmt: skip


def windows(*lengths: int) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(1)
    return [rng.integers(3, 300, length) for length in lengths]


class Noted:
    """A target that keeps the statistics that it is given."""

    def __init__(self, *names: str) -> None:
        self.file_name, self.names = names[0], names
        self.width, self.matrices = 0, 1
        self.stats: list[Statistic | None] = []

    def encode(
        self, stats: Any, factors: Any = None
    ) -> tuple[Iterable[np.ndarray[Any, Any]], dict[str, Any]]:
        self.stats = list(stats)
        grams = [one.gram for one in stats if one is not None]
        return grams, {"rows": [one and one.count for one in stats]}


def opened(kind: str, folder: Path, **values: Any) -> tuple[Any, ModelFiles]:
    model = hf_model(kind, **{**FAMILIES.get(kind, {}), **values})
    return model, open_model(str(save_folder(model, folder)))


def targets_of(files: ModelFiles) -> list[Noted]:
    refs = [ref for ref in describe(files.arch).weights() if ref.role in MATRICES]
    return [Noted(*[name for name, _ in ref.tensors()]) for ref in refs]


def run(files: ModelFiles, folder: Path, text: Any, about: str = "a", **more: Any) -> list[Noted]:
    made = targets_of(files)
    place = WorkFolder(folder, {"text": about})
    try:
        calibrate(files, text, made, place, **more)
    finally:
        place.close()
    return made


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_product_of_a_family_is_seen(kind: str, tmp_path: Path) -> None:
    """Against the inputs that transformers' own modules get, of all its linear layers."""
    model, files = opened(kind, tmp_path / "model")
    text = windows(40, 23, 40)
    grams: dict[str, Any] = {}

    def hook(name: str) -> Any:
        def see(_module: Any, given: Any) -> None:
            x = given[0].detach().reshape(-1, given[0].shape[-1]).double()
            grams[name] = grams.get(name, 0) + x.T @ x

        return see

    for name, one in model.named_modules():
        if isinstance(one, torch.nn.Linear) and "lm_head" not in name:
            one.register_forward_pre_hook(hook(f"{name}.weight"))
    with torch.no_grad():
        for window in text:
            model(torch.from_numpy(window)[None])
    compared = 0
    made = run(files, tmp_path / "work", text)
    for target in made:
        assert all(one is None or np.isfinite(one.gram).all() for one in target.stats)
        assert any(one is not None for one in target.stats), target.names[0]
        for name, one in zip(target.names, target.stats, strict=True):
            if name in grams and one is not None and len(grams[name]) == len(one.gram):
                exact = grams[name].numpy()
                assert np.abs(one.gram - exact).max() < 1e-4 * np.abs(exact).max(), name
                assert one.count in (103, 0) or "expert" in name
                compared += 1
    assert compared >= 5


def test_the_head_is_seen_and_cuts_keep_the_numbers(tmp_path: Path) -> None:
    """In one piece and in segments of half a layer, one window at a time and all at once."""
    _, files = opened("Llama", tmp_path / "model")
    cut = segments(describe(files.arch))
    assert len(cut) == 2 * files.arch.layers + 1
    text = windows(30, 17, 30, 5)
    one = run(files, tmp_path / "a", text)
    again = run(files, tmp_path / "b", text)
    for first, second in zip(one, again, strict=True):
        assert [s.gram.tobytes() for s in first.stats if s] == [
            s.gram.tobytes() for s in second.stats if s
        ]
    head = next(target for target in one if target.names == ("lm_head.weight",))
    assert head.stats[0] is not None
    assert head.stats[0].count == sum(map(len, text))


def test_chunks_in_any_size_give_the_same_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, files = opened("Gemma2", tmp_path / "model")
    text = windows(33, 21, 33, 9)
    whole = run(files, tmp_path / "a", text)
    monkeypatch.setattr(module, "CHUNK", 1)
    apart = run(files, tmp_path / "b", text)
    for first, second in zip(whole, apart, strict=True):
        for a, b in zip(first.stats, second.stats, strict=True):
            assert a is not None
            assert b is not None
            assert np.abs(a.gram - b.gram).max() <= 1e-6 * np.abs(a.gram).max() + 1e-12
            assert a.top == pytest.approx(b.top, rel=1e-5)


def test_an_expert_that_is_never_chosen_gets_its_mixture(tmp_path: Path) -> None:
    model, _ = opened("Mixtral", tmp_path / "model")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()  # Ties go to the first: experts 0 and 1.
    files = open_model(str(save_folder(model, tmp_path / "tied")))
    place = WorkFolder(tmp_path / "work", {"text": "a"})
    made = targets_of(files)
    said = calibrate(files, windows(64, 64), made, place)
    place.close()
    few = {name for one in said for name in one.get("few", ())}
    assert any(".experts.3." in name for name in few)
    assert not any(".experts.0." in name for name in few)
    for target in made:
        if "experts" in target.names[0]:
            seen, unseen = target.stats[0], target.stats[-1]
            assert seen is not None
            assert unseen is not None
            assert np.isfinite(unseen.gram).all()
            assert unseen.count >= seen.count > 0


def test_a_text_that_makes_nan_is_refused(tmp_path: Path) -> None:
    model, _ = opened("Llama", tmp_path / "model")
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = float("nan")
    files = open_model(str(save_folder(model, tmp_path / "nan")))
    run(files, tmp_path / "fine", [np.array([8, 9, 10])])
    with pytest.raises(InvalidRequest, match=r"q_proj.*not finite"):
        run(files, tmp_path / "work", [np.array([8, 7, 9])])


@pytest.mark.parametrize("text", [[], [np.array([5])], [np.zeros(0, np.int64)]])
def test_a_text_without_two_tokens_is_refused(text: Any, tmp_path: Path) -> None:
    _, files = opened("Llama", tmp_path / "model")
    with pytest.raises(InvalidRequest, match="at least 2"):
        run(files, tmp_path / "work", text)


def test_another_text_and_other_bytes_are_refused(tmp_path: Path) -> None:
    _, files = opened("Llama", tmp_path / "model")
    run(files, tmp_path / "work", windows(20, 20))
    with pytest.raises(InvalidRequest, match="another text"):
        run(files, tmp_path / "work", windows(20, 20), about="b")
    path = tmp_path / "work" / "tensor3"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(Untrusted, match="tensor3"):
        run(files, tmp_path / "work", windows(20, 20))
    (tmp_path / "work" / "state.json").write_text('{"about": 3}')
    with pytest.raises(Untrusted, match="damaged"):
        run(files, tmp_path / "work", windows(20, 20))


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    place = WorkFolder(tmp_path / "work", {"text": "a"})
    with pytest.raises(InvalidRequest, match="another process"):
        WorkFolder(tmp_path / "work", {"text": "a"})
    place.close()
    WorkFolder(tmp_path / "work", {"text": "a"}).close()


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, files = opened("Llama", tmp_path / "model")

    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OptionError, match="No space left"):
        run(files, tmp_path / "work", windows(20, 20))


def test_killed_after_each_segment_the_bytes_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended in the middle of every segment in turn, each time anew: as after `kill -9`, nothing is
    closed or tidied up."""
    _, files = opened("Mixtral", tmp_path / "model")
    text = windows(24, 24)
    run(files, tmp_path / "whole", text)
    count = len(segments(describe(files.arch)))
    real, ended = module._commit, []

    def killed(folder: Any, number: int, *rest: Any) -> None:
        if number not in ended:
            ended.append(number)
            raise SystemError("killed")
        real(folder, number, *rest)

    monkeypatch.setattr(module, "_commit", killed)
    for _ in range(count):
        with pytest.raises(SystemError):
            run(files, tmp_path / "work", text)
    run(files, tmp_path / "work", text)
    assert ended == list(range(count))
    for path in sorted((tmp_path / "whole").glob("tensor*")):
        assert path.read_bytes() == (tmp_path / "work" / path.name).read_bytes()


def test_what_goes_on_keeps_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begun with little memory, gone on with much: chunks and shared statistics stay. Begun with
    much, gone on with little, or with other threads: refused by name."""
    _, files = opened("Mixtral", tmp_path / "model")
    text, cut = windows(24, 24), segments(describe(files.arch))
    own = memory_plan(cut, 48, 24, 1 << 40)
    little = own.total - own.chunk * 24 // own.tokens - 1
    run(files, tmp_path / "whole", text, memory=little)
    real = module._commit

    def killed(*given: Any) -> None:
        real(*given)
        raise SystemError("killed")

    for name, memory in (("little", little), ("much", 1 << 40)):
        with monkeypatch.context() as patch:
            patch.setattr(module, "_commit", killed)
            with pytest.raises(SystemError):
                run(files, tmp_path / name, text, memory=memory)
    run(files, tmp_path / "little", text, memory=1 << 40)
    for path in sorted((tmp_path / "whole").glob("tensor*")):
        assert path.read_bytes() == (tmp_path / "little" / path.name).read_bytes()
    with pytest.raises(DoesNotFit, match=r"was begun with more.*bytes"):
        run(files, tmp_path / "much", text, memory=little)
    monkeypatch.setattr(module, "blas_threads", lambda: 77)
    with pytest.raises(DoesNotFit, match="77 threads"):
        run(files, tmp_path / "much", text, memory=1 << 40)


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from quantise import test_statistic as test
from headrace.quantise import calibrate as module
from headrace.loader.open import open_model
real = module._commit
def commit(folder, number, *rest):
    real(folder, number, *rest)
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
module._commit = commit
test.run(open_model(sys.argv[2]), Path(sys.argv[3]), test.windows(24, 24))
"""


@pytest.mark.slow
def test_a_killed_process_goes_on(tmp_path: Path) -> None:
    _, files = opened("Llama", tmp_path / "model")
    run(files, tmp_path / "whole", windows(24, 24))
    given = [str(Path(__file__).parents[1]), str(tmp_path / "model"), str(tmp_path / "work")]
    # numpy's library was perhaps loaded here before `conftest` spoke.
    env = {**os.environ, "OPENBLAS_NUM_THREADS": str(blas_threads())}
    ended = subprocess.run([sys.executable, "-c", KILLED, *given], env=env, check=False)
    assert ended.returncode == -signal.SIGKILL
    place = WorkFolder(tmp_path / "work", {"text": "a"})
    assert place.done == 2
    place.close()
    run(files, tmp_path / "work", windows(24, 24))
    for path in sorted((tmp_path / "whole").glob("tensor*")):
        assert path.read_bytes() == (tmp_path / "work" / path.name).read_bytes()


def test_memory_is_planned_first(tmp_path: Path) -> None:
    """A dense model of 70 billion weights on 64 GB, by its published sizes."""
    _, files = opened("Llama", tmp_path / "model")
    arch = files.arch
    large = describe(
        type(arch)(
            family="llama", vocab_size=128_256, hidden=8192, layers=80, heads=64, kv_heads=8,
            head_dim=128, intermediate=28_672, max_context=8192, norm_eps=1e-5,
        )
    )  # fmt: skip
    cut = segments(large)
    plan = memory_plan(cut, 32_768, 512, 64 << 30)
    assert plan.total <= 64 << 30
    assert plan.tokens >= 512
    assert plan.grams >= 4 * 28_672**2
    with pytest.raises(DoesNotFit, match="fewer tokens"):
        memory_plan(cut, 32_768, 512, 4 << 30)
    with pytest.raises(DoesNotFit):
        run(files, tmp_path / "work", windows(20, 20), memory=1 << 20)


def test_experts_share_a_statistic_where_their_own_do_not_fit(tmp_path: Path) -> None:
    _, files = opened("Mixtral", tmp_path / "model")
    cut = segments(describe(files.arch))
    own = memory_plan(cut, 48, 24, 1 << 40)
    assert not own.shared
    least = own.total - own.chunk * 24 // own.tokens  # With one window in a chunk.
    shared = memory_plan(cut, 48, 24, least - 1)
    assert shared.shared
    assert shared.total < own.total
    made = run(files, tmp_path / "work", windows(24, 24), memory=least - 1)
    for target in made:
        if "experts" in target.names[0]:
            assert len({id(one) for one in target.stats}) == 1
            assert target.stats[0] is not None
            assert target.stats[0].count == 96  # Two experts a token.
