"""Random models and training loops from a seed, as source text that one process and DTensors both run.

A model is a list of layers for batches of [rows, places, width], or of words. Its optimizer and the parts of a step
are chosen too. Values are float64, so that only wrong results differ.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

ROWS, PLACES = 12, 6
WIDTHS = (4, 5, 6, 8, 12)


class Net(nn.Sequential):
    """A sequence with a forward method outside torch's files, because dynamo does not trace methods in those."""

    def forward(self, x: Any) -> Any:
        for each in self:
            x = each(x)
        return x


class Residual(Net):
    """Adds the input to the output of the layers."""

    def forward(self, x: Any) -> Any:
        return x + super().forward(x)


class Again(Net):
    """Recomputes its activations in backward."""

    def forward(self, x: Any) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


class Across(Net):
    """Transposes batches for a layer that takes channels before places."""

    def forward(self, x: Any) -> Any:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Attention(nn.Module):
    """Attention between places. Keys have no bias, because its gradients would be zero except for rounding errors."""

    def __init__(self, width: int, heads: int, *, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.v, self.out = (nn.Linear(width, width) for _ in range(3))
        self.k = nn.Linear(width, width, bias=False)

    def forward(self, x: Any) -> Any:
        q, k, v = (each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """Feed-forward layer: the product of two linear layers, one of them activated, goes into a third."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Any) -> Any:
        return self.c(F.silu(self.a(x)) * self.b(x))


class Scaled(nn.Module):
    """Has parameters outside any submodule, and buffers that each training step changes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.bias = nn.Parameter(torch.zeros(1))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Any) -> Any:
        if self.training:
            with torch.no_grad():
                self.steps += 1
                self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return x * self.scale + self.bias - self.mean.detach()


NAMES = {"nn": nn, **{each.__name__: each for each in (Residual, Again, Across, Attention, Gated, Scaled)}}

LAYERS = [
    "nn.ReLU()", "nn.GELU()", "nn.Tanh()", "nn.SiLU()", "nn.ELU()", "nn.Hardswish()", "nn.Softplus()", "nn.Identity()",
    "nn.PReLU()", "nn.Softmax(-1)", "Across(nn.PReLU({d}))", "nn.LayerNorm({d})", "nn.LayerNorm({d}, bias=False)",
    "nn.LayerNorm({d}, elementwise_affine=False)", "nn.RMSNorm({d})", "Across(nn.GroupNorm(1, {d}))",
    "nn.Linear({d}, {d})", "nn.Linear({d}, {d}, bias=False)", "Across(nn.Conv1d({d}, {d}, 3, padding=1))",
    "nn.utils.parametrizations.weight_norm(nn.Linear({d}, {d}))", "Attention({d}, {h})",
    "Attention({d}, 1, causal=False)", "Gated({d}, {e})",
]  # fmt: skip
OF_A_WHOLE_BATCH = [
    "Across(nn.BatchNorm1d({d}))", "Across(nn.InstanceNorm1d({d}))", "Scaled({d})", "nn.Dropout(0.3)",
    "nn.Dropout(0.5)", "nn.Dropout1d(0.4)", "nn.AlphaDropout(0.2)",
]  # fmt: skip
# No optimizer that uses mainly the signs of gradients, because some gradients are zero except for rounding errors.
OPTIMIZERS = [
    "SGD({p}, lr=0.1)", "SGD({p}, lr=0.1, momentum=0.9)",
    "SGD({p}, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)",
    "SGD({p}, lr=0.1, momentum=0.5, dampening=0.2, maximize=True)", "Adam({p}, lr=0.01)", "AdamW({p}, lr=0.01)",
    "Adam({p}, lr=0.01, amsgrad=True)", "AdamW({p}, lr=torch.tensor(0.01))", "RMSprop({p}, lr=0.01)",
    "RMSprop({p}, lr=0.01, centered=True, momentum=0.9)", "Adagrad({p}, lr=0.05)", "Adadelta({p})",
    "Adamax({p}, lr=0.01)", "NAdam({p}, lr=0.01)", "RAdam({p}, lr=0.01)", "ASGD({p}, lr=0.05)",
    "AdamW([{{'params': {p}[:1], 'weight_decay': 0.1}}, {{'params': {p}[1:], 'lr': 0.02}}], lr=0.01)",
]  # fmt: skip
FUSED = ("SGD(", "Adam(", "AdamW(", "Adagrad(")
SCHEDULES = [
    "", "", "StepLR({o}, 1, 0.5)", "CosineAnnealingLR({o}, 5)", "LambdaLR({o}, lambda step: 1 / (1 + step))",
    "OneCycleLR({o}, 0.1, total_steps=10, cycle_momentum=False)",
]  # fmt: skip
CLIPS = [None, None, {"norm_type": 2.0}, {"norm_type": 1.0, "foreach": True}, {"norm_type": float("inf")}, "values"]


@dataclass
class Training:
    """A training. ``words``: size of the vocabulary, or 0 if batches are numbers.

    ``parts``: number of batches per step, with gradients that add up. ``passing``: the object that is copied or
    reloaded after the second step. ``frozen``: index of a parameter that is not trained.
    """

    seed: int
    width: int
    words: int
    layers: list[str]
    last: int
    is_tied: bool
    kind: str
    optimizer: str
    schedule: str
    clip: Any
    parts: int
    to_none: bool
    frozen: int | None
    passing: str

    def model(self) -> Net:
        """Return a new model, with the same parameters each time."""
        torch.manual_seed(self.seed)
        net = Net(*(eval(each, dict(NAMES)) for each in self.layers)).double()
        if self.is_tied:
            net[-1].weight = net[0].weight
        parameters = list(net.parameters())
        if self.frozen is not None and len(parameters) > 1:
            parameters[self.frozen % len(parameters)].requires_grad_(False)
        return net

    def batch(self, number: int) -> list[torch.Tensor]:
        """Return inputs and targets."""
        drawn: dict[str, Any] = {"generator": torch.Generator().manual_seed(100 + number)}
        numbers = {"dtype": torch.float64, **drawn}
        where = (ROWS, PLACES)
        x = torch.randint(0, self.words, where, **drawn) if self.words else torch.randn(*where, self.width, **numbers)
        if self.kind == "cross_entropy":
            return [x, torch.randint(0, self.last, where, **drawn)]
        return [x, torch.randn(*where, self.last, **numbers)]

    def loss(self, net: Any, x: Any, y: Any) -> Any:
        """Return the mean over all places."""
        out = net(x)
        if self.kind == "cross_entropy":
            return F.cross_entropy(out.flatten(0, 1), y.flatten())
        return F.mse_loss(out, y) if self.kind == "mse" else out.square().mean()

    def optimized(self, parameters: list[Any]) -> tuple[Any, Any]:
        """Return the optimizer, and its schedule or None."""
        optimizer = eval(f"torch.optim.{self.optimizer.format(p='p')}", {"torch": torch, "p": parameters})
        if not self.schedule:
            return optimizer, None
        made = f"torch.optim.lr_scheduler.{self.schedule.format(o='o')}"
        return optimizer, eval(made, {"torch": torch, "o": optimizer})

    def clipped(self, parameters: list[Any]) -> Any:
        """Clip the gradients as the training does, and return their norm before that."""
        if self.clip == "values":
            nn.utils.clip_grad_value_(parameters, 0.01)
        elif self.clip is not None:
            return nn.utils.clip_grad_norm_(parameters, 0.05, **self.clip)
        return None


def write(seed: int, *, is_whole: bool) -> Training:
    """Choose a training. ``is_whole``: also with layers that need the whole batch."""
    r = random.Random(seed)
    width, words = r.choice(WIDTHS), r.choice((0, 0, 7, 12))
    layers, d = _layers(r, width, LAYERS + (OF_A_WHOLE_BATCH if is_whole else []))
    is_tied = bool(words) and r.random() < 0.3
    if words:
        options = r.choice(["", ", padding_idx=1", ", max_norm=0.5" if r.random() < 0.1 else ""])
        layers.insert(0, f"nn.Embedding({words}, {width}{options})")
    if is_tied and d != width:
        layers.append(f"nn.Linear({d}, {width})")
    last = words if is_tied else r.choice((3, 4, 5, 8))
    bias = ", bias=False" if is_tied or r.random() < 0.5 else ""
    layers.append(f"nn.Linear({width if is_tied else d}, {last}{bias})")
    optimizer = r.choice(OPTIMIZERS)
    learns_by_a_tensor = "torch.tensor" in optimizer  # torch has no foreach for a rate that is a tensor
    how = r.choice(["", "", ", foreach=True", ", foreach=False", ", fused=True"])
    if (how == ", fused=True" and not optimizer.startswith(FUSED)) or learns_by_a_tensor:
        how = ", foreach=False" if learns_by_a_tensor else ""
    return Training(
        seed, width, words, layers, last, is_tied,
        kind=r.choice(["cross_entropy", "mse", "square"]), optimizer=f"{optimizer[:-1]}{how})",
        schedule="" if learns_by_a_tensor else r.choice(SCHEDULES), clip=r.choice(CLIPS), parts=r.choice((1, 1, 2)),
        to_none=r.random() < 0.7, frozen=r.randrange(20) if r.random() < 0.2 else None,
        passing=r.choice(["", "", "", "deepcopy", "state", "optimizer"]),
    )  # fmt: skip


def _layers(r: random.Random, width: int, kinds: list[str]) -> tuple[list[str], int]:
    """Return some layers, and the width of their output."""
    layers: list[str] = []

    def one() -> str:
        heads = r.choice([each for each in (1, 2, 3, 4) if width % each == 0])
        return r.choice(kinds).format(d=width, e=r.choice((3, 6, 7, 8)), h=heads)

    for _ in range(r.randint(1, 5)):
        form = r.choice(["{}", "{}", "{}", "Residual({})", "Residual({})", "Again({})", "wider"])
        if form == "wider":
            before, width = width, r.choice(WIDTHS)
            layers.append(f"nn.Linear({before}, {width})")
        else:
            layers.append(form.format(", ".join(one() for _ in range(1 if form == "{}" else r.randint(1, 3)))))
    return layers, width
