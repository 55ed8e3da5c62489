"""Ray Train: two workers on this machine train a small network on random data; prints the losses of each rank.

The first argument is the backend, by default gloo.
"""

import sys
import tempfile

import ray
import torch
import torch.distributed as dist
from ray.train import Result, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "gloo"


def train() -> list[list[float]]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    model = prepare_model(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for x, y in prepare_data_loader(DataLoader(data, batch_size=8, shuffle=True)):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    everyone: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, losses)
    return everyone


def main(folder: str) -> None:
    trainer = TorchTrainer(
        train,
        torch_config=TorchConfig(backend=BACKEND),
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(storage_path=folder),
    )
    result: Result = trainer.fit()
    for rank, losses in enumerate(result.return_value):
        for step, loss in enumerate(losses):
            print(f"rank {rank} step {step} loss {loss:.9g}")


if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
    ray.shutdown()
