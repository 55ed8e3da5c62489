"""torchtitan's Llama 3 with its parallelize_llama: FSDP2 on all ranks, or one process with the whole batch.

torchrun --standalone --nproc-per-node=2 examples/frameworks/torchtitan_llama.py
"""

import os

import torch
import torch.distributed as dist
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.models.llama3 import Transformer, TransformerModelArgs, parallelize_llama

BATCH, CONTEXT, VOCABULARY, STEPS = 4, 32, 128, 4


def main() -> None:
    parallel_dims.device_type = "cpu"  # torchtitan takes cuda where it finds no accelerator
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(0)
    model = Transformer(TransformerModelArgs(dim=64, n_layers=2, n_heads=4, vocab_size=VOCABULARY, max_seq_len=CONTEXT))
    with torch.no_grad():
        model.init_weights()
    if size > 1:
        dist.init_process_group("monarch")
        config = JobConfig()
        config.training.seq_len = CONTEXT
        config.training.mixed_precision_param = "float32"
        dims = ParallelDims(dp_replicate=1, dp_shard=size, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=size)
        dims.build_mesh()
        parallelize_llama(model, dims, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=generator).chunk(size)[rank]
        scores = model(tokens[:, :-1])
        # torchtitan sums gradients over ranks, so the loss is divided by the number of all tokens.
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        loss = loss / (BATCH * CONTEXT)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        if size > 1:
            dist.all_reduce(total)
        os.write(1, f"rank {rank} step {step} loss {total.item():.5f}\n".encode())
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
