"""Transformers: a small Llama with random weights and data, trained by Trainer; prints the losses of each rank.

The first argument is the backend, by default gloo.
"""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "gloo"


def main(folder: str) -> None:
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        ddp_backend=BACKEND,
        max_steps=6,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    set_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32)
    tokens = torch.randint(64, (64, 16))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=data, eval_dataset=data[:16])
    trainer.train()
    for step, entry in enumerate(trainer.state.log_history[:-1]):
        print(f"rank {arguments.process_index} step {step} loss {entry['loss']} norm {entry['grad_norm']:.9g}")
    print(f"rank {arguments.process_index} eval loss {trainer.evaluate()['eval_loss']:.9g}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
