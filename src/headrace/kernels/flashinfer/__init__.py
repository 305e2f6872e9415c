"""FlashInfer's attention in place of our own, where it is installed and was measured to be faster.

Ye et al., "FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving"
(2025). It serves the operator `attention` of steps that run call by call (prompts); steps that are
CUDA graphs keep the Triton kernel, since FlashInfer plans each step on the host. Everything else is
Triton's, within whose programs it runs. It has never run on a device here: `docs/gpu.md`.
"""
