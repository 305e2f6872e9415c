"""GPU kernels in Triton, for compute capabilities from 8.0 to 12.1.

One file per operator: its arithmetic first (bytes, operations, the bottleneck), then the kernel,
then the launcher with the shapes. Configurations come from `table.json`, by architecture and shape
bucket; nothing is tuned or compiled once the engine is ready. Importing this package does not
import triton; `backend` does, when it builds.
"""

from ...base.environment import fuse_multiply_adds

fuse_multiply_adds()  # Before any module here imports triton.
