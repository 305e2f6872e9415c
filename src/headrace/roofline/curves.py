"""Curves of well-tuned GPU kernels, by device and class of operator.

Fitted to the operator tables of `aiconfigurator-core` 0.12.0 (H100, H200, B200, A100, L40S; the
best of TensorRT-LLM, vLLM and SGLang for each shape).
docs/roofline.md has the errors, on shapes that were fitted and on shapes that were not. A class
missing here was not measured there, or not fitted well enough to be better than the assumed shares
(the collectives of L40S).
"""

from __future__ import annotations

from .efficiency import Curve

TABLE = """
device operators            compute memory overlap floor   deep pieces
A100   product/bfloat16       0.815  0.951   0.542  6.55  0.119      1
A100   attention/prefill      0.691   0.56    0.69  8.26   33.9   11.5
A100   attention/decode       0.152  0.872   0.828  18.1  0.191 0.0001
A100   experts/bfloat16       0.323  0.668       1  30.5  0.411      1
A100   latent/prefill         0.537  0.375   0.475  13.2   23.3 0.0001
A100   latent/decode          0.324  0.392   0.984    11    100   1.09
A100   all_reduce                 1  0.648       1   5.3      0      0
H100   product/bfloat16       0.855  0.938   0.835  3.33  0.123      1
H100   product/fp8            0.633    1.1    0.41  5.78   0.31      1
H100   attention/prefill      0.753  0.491    0.01  11.2   4.95   13.7
H100   attention/prefill/64    0.61  0.303    0.01  12.2   6.22   15.2
H100   attention/decode       0.306  0.949    0.52  10.6 0.0887   4.68
H100   attention/decode/64    0.112  0.941    0.78  11.4 0.0931   7.94
H100   experts/bfloat16       0.541    1.1   0.242  20.9  0.287      1
H100   experts/fp8            0.278    1.1   0.562  33.4 0.0001      1
H100   experts/int4           0.475    1.1       1    30  0.833      1
H100   latent/prefill         0.689  0.442    0.01  17.1   8.85   17.7
H100   latent/decode          0.848  0.934   0.841  15.5  0.139   1.75
H100   all_reduce                 1  0.684       1  2.91      0      0
H100   all_to_all                 1  0.588       1  48.8      0      0
H200   product/bfloat16       0.841  0.893    0.91  3.62   0.14      1
H200   product/fp8            0.665    1.1   0.474   6.2  0.248      1
H200   attention/prefill      0.741  0.383    0.01  10.7   4.55   11.5
H200   attention/prefill/64   0.594  0.229    0.01  11.5   5.74   14.6
H200   attention/decode       0.236  0.957   0.661    11  0.105   7.34
H200   attention/decode/64    0.148  0.939   0.546  11.4  0.123   12.7
H200   experts/bfloat16       0.544    1.1   0.461  23.6  0.325      1
H200   experts/fp8            0.286  0.812   0.933  37.4 0.0001      1
H200   experts/int4           0.494    1.1       1  31.3  0.466      1
H200   latent/prefill         0.714  0.306    0.01    16   8.14   6.57
H200   latent/decode          0.874  0.953   0.644  15.8  0.148   1.51
H200   all_reduce                 1  0.708       1  2.78      0      0
H200   all_to_all                 1  0.602       1  49.5      0      0
B200   product/bfloat16       0.776  0.966   0.717  2.95  0.206      1
B200   product/fp8            0.546    1.1   0.683  5.48  0.438      1
B200   product/fp4            0.495    1.1   0.433  4.53   0.43      1
B200   attention/prefill      0.678  0.304   0.084  12.6   5.85   21.8
B200   attention/prefill/64   0.404  0.198    0.01  11.7   6.26   16.3
B200   attention/decode       0.169  0.944   0.905    10 0.0914      1
B200   attention/decode/64   0.0983  0.925     0.9  10.2 0.0732   1.86
B200   experts/bfloat16       0.387  0.753       1  10.4    0.6      1
B200   experts/fp8            0.327  0.661       1  20.2 0.0001      1
B200   latent/prefill         0.739  0.309    0.01  15.5   6.22   20.1
B200   latent/decode            1.1  0.718   0.964  11.4  0.182  0.598
B200   all_reduce                 1    0.6       1  5.26      0      0
B200   experts/fp4             0.29  0.667       1  18.9 0.0035      1
B200   experts/int4           0.494    1.1       1  12.7   0.81      1
B200   all_to_all                 1  0.238       1  52.5      0      0
L40S   product/bfloat16       0.712    0.9    0.55   0.1 0.0001      1
L40S   product/fp8            0.556  0.964   0.415 0.834  0.357      1
L40S   attention/prefill      0.602  0.716   0.855  2.08   27.6 0.0001
L40S   attention/prefill/64   0.495  0.632   0.307  4.95   17.7 0.0001
L40S   attention/decode       0.739  0.881  0.0278   8.2 0.0001 0.0001
L40S   attention/decode/64   0.0978  0.889       1  9.39 0.0001 0.0001
L40S   experts/bfloat16       0.644  0.921    0.01   0.1 0.0001      1
L40S   experts/fp8            0.458  0.959    0.01   0.1 0.0001      1
"""
"""Shares of compute and memory, the overlap of the two, and microseconds: of a call, of 1,000 deep,
of 1,000 pieces (`Curve`)."""


def _read(table: str) -> dict[str, dict[str, Curve]]:
    found: dict[str, dict[str, Curve]] = {}
    for line in table.strip().splitlines()[1:]:
        device, operators, *numbers = line.split()
        compute, memory, overlap, *microseconds = map(float, numbers)
        times = (1e-6 * value for value in microseconds)
        found.setdefault(device, {})[operators] = Curve(compute, memory, overlap, *times)
    return found


CURVES = _read(TABLE)
"""Device → class (`step.curve_names`) → curve."""
