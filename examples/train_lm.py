"""Train a byte-level transformer on the Python sources of the installed torch package.

    python examples/train_lm.py --parallel none                                           one process
    torchrun --standalone --nproc-per-node=2 examples/train_lm.py --parallel ddp          DistributedDataParallel
    torchrun --standalone --nproc-per-node=2 examples/train_lm.py --parallel fsdp         FSDP2, fully_shard
    torchrun --standalone --nproc-per-node=2 examples/train_lm.py --parallel tp           tensor + sequence parallel
    torchrun --standalone --nproc-per-node=4 examples/train_lm.py --parallel fsdp+tp      2-D mesh, --tp-size 2

Add --resume to continue from the newest checkpoint in --out, under any of these modes and any number of processes.
Nothing here imports a backend: torch finds "monarch" through the entry points of the installed package.

The global batch, the initial weights and the learning rate depend only on the seed and the step, not on the number of
processes. So every mode follows the same loss curve up to float rounding.
"""

import argparse
import json
import logging
import math
import os
import re
import shutil
import sys
import time
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

BYTES = 256  # the vocabulary
RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
LOCAL_WORLD_SIZE = int(os.environ.get("LOCAL_WORLD_SIZE", 1))


# ---- model


class Attention(nn.Module):
    rope: Tensor

    def __init__(self, dim: int, heads: int, context: int):
        super().__init__()
        self.head_dim = dim // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        freqs = 10000.0 ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.outer(torch.arange(context), freqs)
        self.register_buffer("rope", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        cos, sin = self.rope[:, : x.shape[-2]]
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        # Under tensor parallelism q, k and v have the columns of this rank's heads only, as plain local tensors.
        # Therefore the number of heads is taken from the tensor's size.
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, context: int):
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=1e-5)
        self.attention = Attention(dim, heads, context)
        self.mlp_norm = nn.RMSNorm(dim, eps=1e-5)
        up, down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)
        self.mlp = nn.Sequential(OrderedDict(up=up, gelu=nn.GELU(), down=down))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    def __init__(self, dim: int, layers: int, heads: int, context: int):
        super().__init__()
        self.embed = nn.Embedding(BYTES, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads, context) for _ in range(layers)))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.output = nn.Linear(dim, BYTES, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:  # layers that add to the residual stream have smaller initial weights, as in GPT-2
                residual = name.endswith(("wo.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the log-probabilities of the next byte at each position."""
        return self.output(self.norm(self.blocks(self.embed(tokens)))).log_softmax(-1)


# ---- parallelism


def tensor_parallel(model: Transformer, mesh: DeviceMesh) -> None:
    """Split heads and hidden units over the mesh; between them, activations are split along the sequence."""
    sequence, whole = Shard(1), Replicate()
    plan = {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=sequence),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=sequence, output_layouts=whole),
    }
    block_plan = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=sequence, desired_input_layouts=whole),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=sequence),
        "mlp_norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=sequence, desired_input_layouts=whole),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=sequence),
    }
    parallelize_module(model, mesh, plan)
    for block in model.blocks:
        parallelize_module(block, mesh, block_plan)


def parallelize(model: Transformer, parallel: str, mesh: DeviceMesh | None) -> nn.Module:
    if mesh is None:
        return model
    if parallel == "ddp":
        return DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    if "tp" in parallel:
        tensor_parallel(model, mesh["tp"])
    if "fsdp" in parallel:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


# ---- data


def load_corpus() -> tuple[Tensor, Tensor]:
    """Return the bytes of torch's .py files: (train, held-out). A hash of the path holds out one file in twenty."""
    root = Path(torch.__file__).parent
    train, heldout = bytearray(), bytearray()
    for name in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        split = heldout if zlib.crc32(name.encode()) % 20 == 0 else train
        split += (root / name).read_bytes()
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(heldout, dtype=torch.uint8)


