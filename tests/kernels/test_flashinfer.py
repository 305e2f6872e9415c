"""The adapter to FlashInfer against a fake of it, and the choice whether it serves.

The fake has the constructors and methods of flashinfer-python 0.7.2 with their parameters in order
(read from that release's source), refuses what it would refuse, and computes from what it was
*planned* with, so a wrong plan gives a wrong result. The library itself never ran here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import attend

from headrace.base.errors import OptionError
from headrace.kernels import reference_attention
from headrace.kernels.backend import Question
from headrace.kernels.flashinfer import backend as flashinfer_backend
from headrace.kernels.flashinfer.attention import FlashInferOperators
from headrace.kernels.flashinfer.backend import FlashInferBackend
from headrace.kernels.operators import GroupBatch, HostStep, KvCache, KvLayer, StepBatch, StepLimits
from headrace.kernels.program import LOGITS
from headrace.kernels.reference import ReferenceOperators
from headrace.kernels.reference_backend import ReferenceBackend
from headrace.kernels.select import choose, known_backends
from oracle import graphs
from oracle.steps import Forwards, plain

CPU = torch.device("cpu")
BLOCK = 16


class Wrapper:
    """What both wrappers share: pages [indptr, indices, last] to one dense sequence each."""

    def __init__(self) -> None:
        self.plans = 0

    def keep(
        self,
        starts: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last: torch.Tensor,
        heads: tuple[int, int, int, int],
        window_left: int,
        cap: float | None,
        scale: float | None,
        dtypes: tuple[Any, Any],
    ) -> None:
        assert indptr.dtype == indices.dtype == last.dtype == starts.dtype == torch.int32
        assert starts.device.type == indptr.device.type == last.device.type == "cpu"
        assert indices.shape == (int(indptr[-1]),)
        assert len(starts) == len(indptr) == len(last) + 1
        assert ((last >= 1) & (last <= heads[3])).all()
        assert heads[0] % heads[1] == 0
        self.plans += 1
        self.planned = (starts, indptr, indices, last, heads, window_left, cap, scale, dtypes)

    def compute(self, q: torch.Tensor, cache: Any, out: torch.Tensor | None) -> torch.Tensor:
        starts, indptr, indices, last, heads, window_left, cap, scale, dtypes = self.planned
        k, v = cache
        assert q.shape == (int(starts[-1]), heads[0], heads[2])
        assert k.shape[1:] == (heads[1], heads[3], heads[2]), "HND"
        assert (q.dtype, k.dtype) == dtypes
        lengths = (indptr[1:] - indptr[:-1] - 1) * heads[3] + last
        width = int((indptr[1:] - indptr[:-1]).max())
        tables = torch.zeros(len(last), width, dtype=torch.int32)
        for b in range(len(last)):
            pages = indices[indptr[b] : indptr[b + 1]]
            tables[b, : len(pages)] = pages
        counts = starts[1:] - starts[:-1]
        positions = torch.cat(
            [torch.arange(int(n - c), int(n)) for n, c in zip(lengths, counts, strict=True)]
        )
        window = None if window_left < 0 else window_left + 1
        batch = StepBatch(
            positions,
            positions,
            starts,
            lengths.to(torch.int32),
            [GroupBatch(tables, positions, window)],
            positions[:0],
            int(counts.max()),
            int(lengths.max()),
        )
        found = reference_attention.attention(
            q, KvLayer(k, v), batch, 0, heads[2] ** -0.5 if scale is None else scale, cap
        ).view(q.shape)
        return found if out is None else out.copy_(found)


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        super().__init__()
        self.use_tensor_cores = use_tensor_cores
        assert kv_layout == "HND"
        assert float_workspace_buffer.dtype == torch.uint8
        assert not float_workspace_buffer[:64].any()

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        sm_scale: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        group = num_qo_heads // num_kv_heads
        if not self.use_tensor_cores and group not in (1, 2, 3, 4, 8):
            raise RuntimeError(f"Unsupported group_size: {group}")
        starts = torch.arange(len(indptr), dtype=torch.int32)
        heads = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self.keep(
            starts,
            indptr,
            indices,
            last_page_len,
            heads,
            window_left,
            logits_soft_cap,
            sm_scale,
            (q_data_type, kv_data_type),
        )

    def run(self, q: torch.Tensor, paged_kv_cache: Any, *, out: Any = None) -> torch.Tensor:
        return self.compute(q, paged_kv_cache, out)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None,
        paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        assert kv_layout == "HND"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: Any = None,
        rope_theta: Any = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        assert causal
        heads = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self.keep(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            heads,
            window_left,
            logits_soft_cap,
            sm_scale,
            (q_data_type, kv_data_type),
        )

    def run(self, q: torch.Tensor, paged_kv_cache: Any, *, out: Any = None) -> torch.Tensor:
        return self.compute(q, paged_kv_cache, out)


class Library:
    BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
    BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper


def make_step(entries: list[tuple[int, int]], window: int | None) -> StepBatch:
    """(start, count) of each entry, on pages in no order."""
    lengths = [start + count for start, count in entries]
    width = -(-max(lengths) // BLOCK) + 1
    order = torch.randperm(len(entries) * width, generator=torch.Generator().manual_seed(3)) + 1
    tables = order.view(len(entries), width).to(torch.int32)
    starts = torch.tensor([0] + [count for _, count in entries]).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(s, s + c) for s, c in entries])
    counts = np.array([count for _, count in entries])
    return StepBatch(
        positions,
        positions,
        starts,
        torch.tensor(lengths, dtype=torch.int32),
        [GroupBatch(tables, positions, window)],
        positions[:0],
        int(counts.max()),
        max(lengths),
        host=HostStep(counts, np.array(lengths), counts[:0]),
    )


@pytest.mark.parametrize("entries", [[(0, 1)], [(15, 1), (16, 1), (40, 1)], [(0, 20), (33, 1)]])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, None), (None, 20.0)])
@pytest.mark.parametrize("heads", [6, 14])  # groups of 3, and of 7 as Qwen2.5-0.5B has them
def test_what_is_planned_is_the_step(
    entries: list[tuple[int, int]], window: int | None, softcap: float | None, heads: int
) -> None:
    torch.manual_seed(1)
    batch = make_step(entries, window)
    kv = KvLayer(*torch.randn(2, int(batch.groups[0].tables.max()) + 1, 2, BLOCK, 64))
    q = torch.randn(len(batch.tokens), heads, 64)
    ops = FlashInferOperators(torch.float32, CPU, Library)
    expected = reference_attention.attention(q, kv, batch, 0, 0.1, softcap)
    torch.testing.assert_close(attend(ops, q, kv, batch, 0, 0.1, softcap), expected)
    # The next layer of the step finds the plan made; another step makes its own.
    attend(ops, q, kv, batch, 0, 0.1, softcap)
    assert ops._prefill.plans + ops._decode.plans == 1
    attend(ops, q, kv, make_step(entries, window), 0, 0.1, softcap)
    assert ops._prefill.plans + ops._decode.plans == 2


def test_a_step_that_is_captured_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_step([(0, 20)], None)
    batch.host = None
    ops = FlashInferOperators(torch.float32, CPU, Library)
    called = []
    monkeypatch.setattr(
        "headrace.kernels.triton.operators.TritonOperators.attend",
        lambda *arguments: called.append(arguments),
    )
    attend(
        ops, torch.randn(20, 6, 64), KvLayer(*torch.randn(2, 4, 2, BLOCK, 64)), batch, 0, 1.0, None
    )
    assert len(called) == 1
    assert ops._prefill.plans == 0


QUESTION = Question("cuda", "bfloat16", "bfloat16", graphs.decoder(128), frozenset({"bfloat16"}))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The library is there, on an H100, and nothing was measured yet; → where measurements go."""
    monkeypatch.setattr(flashinfer_backend, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    file = tmp_path / "measured.json"
    monkeypatch.setattr(flashinfer_backend, "MEASURED", file)

    def load() -> dict[str, dict[str, float]]:
        return json.loads(file.read_text()) if file.exists() else {}

    monkeypatch.setattr(flashinfer_backend, "load_measured", load)
    return file


def test_it_serves_where_it_was_measured_to_be_better(installed: Path) -> None:
    backend = FlashInferBackend()
    assert "not measured" in (backend.supports("attend", QUESTION) or "")
    installed.write_text(json.dumps({"sm_90": {"128": 0.9, "64": 1.4}}))
    assert "0.90 times" in (backend.supports("attend", QUESTION) or "")
    installed.write_text(json.dumps({"sm_90": {"128": 1.2}}))
    assert backend.supports("attend", QUESTION) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"device": "cpu"}, "NVIDIA"),
        ({"deterministic": True}, "depend on the batch"),
        ({"dtype": torch.float32}, "float32"),
        ({"kv_dtype": "fp8"}, "one scale"),
        ({"graph": graphs.decoder(80)}, "80"),
    ],
)
def test_what_it_cannot_do_it_says(installed: Path, change: dict[str, Any], says: str) -> None:
    values = {name: getattr(QUESTION, name) for name in QUESTION.__slots__}
    question = Question(**{**values, "asked": True, **change})
    assert says in (FlashInferBackend().supports("attend", question) or "")
    assert FlashInferBackend().supports("linear", question) is not None


