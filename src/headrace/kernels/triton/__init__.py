"""GPU kernels in Triton, for sm_80, sm_90 and sm_100.

One file per operator: its arithmetic first (bytes, operations, what binds), then the kernel, then
the launcher with the shapes. Configurations come from `table.json`, by architecture and shape
bucket; nothing is tuned or compiled once the engine is ready. Importing this package does not
import triton; `backend` does, when it is asked to build.
"""