@dataclass
class Data:
    """Windows of text. Every rank draws the same global batch and keeps its data-parallel slice of it."""

    context: int
    batch: int
    seed: int
    dp_rank: int
    dp_size: int
    device: torch.device

    def __post_init__(self) -> None:
        self.train, self.heldout = load_corpus()
        self.rng = torch.Generator().manual_seed(self.seed)

    def windows(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        mine = starts.chunk(self.dp_size)[self.dp_rank]
        tokens = text[mine[:, None] + torch.arange(self.context + 1)].to(self.device, torch.long)
        return tokens[:, :-1], tokens[:, 1:]

    def next_batch(self) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.train) - self.context, (self.batch,), generator=self.rng)
        return self.windows(self.train, starts)

    def heldout_batches(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Return evenly spaced windows of the held-out text, the same in each call."""
        starts = torch.linspace(0, len(self.heldout) - self.context - 1, count * self.batch, dtype=torch.float64)
        return (self.windows(self.heldout, chunk) for chunk in starts.long().split(self.batch))


# ---- training


@dataclass
class Trainer:
    """The state of the training, as a Stateful for torch.distributed.checkpoint."""

    args: argparse.Namespace
    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: Data
    mesh: DeviceMesh | None
    step: int = 0
    train_losses: list[float] = field(default_factory=list)
    heldout_losses: list[list[float]] = field(default_factory=list)  # [step, loss]

    def state_dict(self) -> dict[str, Any]:
        # Parameter names and DTensors do not depend on the parallelism, so another mode can load the checkpoint.
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "step": self.step,
            "data_rng": self.data.rng.get_state(),
            "train_losses": self.train_losses,
            "heldout_losses": self.heldout_losses,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        loaded = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **loaded)
        self.data.rng.set_state(state["data_rng"])
        self.step, self.train_losses = state["step"], state["train_losses"]
        self.heldout_losses = state["heldout_losses"]

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.nll_loss(self.model(tokens).flatten(0, 1), targets.flatten())

    def global_mean(self, loss: Tensor) -> float:
        """Return the loss of the global batch: the mean over ranks, since their slices have equal size."""
        loss = loss.detach().clone()
        if self.mesh is not None:
            dist.all_reduce(loss, group=self.mesh.get_group("dp"))
        return loss.item() / self.data.dp_size

    def train_step(self) -> float:
        # After the warm-up, the learning rate falls with the square root of the step. Unlike a cosine schedule it does
        # not depend on --steps: a run resumed with more steps equals one that had them from the start.
        scale = min((self.step + 1) / self.args.warmup, math.sqrt(self.args.warmup / (self.step + 1)))
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.lr * scale
        loss = self.loss(*self.data.next_batch())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return self.global_mean(loss)

    @torch.no_grad()
    def evaluate(self) -> float:
        losses = [self.loss(*batch) for batch in self.data.heldout_batches(self.args.eval_batches)]
        return self.global_mean(torch.stack(losses).mean())

    def train(self) -> float:
        """Train to the last step and return the bytes of text per second, without checkpoints and evaluation."""
        args, seconds, speed, first_step = self.args, 0.0, 0.0, self.step
        steps = range(self.step, args.steps)
        with tqdm(steps, args.parallel, args.steps, initial=self.step, unit="step", disable=RANK != 0) as progress:
            for _ in progress:
                start = time.perf_counter()
                self.train_losses.append(self.train_step())
                seconds += time.perf_counter() - start
                speed = (self.step - first_step) * args.batch * args.context / seconds
                if self.step % args.eval_every == 0 or self.step == args.steps:
                    self.heldout_losses.append([self.step, self.evaluate()])
                if self.step % args.checkpoint_every == 0 or self.step == args.steps:
                    save_checkpoint(self)
                heldout = f" held-out {self.heldout_losses[-1][1]:.3f}" if self.heldout_losses else ""
                note = f"loss {self.train_losses[-1]:.3f}{heldout} {speed:,.0f} tokens/s"
                progress.set_postfix_str(note, refresh=False)
        if not self.heldout_losses:  # no step was left to train, and the checkpoint has no evaluation
            self.heldout_losses.append([self.step, self.evaluate()])
        return speed

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int) -> str:
        """Return sampled text. All ranks must call it, since a sharded forward is collective. All get the same text."""
        rng = torch.Generator().manual_seed(self.args.seed)
        text = list(prompt)
        for _ in range(count):
            window = text[-self.args.context :]
            # Pad to a full window, as in training. Attention is causal, so the padding has no effect on the text.
            padded = window + [0] * (self.args.context - len(window))
            scores = self.model(torch.tensor([padded], device=self.data.device))[0, len(window) - 1].cpu()
            text.append(int(torch.multinomial((scores / 0.8).softmax(-1), 1, generator=rng)))
        return bytes(text).decode(errors="replace")


# ---- checkpoints: folders OUT/checkpoints/step-N, written by torch.distributed.checkpoint


def newest_checkpoint(out: Path) -> Path | None:
    found = [path for path in out.glob("checkpoints/step-*") if re.fullmatch(r"step-\d+", path.name)]
    return max(found, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def save_checkpoint(trainer: Trainer) -> None:
    """Write step-N.tmp and rename it after all ranks have written. A killed run leaves no incomplete step-N.

    No barrier is needed: dcp.save starts writing after rank 0 has made the plan, and returns on rank 0 after every
    rank has written and synced its part.
    """
    final = trainer.args.out / "checkpoints" / f"step-{trainer.step}"
    partial = final.with_suffix(".tmp")
    if RANK == 0:
        shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed while it saved
        partial.parent.mkdir(parents=True, exist_ok=True)
    dcp.save({"trainer": trainer}, checkpoint_id=partial)
    if RANK == 0:
        partial.rename(final)


def set_aside_old_checkpoints(out: Path) -> None:
    """Move the checkpoints of an older run to checkpoints.previous, where `newest_checkpoint` does not find them."""
    if RANK == 0 and newest_checkpoint(out):
        shutil.rmtree(out / "checkpoints.previous", ignore_errors=True)
        (out / "checkpoints").rename(out / "checkpoints.previous")


# ---- report


def plot_losses(trainer: Trainer, path: Path) -> None:
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # suppresses a message about the font cache
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    train = trainer.train_losses
    axes.plot(range(1, len(train) + 1), train, color="#9ecae1", linewidth=1, label="train, each step")
    if trainer.heldout_losses:
        steps, losses = zip(*trainer.heldout_losses, strict=True)
        axes.plot(steps, losses, "o-", color="#d6541b", markersize=4, label="held-out files")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", ylim=(0, None))
    axes.set_title(f"Byte-level transformer on torch's sources: {trainer.args.parallel}, world size {WORLD_SIZE}")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def report(trainer: Trainer, speed: float) -> None:
    args = trainer.args
    sample = trainer.generate(b"import torch\n\n\nclass ", args.sample)
    if RANK != 0:
        return
    args.out.mkdir(parents=True, exist_ok=True)
    plot_losses(trainer, args.out / "loss.png")
    losses = {"train": trainer.train_losses, "heldout": trainer.heldout_losses}
    if args.losses_json:
        args.losses_json.write_text(json.dumps(losses | {"parallel": args.parallel, "world_size": WORLD_SIZE}))
    heldout = trainer.heldout_losses[-1][1]
    print(f"\nsample:\n{sample}\n")
    print(f"train loss {trainer.train_losses[-1]:.4f}, held-out loss {heldout:.4f} nats per byte", end=" ")
    pace = f", {speed:,.0f} tokens/s" if speed else ""  # 0 if no step was left to train
    print(f"({heldout / math.log(2):.2f} bits) after {trainer.step} steps{pace}")
    print(f"loss curve {args.out}/loss.png, checkpoint {newest_checkpoint(args.out)}")


# ---- start and end


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parallel", choices=("none", "ddp", "fsdp", "tp", "fsdp+tp"), default="ddp")
    add("--tp-size", type=int, default=2, help="ranks that share one copy of the model under fsdp+tp (default 2)")
    add("--backend", default="monarch", help="process group backend (default monarch)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if each local rank gets a GPU")
    add("--out", type=Path, default=Path("build/train_lm"), help="folder of checkpoints and loss.png; all hosts see it")
    add("--losses-json", type=Path, help="also write the loss of every step to this file")
    add("--resume", action="store_true", help="continue from the newest checkpoint in --out")
    add("--steps", type=int, default=300, help="last step, counted from the start of training, also with --resume")
    add("--batch", type=int, default=16, help="global batch: windows per step over all ranks")
    add("--context", type=int, default=128, help="bytes per window")
    add("--dim", type=int, default=128)
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--lr", type=float, default=3e-3)
    add("--warmup", type=int, default=30, help="steps")
    add("--eval-every", type=int, default=50, help="steps")
    add("--eval-batches", type=int, default=4)
    add("--checkpoint-every", type=int, default=100, help="steps")
    add("--sample", type=int, default=160, help="bytes of sample text at the end")
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    args.tp_size = {"tp": WORLD_SIZE, "fsdp+tp": args.tp_size}.get(args.parallel, 1)
    if problem := find_problem(args):
        # All ranks find the same problem. Rank 0 prints it.
        parser.exit(2, f"{parser.prog}: error: {problem}\n" if RANK == 0 else None)
    return args


def find_problem(args: argparse.Namespace) -> str | None:
    tp = args.tp_size
    for name, value in vars(args).items():
        if type(value) is int and value < 1 and name != "seed":
            return f"--{name.replace('_', '-')} must be at least 1"
    if args.parallel == "none" and WORLD_SIZE > 1:
        return f"--parallel none is one process, and torchrun started {WORLD_SIZE}: pick ddp, fsdp, tp or fsdp+tp"
    if args.parallel != "none" and "RANK" not in os.environ:
        return f"start --parallel {args.parallel} with: torchrun --standalone --nproc-per-node=2 {sys.argv[0]} ..."
    if WORLD_SIZE % tp:
        return f"world size {WORLD_SIZE} is not divisible by --tp-size {tp}: change --tp-size or --nproc-per-node"
    if args.dim % (2 * args.heads):
        return f"--dim {args.dim} must be a multiple of twice --heads {args.heads}: RoPE rotates pairs in each head"
    if args.heads % tp:
        return f"--heads {args.heads} is not divisible by the tensor-parallel size {tp}: each rank takes whole heads"
    if args.context % tp:
        return f"--context {args.context} is not divisible by the tensor-parallel size {tp}: it is split along it"
    if args.batch % (WORLD_SIZE // tp):
        return f"--batch {args.batch}, the global batch, is not divisible by {WORLD_SIZE // tp} data-parallel ranks"
    if args.device == "cuda" and torch.cuda.device_count() < LOCAL_WORLD_SIZE:
        return f"--device cuda: {torch.cuda.device_count()} GPUs for {LOCAL_WORLD_SIZE} local ranks; use --device cpu"
    if args.resume and newest_checkpoint(args.out) is None:
        return f"--resume: no complete checkpoint in {args.out}/checkpoints; start without --resume or change --out"
    return None


def pick_device(choice: str) -> torch.device:
    if choice == "cpu" or torch.cuda.device_count() < LOCAL_WORLD_SIZE:
        # torchrun sets OMP_NUM_THREADS=1, and without torchrun torch uses all cores. Divide the cores by local ranks.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // LOCAL_WORLD_SIZE))
        return torch.device("cpu")
    torch.cuda.set_device(LOCAL_RANK)
    return torch.device("cuda", LOCAL_RANK)


@contextmanager
def device_mesh(args: argparse.Namespace, device: torch.device) -> Iterator[DeviceMesh | None]:
    """Yield a (data-parallel, tensor-parallel) mesh over all ranks, or None with --parallel none."""
    if args.parallel == "none":
        # dcp warns that it saves in a single process. With --parallel none that is intended.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield None
        return
    dist.init_process_group(args.backend)
    try:
        shape = (WORLD_SIZE // args.tp_size, args.tp_size)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))
        if min(shape) > 1:
            mesh._flatten()  # lets DTensor sum the gradient norm over both dimensions at once
        yield mesh
    finally:
        dist.destroy_process_group()


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    device = pick_device(args.device)
    with device_mesh(args, device) as mesh:
        torch.manual_seed(args.seed)
        # Initialize on the CPU and before sharding, so that all ranks start from the same weights in every mode.
        whole = Transformer(args.dim, args.layers, args.heads, args.context).to(device)
        model = parallelize(whole, args.parallel, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
        dp_rank, dp_size = (mesh.get_local_rank("dp"), mesh["dp"].size()) if mesh else (0, 1)
        data = Data(args.context, args.batch, args.seed, dp_rank, dp_size, device)
        trainer = Trainer(args, model, optimizer, data, mesh)
        if args.resume:
            dcp.load({"trainer": trainer}, checkpoint_id=newest_checkpoint(args.out))
        else:
            set_aside_old_checkpoints(args.out)
        speed = trainer.train()
        report(trainer, speed)


if __name__ == "__main__":
    main()
