"""TorchMetrics: metrics of random predictions, synchronised over the ranks; prints the values of each rank.

The first argument is the backend, by default gloo.
"""

import sys

import torch
import torch.distributed as dist
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "gloo"


def main() -> None:
    dist.init_process_group(BACKEND)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    # AUROC keeps all predictions. The ranks have different numbers of them.
    metrics = MetricCollection([MulticlassAccuracy(5), MulticlassAUROC(5)])
    loss = MeanMetric()
    for _ in range(4):
        logits, target = torch.randn(32 + rank, 5), torch.randint(5, (32 + rank,))
        metrics.update(logits, target)
        loss.update(torch.nn.functional.cross_entropy(logits, target))
    for name, value in metrics.compute().items():
        print(f"rank {rank} {name} {value:.9g}")
    print(f"rank {rank} loss {loss.compute():.9g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
