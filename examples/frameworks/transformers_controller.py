"""Train a tiny Llama of Transformers from one controller, on two processes, and let it generate.

python examples/frameworks/transformers_controller.py
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from monarch_backend.actor import this_host


def main() -> None:
    procs = this_host().spawn_procs({"dp": 2})
    mesh = procs.device_mesh("cpu")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(3, 35).view(4, 8)
    for _ in range(30):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("loss below 0.5:", loss.item() < 0.5)
    model.eval()
    with torch.no_grad():
        found = model.generate(tokens[:1, :4], attention_mask=torch.ones(1, 4), max_new_tokens=4, do_sample=False)
    print("tokens:", found.tolist()[0])
    procs.stop().get()


if __name__ == "__main__":
    main()
