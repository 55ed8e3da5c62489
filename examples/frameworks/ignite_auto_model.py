"""PyTorch-Ignite: idist.auto_model, auto_optim and auto_dataloader on random data; prints the losses of each rank.

The first argument is the backend, by default gloo.
"""

import sys

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from torch import nn
from torch.utils.data import TensorDataset

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "gloo"


def train(_local_rank: int) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    model = idist.auto_model(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=0.01))
    loader = idist.auto_dataloader(data, batch_size=8, shuffle=True)

    def update(_engine: Engine, batch: list[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    trainer = Engine(update)

    @trainer.on(Events.ITERATION_COMPLETED)
    def report(engine: Engine) -> None:
        mean = idist.all_reduce(engine.state.output.clone()) / idist.get_world_size()
        print(f"rank {idist.get_rank()} step {engine.state.iteration} loss {engine.state.output:.9g} mean {mean:.9g}")

    trainer.run(loader, max_epochs=2)
    weight = sum(parameter.detach().double().sum() for parameter in model.parameters())
    print(f"rank {idist.get_rank()} weights {weight:.17g}")


if __name__ == "__main__":
    with idist.Parallel(backend=BACKEND) as parallel:
        parallel.run(train)
