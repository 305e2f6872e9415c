"""Packing for keeps: found weights are those that packing gives, and what is not is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cpu_cases import KINDS, random_blocks

from headrace.kernels.cpu import panels
from headrace.kernels.cpu.coded import CodedWeight
from headrace.kernels.cpu.encode import Encoder
from headrace.kernels.cpu.library import Team
from headrace.kernels.cpu.narrow import NarrowWeight
from headrace.kernels.cpu.operators import CpuOperators
from headrace.kernels.cpu.panels import PLANES, Packer, Source, pack, packed_bytes
from headrace.kernels.weights import (
    BlockWeight,
    DenseWeight,
    LateWeight,
    PackedWeight,
    PanelWeight,
    StackedWeight,
)
from headrace.loader.prepare import Expansion

encode = Encoder(Team(1))


class Shelf:
    """A shelf in memory."""

    def __init__(self, takes: bool = False) -> None:
        self.takes = takes
        self.kept: dict[str, np.ndarray] = {}
        self.replace: dict[str, Callable[[np.ndarray], None]] = {}
        self.refused = ""

    def kind(self, name: str) -> str | None:
        found = [key.split()[1] for key in self.kept if key.split()[0] == name]
        return found[0] if found and not self.refused else None

    def find(self, name: str, kind: str, shape: tuple[int, int], size: int) -> np.ndarray | None:
        found = None if self.refused else self.kept.get(f"{name} {kind} {shape}")
        assert found is None or found.nbytes == size
        return found

    def refuse(self, why: str) -> None:
        self.refused = why

    def keep(self, name: str, kind: str, shape: Any, data: np.ndarray, replace: Any) -> bool:
        room = np.zeros(data.nbytes + 64, np.uint8)  # Aligned, as a mapped file is.
        at = -room.ctypes.data % 64
        copy = room[at : at + data.nbytes]
        copy[:] = data
        self.kept[f"{name} {kind} {shape}"], self.replace[name] = copy, replace
        return self.takes


def weights() -> list[Source]:
    made: list[Source] = []
    for index, kind in enumerate(KINDS):
        weight = random_blocks(kind, 37 + index, 512, seed=index)
        weight.name = f"layers.{index}"
        made.append(weight)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        made.append(DenseWeight(torch.randn(19, 96).to(dtype), f"dense {dtype}"))
    for kind in ("Q8_0", "Q4_0"):
        made.append(NarrowWeight(kind, DenseWeight(torch.randn(19, 96), f"narrow {kind}"), encode))
    codes, scales = np.arange(384, dtype=np.uint8).reshape(3, 128) & 15, np.full((3, 1), 0.5)
    zeros = np.full((3, 1), 7, np.uint8)
    order = np.arange(128, dtype=np.int32)[::-1].copy()
    floats = scales.astype(np.float32)
    made.append(CodedWeight("INT4", codes, floats, zeros, 128, order, "coded"))
    made.append(CodedWeight("E4M3", codes, floats, None, 128, None, "fp8"))
    return made


def test_panels_of_some_rows_at_a_time_are_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    team = Team(2)
    whole = [pack(weight, team, planes=planes) for weight in weights() for planes in (False, True)]
    monkeypatch.setattr(panels, "_AT_ONCE", 1)
    again = [pack(weight, team, planes=planes) for weight in weights() for planes in (False, True)]
    assert all(np.array_equal(one.data, two.data) for one, two in zip(whole, again, strict=True))


def test_found_weights_are_those_that_packing_gives() -> None:
    team, shelf = Team(2), Shelf()
    first = [Packer(team, shelf).pack(weight) for weight in weights()]
    assert len(shelf.kept) == len(KINDS) + 7
    packer = Packer(team, shelf)
    for weight, fresh in zip(weights(), first, strict=True):
        found = packer.pack(weight)
        assert np.array_equal(found.data, fresh.data)
        assert np.array_equal(found.data, pack(weight, team).data)
        assert np.array_equal(found.order, fresh.order)
        kept = shelf.kept[f"{weight.name} {found.kind} {weight.shape}"]
        assert found.data.ctypes.data == kept.ctypes.data
    assert not shelf.refused


def late(name: str, seed: int, order: np.ndarray | None, reads: list[str]) -> LateWeight:
    """A matrix in codes of five bits' range, whose readings are counted."""
    draws = np.random.default_rng(seed)
    codes = draws.integers(0, 16, (19, 256), np.uint8)
    scales = draws.random((19, 2), np.float32)
    zeros = draws.integers(0, 16, (19, 2))

    def read() -> PackedWeight:
        reads.append(name)
        offsets = -(zeros * scales).astype(np.float32)
        return PackedWeight(codes, scales, offsets, 4, 128, codes.shape, order=order, name=name)

    return LateWeight(name, codes.shape, order, read)


def late_blocks(name: str, seed: int, reads: list[str]) -> LateWeight:
    """Another in MXFP4, whose readings are counted."""

    def read() -> BlockWeight:
        reads.append(name)
        return replace(random_blocks("MXFP4", 19, 256, seed=seed), name=name)

    return LateWeight(name, (19, 256), None, read)


