"""Other servers' figures for the same work, to stand beside ours in tables and plots.

Measured on one NVIDIA H200: Llama-3-8B shape in bf16, dummy weights, adapters of rank 16 on all
linear layers, prefix cache off, CUDA graphs on.
"""

from __future__ import annotations

VLLM, SGLANG = "vLLM 0.25.1", "SGLang 0.5.16"

DEVICE = "NVIDIA H200"
"""How the name of the device on which they were measured begins."""
MODEL, RANK = "llama-3-8b", 16

STEP_BATCH = 64
STEP_FLOOR_MS = {0: 3.7, 1: 3.72, 8: 3.86, 64: 4.95}
"""The time in which the device's memory delivers the weights and that many adapters, once each."""
STEP_MS = {
    VLLM: {0: 6.07, 1: 9.61, 8: 12.10, 64: 32.75},
    SGLANG: {0: 10.27, 1: 12.8, 8: 12.78, 64: 15.1},
}
"""Milliseconds of a decode step of 64 requests with LoRA enabled, by the number of adapters in
it."""

CHURN_RESIDENT, CHURN_REQUESTS = 16, 512
CHURN_TOKENS_PER_S = {
    VLLM: {16: 4652, 32: 4477, 64: 2905, 128: 2032},
    SGLANG: {16: 4751, 32: 4502, 64: 3054, 128: 2212},
}
"""Output tokens per second by the number of adapters that 512 requests, submitted at once, draw
from uniformly; device memory for 16 of them, their files in the page cache."""

PUNICA_SGMV = (
    "Beside it: Punica's kernel for the adapters' part alone (SGMV; rank 16, an adapter for each"
    " row) took 37 us at batch 1 and 116 us at batch 64 on an A100, as published."
)
