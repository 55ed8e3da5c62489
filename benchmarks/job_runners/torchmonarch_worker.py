"""The container of a pod that PyTorch Monarch attaches: the worker loop of its KubernetesJob, at the pod's address.

It runs in .envs/peer-torchmonarch. The loop of its own pods uses the pod's full name, for which there is no DNS here.
"""

from __future__ import annotations

import os

from monarch.actor import run_worker_loop_forever

run_worker_loop_forever(
    address=f"tcp://{os.environ['POD_IP']}:26600@tcp://0.0.0.0:26600",
    ca="trust_all_connections",
)
