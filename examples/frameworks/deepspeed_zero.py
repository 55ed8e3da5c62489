"""DeepSpeed: a small network on random data with ZeRO on the CPU; prints the losses of each rank.

The first argument is the ZeRO stage, by default 2, and the second one the backend, by default gloo.
"""

import sys

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

STAGE = int(sys.argv[1]) if len(sys.argv) > 1 else 2
BACKEND = sys.argv[2] if len(sys.argv) > 2 else "gloo"


def main() -> None:
    deepspeed.init_distributed(dist_backend=BACKEND)
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": STAGE},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    torch.manual_seed(1 + rank)
    for step in range(6):
        x, y = torch.randn(8, 8), torch.randn(8, 1)
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        print(f"rank {rank} step {step} loss {loss:.9g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
