"""Lightning Fabric: data-parallel training of a small network on random data; prints the losses of each rank.

The first argument is the backend, by default gloo.
"""

import sys

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "gloo"


def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend=BACKEND))
    fabric.launch()
    fabric.seed_everything(0)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8, shuffle=True))
    seen = torch.zeros((), dtype=torch.int64)
    for step, (x, y) in enumerate(loader):
        loss = nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seen += len(x)
        mean = fabric.all_reduce(loss.detach().clone())
        print(f"rank {fabric.global_rank} step {step} loss {loss:.9g} mean {mean:.9g}")
    print(f"rank {fabric.global_rank} rows {fabric.all_reduce(seen, reduce_op='sum')}")
    dist.barrier()  # Gloo's destructor keeps the GIL and waits for its threads, which may still need it for the sum
    dist.destroy_process_group()  # without it, Gloo's threads may abort the exit


if __name__ == "__main__":
    main()