def test_without_the_library_it_says_so() -> None:
    assert "not installed" in (FlashInferBackend().supports("attend", QUESTION) or "")
    with pytest.raises(OptionError, match="can serve nothing"):
        choose(QUESTION, "flashinfer", backends=[FlashInferBackend(), ReferenceBackend()])
    assert [b.name for b in known_backends()].index("flashinfer") < [
        b.name for b in known_backends()
    ].index("triton")


class Within(ReferenceOperators):
    name = "guest"
    within = "host"


class Host(ReferenceOperators):
    name = "host"

    def compile(self, plain, limits):
        return plain


class Serves:
    def __init__(self, name: str, kind: type[ReferenceOperators], *operators: str) -> None:
        self.name, self._kind, self._operators = name, kind, operators
        self.beside = ("host",) if name == "guest" else ()

    def supports(self, operator: str, question: Question) -> str | None:
        return None if operator in self._operators else f"has no {operator}"

    def build(self, question: Question) -> ReferenceOperators:
        return self._kind(getattr(torch, question.dtype))


def test_asked_for_by_name_it_runs_within_the_programs_of_those_beside_it() -> None:
    question = Question("cpu", "float32", "float32", graphs.decoder(), frozenset({"float32"}))
    backends = [
        Serves("guest", Within, "attend"),
        Serves("host", Host, *graphs.kinds(question.graph)),
        ReferenceBackend(),
    ]
    operators, decisions = choose(question, "guest", backends=backends)
    served = {decision.name: decision.value for decision in decisions}
    assert served.pop("kernels.attend") == "guest"
    assert set(served.values()) == {"host"}
    seen = []

    def forward(ops, batch, cache):
        seen.append((ops.attend.__self__.name, ops.linear.__self__.name))
        return torch.zeros(0), torch.zeros(0)

    alone = plain(operators, Forwards(forward), KvCache([], []))
    program = operators.compile(alone, StepLimits(1, 1, 1))
    assert program is not None
    program.step(make_step([(0, 1)], None), LOGITS)
    assert seen == [("guest", "host")]
