"""Lightning Trainer: data-parallel training of a small network on random data; prints the losses of each rank.

The first argument is the backend, by default gloo.
"""

import sys

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "gloo"


class Regression(lightning.LightningModule):
    """A network of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        print(f"rank {self.global_rank} step {index} loss {loss:.9g}")
        self.log("mean", loss, sync_dist=True)
        return loss

    def on_before_zero_grad(self, _optimizer: torch.optim.Optimizer) -> None:
        print(f"rank {self.global_rank} step {self.global_step} mean {self.trainer.callback_metrics['mean']:.9g}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main() -> None:
    lightning.seed_everything(0)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=BACKEND),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), DataLoader(data, batch_size=8, shuffle=True))


if __name__ == "__main__":
    main()
