"""Random networks of torch, exported to ONNX, give torch's outputs to 1e-4."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from headrace.programs import ForeignProgram
from headrace.programs.inspection import inspected_bytes

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")
pytest.importorskip("onnxruntime", reason="needs the extra programs: onnxruntime")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def detector() -> Any:
    """Backbone, one layer of a transformer over its map, and queries with classes and boxes."""

    class Detector(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Sequential(
                torch.nn.Conv2d(3, 16, 3, 4, 1), torch.nn.BatchNorm2d(16), torch.nn.SiLU(),
                torch.nn.Conv2d(16, 32, 3, 2, 1), torch.nn.ReLU(),
            )  # fmt: skip
            self.encoder = torch.nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
            self.queries = torch.nn.Parameter(torch.randn(1, 5, 32))
            self.attend = torch.nn.MultiheadAttention(32, 4, batch_first=True)
            self.classes, self.boxes = torch.nn.Linear(32, 7), torch.nn.Linear(32, 4)

        def forward(self, x: Any) -> Any:
            tokens = self.encoder(self.body(x).flatten(2).transpose(1, 2))
            queries = self.queries.expand(x.shape[0], -1, -1)
            found, _ = self.attend(queries, tokens, tokens)
            return self.classes(found), self.boxes(found).sigmoid()

    return Detector()


def segmenter() -> Any:
    """Two scales, joined and brought back to the picture's size."""

    class Segmenter(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.fine, self.coarse = torch.nn.Conv2d(3, 8, 3, 2, 1), torch.nn.Conv2d(8, 8, 3, 2, 1)
            self.norm, self.head = torch.nn.GroupNorm(2, 8), torch.nn.Conv2d(16, 4, 1)

        def forward(self, x: Any) -> Any:
            fine = torch.nn.functional.gelu(self.norm(self.fine(x)))
            coarse = torch.nn.functional.interpolate(self.coarse(fine), scale_factor=2.0)
            both = self.head(torch.cat([fine, coarse], 1))
            return torch.nn.functional.interpolate(both, scale_factor=2.0, mode="bilinear")

    return Segmenter()


def exported(module: Any, sample: Any) -> bytes:
    target = io.BytesIO()
    rows = {0: torch.export.Dim("batch", min=1, max=64)}
    torch.onnx.export(module, (sample,), dynamo=True, dynamic_shapes=(rows,), verbose=False).save(
        target
    )
    return target.getvalue()


@pytest.mark.parametrize("make", [detector, segmenter])
def test_an_export_gives_the_outputs_of_torch(make: Any) -> None:
    torch.manual_seed(0)
    module = make().eval()
    data = exported(module, torch.randn(2, 3, 32, 32))
    program = ForeignProgram(inspected_bytes(data, "m.onnx"))
    (name,) = program.inputs
    for rows in (1, 3):
        x = torch.randn(rows, 3, 32, 32)
        with torch.no_grad():
            expected = module(x)
        found = program.run({name: x.numpy()})
        several = expected if isinstance(expected, tuple) else (expected,)
        for ours, theirs in zip(found.values(), several, strict=True):
            np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-4)
    verdict = program.prove({name: x[:1].numpy()}, 3)
    assert verdict.reason.startswith(("equal", "output"))
