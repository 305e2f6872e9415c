"""Arrays on their way to a device that copies as late as it may."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from headrace.loader.upload import Upload


class LateLink:
    """Copies a buffer only when somebody waits for it: what was written too early is found."""

    def __init__(self) -> None:
        self.sent = 0
        self.buffers = 0

    def buffer(self, nbytes: int) -> torch.Tensor:
        self.buffers += 1
        return torch.empty(nbytes, dtype=torch.uint8)

    def empty_like(self, there: torch.Tensor) -> torch.Tensor:
        return torch.zeros(there.shape, dtype=there.dtype)

    def send(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
        self.sent += 1
        waiting = [lambda: target.copy_(source)]

        def wait() -> None:
            while waiting:
                waiting.pop()()

        return wait


def test_every_array_arrives_whole() -> None:
    random = np.random.default_rng(3)
    arrays = [
        random.standard_normal((7, 33)).astype(np.float32),
        torch.from_numpy(random.integers(0, 255, (5, 1000), np.uint8)),
        torch.randn(40, 50).to(torch.bfloat16).T,  # Not contiguous.
        np.zeros((0, 4), np.int32),
        torch.randn(3, 3).to(torch.float8_e4m3fn),
        random.integers(0, 9, 3 * 2**20, np.uint8),  # Several threads copy it.
    ]
    link = LateLink()
    upload = Upload(link, room=1024)
    whole = Upload(wide := LateLink())
    made = [upload(array) for array in arrays[:-1]] + [whole(arrays[-1])]
    upload.close()
    whole.close()
    for array, found in zip(arrays, made, strict=True):
        wanted = torch.as_tensor(array)
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        assert torch.equal(found.float(), wanted.float())
    assert link.buffers == wide.buffers == 2
    assert link.sent == sum(-(-torch.as_tensor(a).nbytes // 1024) for a in arrays[:-1])
