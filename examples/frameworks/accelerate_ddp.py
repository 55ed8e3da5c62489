"""Accelerate: data-parallel training of a small network on random data; prints the losses of each rank."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
    for step, (x, y) in enumerate(loader):
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.gather(loss.detach()).mean()
        print(f"rank {accelerator.process_index} step {step} loss {loss:.9g} mean {mean:.9g}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
