"""Curves of well-tuned GPU kernels, by device and class of operator.

Fitted by `benchmarks/roofline/operator_tables.py` to the operator tables of `aiconfigurator-core`
0.12.0 (H100, H200, B200, A100, L40S; the best of TensorRT-LLM, vLLM and SGLang for each shape).
docs/roofline.md has the errors, on shapes that were fitted and on shapes that were not. What is
missing here was not measured there, or not fitted well enough to be better than the assumed shares
(the collectives of L40S).
"""

from __future__ import annotations

from .efficiency import Curve

CURVES: dict[str, dict[str, Curve]] = {
    "A100": {
        "product/bfloat16": Curve(0.815, 0.951, 0.542, 6.55e-06, 1.19e-07, 1e-06),
        "attention/prefill": Curve(0.691, 0.56, 0.69, 8.26e-06, 3.39e-05, 1.15e-05),
        "attention/decode": Curve(0.152, 0.872, 0.828, 1.81e-05, 1.91e-07, 1e-10),
        "experts/bfloat16": Curve(0.323, 0.668, 1, 3.05e-05, 4.11e-07, 1e-06),
        "latent/prefill": Curve(0.537, 0.375, 0.475, 1.32e-05, 2.33e-05, 1e-10),
        "latent/decode": Curve(0.324, 0.392, 0.984, 1.1e-05, 0.0001, 1.09e-06),
        "all_reduce": Curve(1.0, 0.648, 1.0, 5.3e-06),
    },
    "H100": {
        "product/bfloat16": Curve(0.855, 0.938, 0.835, 3.33e-06, 1.23e-07, 1e-06),
        "product/fp8": Curve(0.633, 1.1, 0.41, 5.78e-06, 3.1e-07, 1e-06),
        "attention/prefill": Curve(0.753, 0.491, 0.01, 1.12e-05, 4.95e-06, 1.37e-05),
        "attention/prefill/64": Curve(0.61, 0.303, 0.01, 1.22e-05, 6.22e-06, 1.52e-05),
        "attention/decode": Curve(0.306, 0.949, 0.52, 1.06e-05, 8.87e-08, 4.68e-06),
        "attention/decode/64": Curve(0.112, 0.941, 0.78, 1.14e-05, 9.31e-08, 7.94e-06),
        "experts/bfloat16": Curve(0.541, 1.1, 0.242, 2.09e-05, 2.87e-07, 1e-06),
        "experts/fp8": Curve(0.278, 1.1, 0.562, 3.34e-05, 1e-10, 1e-06),
        "latent/prefill": Curve(0.689, 0.442, 0.01, 1.71e-05, 8.85e-06, 1.77e-05),
        "latent/decode": Curve(0.848, 0.934, 0.841, 1.55e-05, 1.39e-07, 1.75e-06),
        "all_reduce": Curve(1.0, 0.684, 1.0, 2.91e-06),
        "all_to_all": Curve(1.0, 0.588, 1.0, 4.88e-05),
    },
    "H200": {
        "product/bfloat16": Curve(0.841, 0.893, 0.91, 3.62e-06, 1.4e-07, 1e-06),
        "product/fp8": Curve(0.665, 1.1, 0.474, 6.2e-06, 2.48e-07, 1e-06),
        "attention/prefill": Curve(0.741, 0.383, 0.01, 1.07e-05, 4.55e-06, 1.15e-05),
        "attention/prefill/64": Curve(0.594, 0.229, 0.01, 1.15e-05, 5.74e-06, 1.46e-05),
        "attention/decode": Curve(0.236, 0.957, 0.661, 1.1e-05, 1.05e-07, 7.34e-06),
        "attention/decode/64": Curve(0.148, 0.939, 0.546, 1.14e-05, 1.23e-07, 1.27e-05),
        "experts/bfloat16": Curve(0.544, 1.1, 0.461, 2.36e-05, 3.25e-07, 1e-06),
        "experts/fp8": Curve(0.286, 0.812, 0.933, 3.74e-05, 1e-10, 1e-06),
        "latent/prefill": Curve(0.714, 0.306, 0.01, 1.6e-05, 8.14e-06, 6.57e-06),
        "latent/decode": Curve(0.874, 0.953, 0.644, 1.58e-05, 1.48e-07, 1.51e-06),
        "all_reduce": Curve(1.0, 0.708, 1.0, 2.78e-06),
        "all_to_all": Curve(1.0, 0.602, 1.0, 4.95e-05),
    },
    "B200": {
        "product/bfloat16": Curve(0.776, 0.966, 0.717, 2.95e-06, 2.06e-07, 1e-06),
        "product/fp8": Curve(0.546, 1.1, 0.683, 5.48e-06, 4.38e-07, 1e-06),
        "product/fp4": Curve(0.495, 1.1, 0.433, 4.53e-06, 4.3e-07, 1e-06),
        "attention/prefill": Curve(0.678, 0.304, 0.084, 1.26e-05, 5.85e-06, 2.18e-05),
        "attention/prefill/64": Curve(0.404, 0.198, 0.01, 1.17e-05, 6.26e-06, 1.63e-05),
        "attention/decode": Curve(0.169, 0.944, 0.905, 1e-05, 9.14e-08, 1e-06),
        "attention/decode/64": Curve(0.0983, 0.925, 0.9, 1.02e-05, 7.32e-08, 1.86e-06),
        "experts/bfloat16": Curve(0.387, 0.753, 1, 1.04e-05, 6e-07, 1e-06),
        "experts/fp8": Curve(0.327, 0.661, 1, 2.02e-05, 1e-10, 1e-06),
        "latent/prefill": Curve(0.739, 0.309, 0.01, 1.55e-05, 6.22e-06, 2.01e-05),
        "latent/decode": Curve(1.1, 0.718, 0.964, 1.14e-05, 1.82e-07, 5.98e-07),
        "all_reduce": Curve(1.0, 0.6, 1.0, 5.26e-06),
        "experts/fp4": Curve(0.29, 0.667, 1, 1.89e-05, 3.5e-09, 1e-06),
        "all_to_all": Curve(1.0, 0.238, 1.0, 5.25e-05),
    },
    "L40S": {
        "product/bfloat16": Curve(0.712, 0.9, 0.55, 1e-07, 1e-10, 1e-06),
        "product/fp8": Curve(0.556, 0.964, 0.415, 8.34e-07, 3.57e-07, 1e-06),
        "attention/prefill": Curve(0.602, 0.716, 0.855, 2.08e-06, 2.76e-05, 1e-10),
        "attention/prefill/64": Curve(0.495, 0.632, 0.307, 4.95e-06, 1.77e-05, 1e-10),
        "attention/decode": Curve(0.739, 0.881, 0.0278, 8.2e-06, 1e-10, 1e-10),
        "attention/decode/64": Curve(0.0978, 0.889, 1, 9.39e-06, 1e-10, 1e-10),
        "experts/bfloat16": Curve(0.644, 0.921, 0.01, 1e-07, 1e-10, 1e-06),
        "experts/fp8": Curve(0.458, 0.959, 0.01, 1e-07, 1e-10, 1e-06),
    },
}
"""compute, memory, overlap, seconds of a call, of 1,000 deep, of 1,000 pieces."""