def test_codes_whose_panels_are_kept_are_not_unpacked() -> None:
    """All were, before anybody looked for their panels."""
    order, team, shelf = np.arange(256, dtype=np.int32)[::-1].copy(), Team(1), Shelf()
    reads: list[str] = []
    stacked = StackedWeight(tuple(late(f"part{n}", n, order, reads) for n in range(3)))
    experts = [late_blocks(f"expert{n}", n, reads) for n in range(2)]
    crossed = StackedWeight((late("one", 3, order, reads), late("other", 4, None, reads)))
    given = [stacked, crossed, late("alone", 5, None, reads), *experts]

    def prepared() -> list[PanelWeight]:
        ops = CpuOperators(1, shelf=shelf, team=team)
        found = [ops.prepare(weight, "linear", Expansion()) for weight in given]
        told.append(ops.told)
        return [part for one in found for part in getattr(one, "parts", (one,))]

    told: list[Any] = []
    first = prepared()
    assert reads == ["part0", "part1", "part2", "one", "other", "alone", "expert0", "expert1"]
    assert [one.kind for one in first] == ["INT4"] * 3 + ["F32", "INT4", "INT4"] + ["MXFP4"] * 2
    reads.clear()
    again = prepared()
    assert reads == ["part0", "one", "expert0"], "the first of each kind alone, which is proven"
    assert told[0] == told[1]
    for one, other in zip(first, again, strict=True):
        assert (one.kind, one.shape) == (other.kind, other.shape)
        assert np.array_equal(one.order, other.order)
        assert np.array_equal(one.data, other.data)
    for kept in shelf.kept.values():
        kept[:] = np.roll(kept, 64)
    reads.clear()
    assert all(np.array_equal(a.data, b.data) for a, b in zip(first, prepared(), strict=True))
    assert shelf.refused
    everything = {"part0", "part1", "part2", "one", "other", "alone", "expert0", "expert1"}
    assert set(reads) == everything


@pytest.mark.parametrize("takes", [True, False])
def test_what_was_packed_can_move_to_the_shelf(takes: bool) -> None:
    team, shelf = Team(1), Shelf(takes)
    weight = random_blocks("Q8_0", 512, 1024)
    weight.name = "w"
    packed = Packer(team, shelf).pack(weight)
    before = pack(weight, team).data
    assert packed.data.any() != takes, "pages of what the shelf took are given up"
    kept = shelf.kept[f"{weight.name} {packed.kind} {weight.shape}"]
    shelf.replace[weight.name](kept)
    assert packed.data.ctypes.data == kept.ctypes.data
    assert np.array_equal(packed.data, before)


def test_what_has_moved_leaves_no_region_behind() -> None:
    team, shelf = Team(1), Shelf()
    packer = Packer(team, shelf)
    packed = {weight.name: packer.pack(weight) for weight in weights()}
    assert packer._region.base is not None, "a part of a region"
    for name, each in packed.items():
        shelf.replace[name](shelf.kept[f"{name} {each.kind} {each.shape}"])
    assert packer._region.base is None
    assert packer._region.nbytes == 0
    assert np.array_equal(packer.pack(weights()[0]).data, packed["layers.0"].data)


def test_a_layout_that_forgot_its_number_is_found_out() -> None:
    team, shelf = Team(2), Shelf()
    for weight in weights():
        Packer(team, shelf).pack(weight)
    for kept in shelf.kept.values():
        kept[:] = np.roll(kept, 64)  # As if panels now began elsewhere.
    packer = Packer(team, shelf)
    for weight in weights():
        assert np.array_equal(packer.pack(weight).data, pack(weight, team).data)
    assert "layers.0" in shelf.refused


def test_a_head_in_planes_is_found_and_each_plane_is_proven() -> None:
    team, weight = Team(2), random_blocks("Q8_0", 100, 96)
    weight.name = "head"
    fresh = pack(weight, team, planes=True)
    assert fresh.kind == PLANES
    for wrong in (None, 0, fresh.nbytes - fresh.low_bytes):
        shelf = Shelf()
        Packer(team, shelf).pack(weight, planes=True)
        (kept,) = shelf.kept.values()
        if wrong is not None:
            kept[wrong] ^= 1
        found = Packer(team, shelf).pack(weight, planes=True)
        assert np.array_equal(found.data, fresh.data)
        assert bool(shelf.refused) == (wrong is not None)
        assert (found.data.ctypes.data == kept.ctypes.data) == (wrong is None)


def test_small_weights_share_a_region() -> None:
    packer = Packer(Team(1))
    packed = [packer.pack(random_blocks("Q5_0", 20, 64, seed=n)) for n in range(50)]
    places = sorted(each.data.ctypes.data for each in packed)
    assert places[-1] - places[0] < 50 * 2 * packed_bytes("Q5_0", (20, 64))
    assert all(place % 64 == 0 for place in places)
    for n, each in enumerate(packed):
        assert np.array_equal(each.data, pack(random_blocks("Q5_0", 20, 64, seed=n), Team(1)).data)


def test_a_mapped_source_is_given_back_and_comes_again(tmp_path: Any) -> None:
    source = random_blocks("Q8_0", 512, 1024)
    path = tmp_path / "blocks"
    source.data.numpy().tofile(path)
    mapped = np.memmap(path, np.uint8, "c", shape=tuple(source.data.shape))
    blocks = BlockWeight("Q8_0", mapped, source.shape)
    halves = DenseWeight(mapped.view(np.float16))
    for weight in (blocks, halves, NarrowWeight("Q8_0", blocks, lambda _, rows: rows)):
        packed = Packer(Team(2)).pack(weight)
        assert resident(mapped) < mapped.nbytes // 4
        if weight is blocks:
            assert np.array_equal(packed.data, pack(source, Team(2)).data)
        assert np.array_equal(mapped, source.data)


def resident(data: np.ndarray) -> int:
    """Bytes of a mapping that this process has in memory."""
    inside = False
    with open("/proc/self/smaps") as file:
        for line in file:
            if "-" in line.split(":")[0].split(" ")[0]:
                begin, end = (int(each, 16) for each in line.split(" ")[0].split("-"))
                inside = begin <= data.ctypes.data < end
            elif inside and line.startswith("Rss:"):
                return int(line.split()[1]) * 1024
    raise AssertionError("the mapping is not there")
