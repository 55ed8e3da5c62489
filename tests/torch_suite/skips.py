"""Accepted skip reasons of torch's suite, each with an explanation. Any other reason fails the test.

A skip because the suite does not know this backend's name is not accepted. It needs an entry in substitutions.py.
"""

from __future__ import annotations

import re

# (the suite's reason, why it holds for backend "monarch")
ACCEPTED = (
    (
        r"Need at least \d+ (CUDA|accelerator) devices|(CUDA|accelerator) is not available\.",
        "needs two GPUs or more; the suite is run on the CPU route, and GPUs take torch's own NCCL group",
    ),
    (
        r"(Only Nccl|Only NCCL|NCCL Batch|NCCL Send|Coalescing manager currently tests with NCCL only|Tests nccl).*",
        "written for NCCL: CUDA tensors, one GPU per rank",
    ),
    (
        r"Test requires backend monarch to be one of \{'nccl'\}",
        "written for NCCL: CUDA tensors, one GPU per rank",
    ),
    (
        r"Skipped due to small world size\.|Test requires (an exact )?world size of \d+",
        "needs 4 or 8 ranks; test_larger_worlds runs it there",
    ),
    (
        r"Only MPI supports all_to_all",
        "sends lists of different shapes, which Gloo's all_to_all does not take; all_to_all_single does",
    ),
    (
        r"(Test is failing, (see|tracking issue at) )?https://github\.com/pytorch/pytorch/\S+",
        "torch skips it for every backend",
    ),
    (r"Skipped due to flakiness|Currently failing in NVIDIA internal CI", "torch skips it for every backend"),
    (r"no torchvision", "needs torchvision, which nothing here depends on"),
)


def why(reason: str) -> str:
    """Return our explanation of the suite's reason, or "" if the reason is not accepted."""
    return next((ours for pattern, ours in ACCEPTED if re.fullmatch(pattern, reason)), "")


def for_world_size(reason: str) -> bool:
    """Return whether the test would run with more ranks."""
    return "world size" in reason
