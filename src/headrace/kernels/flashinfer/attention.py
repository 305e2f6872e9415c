"""The operator `attend` by FlashInfer's paged wrappers.

A wrapper is *planned* once per step and layer group, on the host, and *run* once per layer. Its
pages are ours as they lie: K and V [blocks, G, S, E] are its layout "HND". A window of W tokens
counts the query itself, FlashInfer's `window_left` does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch

from ...base.graph import AttentionSpec
from ..operators import KvLayer, StepBatch
from ..triton.operators import TritonOperators

WORKSPACE = 128 * 2**20
"""Bytes, as the library recommends; zeros at first."""


class FlashInferOperators(TritonOperators):
    """Triton's operators but for attention of steps that are not graphs."""

    name = "flashinfer"
    within = "triton"
    """The backend whose programs it runs in: see `ComposedOperators`."""

    def __init__(self, dtype: torch.dtype, device: torch.device, library: Any = None) -> None:
        """`library`: in place of the module `flashinfer`."""
        super().__init__(dtype)
        if library is None:
            library = import_module("flashinfer")
        workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
        self._prefill = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        # Its kernels without tensor cores know groups of 1, 2, 3, 4 and 8 query heads only.
        self._decode = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "HND", use_tensor_cores=True
        )
        self._planned: tuple[StepBatch, tuple[object, ...]] | None = None

    def attend(
        self, q: torch.Tensor, spec: AttentionSpec, kv: KvLayer | None, batch: StepBatch, group: int
    ) -> torch.Tensor:
        if kv is None or batch.host is None or kv.k_scale is not None:
            # A graph is captured: nothing may be planned in it.
            return super().attend(q, spec, kv, batch, group)
        heads, width, scale, softcap = spec.heads, spec.size, spec.scale, spec.softcap
        flat = q
        q = flat.view(len(flat), heads, width)
        wrapper = self._decode if batch.max_count == 1 else self._prefill
        wanted = (group, heads, kv.k.shape[1], width, scale, softcap, q.dtype, kv.k.dtype)
        # Layers of a group follow each other but for models with windows, which plan anew.
        if self._planned is None or self._planned[0] is not batch or self._planned[1] != wanted:
            self._plan(batch, group, q, kv, scale, softcap)
            self._planned = (batch, wanted)
        out = torch.empty_like(q)
        wrapper.run(q, (kv.k, kv.v), out=out)
        return out.view_as(flat)

    def _plan(
        self,
        batch: StepBatch,
        group: int,
        q: torch.Tensor,
        kv: KvLayer,
        scale: float,
        softcap: float | None,
    ) -> None:
        assert batch.host is not None
        view, size = batch.groups[group], kv.k.shape[2]
        lengths, counts = batch.host.lengths, batch.host.counts
        pages = -(-lengths // size)
        bounds = np.concatenate([[0], pages.cumsum()]).astype(np.int32)
        # Which cells of the tables [B, blocks] are pages, row by row.
        rows = np.repeat(np.arange(len(pages)), pages)
        columns = np.arange(bounds[-1]) - np.repeat(bounds[:-1], pages)
        cells = torch.from_numpy(rows * view.tables.shape[1] + columns).to(q.device)
        indices = view.tables.reshape(-1)[cells]
        last = torch.from_numpy(((lengths - 1) % size + 1).astype(np.int32))
        options = {
            "window_left": -1 if view.window is None else view.window - 1,
            "logits_soft_cap": softcap,
            "sm_scale": scale,
            "q_data_type": q.dtype,
            "kv_data_type": kv.k.dtype,
        }
        heads, width = q.shape[1], q.shape[2]
        shape = (heads, kv.k.shape[1], width, size)
        if batch.max_count == 1:
            self._decode.plan(torch.from_numpy(bounds), indices, last, *shape, **options)
            return
        starts = torch.from_numpy(np.concatenate([[0], counts.cumsum()]).astype(np.int32))
        self._prefill.plan(
            starts, torch.from_numpy(bounds), indices, last, *shape, causal=True, **options
        )
