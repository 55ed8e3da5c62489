"""Random programs of tensor operations from a seed, as source text that one process and DTensors both run.

A program is a list of statements on named tensors. Each statement is tried on host tensors when it is chosen, and
kept if torch accepts it there. `place` redistributes a DTensor and returns any other tensor unchanged.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard

SIZES = (1, 2, 3, 4, 4, 5, 6, 8)

DRAWS = ("dropout", "rand", "uniform_", "bernoulli", "normal_", "exponential_")
"""Results of statements with one of these are returned. A captured step drops unused statements, and their draws."""


def place(tensor: Any, *placements: Any) -> Any:
    """Redistribute a DTensor to the first of these placements, one for each mesh dimension."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.redistribute(placements=placements[: tensor.device_mesh.ndim])


NAMES = {"torch": torch, "F": F, "place": place, "Shard": Shard, "Replicate": Replicate}


@dataclass
class Program:
    """A program. ``inputs``: their shapes; ``statements``: lines that name their results; ``results``: returned names.

    ``hosts``, ``constants``: shapes of tensors that stay on the host. Hosts are arguments, constants are globals.
    """

    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    hosts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    constants: dict[str, tuple[int, ...]] = field(default_factory=dict)
    statements: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)

    def text(self) -> str:
        lines = [*self.statements, f"return [{', '.join(self.results)}]"]
        return f"def program({', '.join([*self.inputs, *self.hosts])}):\n" + "".join(f"    {line}\n" for line in lines)

    def function(self) -> Callable[..., Any]:
        """Return the program as a Python function."""
        names = {**NAMES, **self.tensors("constants")}
        exec(self.text(), names)
        return names["program"]

    def tensors(self, kind: str) -> dict[str, torch.Tensor]:
        """Return the ``inputs``, ``hosts`` or ``constants`` as host tensors, with the same values each time."""
        drawn = torch.Generator().manual_seed(len(kind))
        return {name: torch.randn(shape, generator=drawn) for name, shape in getattr(self, kind).items()}


class Writer:
    """Writes one program. ``holds`` is called with each statement, and drops it by returning False."""

    def __init__(self, seed: int, ndim: int, length: int, holds: Callable[[str], bool] = lambda _: True) -> None:
        self.random, self.ndim, self.length, self.holds = random.Random(seed), ndim, length, holds
        self.program = Program()
        self.here: dict[str, Any] = dict(NAMES)
        self.floats: list[str] = []
        self.hosts: list[str] = []

    def write(self) -> Program:
        for name in "abc"[: self.random.randint(1, 3)]:
            shape = tuple(self.random.choice(SIZES) for _ in range(self.random.randint(1, 3)))
            if self.floats and self.random.random() < 0.6:
                shape = self.program.inputs[self.random.choice(self.floats)]
            self.program.inputs[name] = shape
            self.here[name] = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
            self.floats.append(name)
        for name, kind in (("h", self.program.hosts), ("k", self.program.constants)):
            if self.random.random() < 0.5:
                kind[name] = self._host_shape()
                self.hosts.append(name)
        self.here.update({**self.program.tensors("hosts"), **self.program.tensors("constants")})
        tries = 0
        while len(self.program.statements) < self.length and tries < self.length * 10:
            tries += 1
            self._add(f"x{len(self.program.statements)}")
        made = [each for each in self.floats if each not in self.program.inputs]
        drawn = [line.split(" = ")[0] for line in self.program.statements if any(word in line for word in DRAWS)]
        last = (made or self.floats)[-3:]
        self.program.results = [*(name for name in made if name in drawn and name not in last), *last]
        return self.program

    def _add(self, name: str) -> None:
        line = self.random.choice(STATEMENTS)(self, name)
        before = dict(self.here)
        try:
            exec(line, self.here)
            made = self.here[name]
            fits = isinstance(made, torch.Tensor) and made.dtype == torch.float32 and 0 < made.numel() <= 4096
            fits = fits and bool(torch.isfinite(made).all()) and made.ndim <= 4 and bool(made.abs().max() < 1e4)
        except (RuntimeError, IndexError, ValueError, TypeError):
            fits = False
        if not fits or not self.holds(line):
            self.here = before
            return
        self.program.statements.append(line)
        self.floats.append(name)

    def _host_shape(self) -> tuple[int, ...]:
        """Return a shape that broadcasts with an input."""
        shape = self.program.inputs[self.random.choice(self.floats)]
        part = shape[self.random.randint(0, len(shape)) :] if self.random.random() < 0.4 else shape
        return tuple(1 if self.random.random() < 0.2 else size for size in part)

    # Parts of statements ------------------------------------------------------------------------------------------

    def tensor(self) -> str:
        return self.random.choice(self.floats[-4:] if self.random.random() < 0.7 else self.floats)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.here[name].shape)

    def dim(self, name: str) -> int:
        ndim = max(1, len(self.shape(name)))
        return self.random.randrange(-ndim, ndim)

    def like(self, name: str) -> str:
        """Return the name of a tensor that broadcasts with this one."""
        fitting = [each for each in self.floats if _broadcast(self.shape(each), self.shape(name))]
        return self.random.choice(fitting)

    def host(self, name: str) -> str:
        """Return the name of a host tensor that broadcasts with this one, or a number if there is none."""
        fitting = [each for each in self.hosts if _broadcast(self.shape(each), self.shape(name))]
        return self.random.choice(fitting) if fitting else "torch.tensor(0.5)"

    def placements(self, name: str) -> str:
        ndim = len(self.shape(name))
        kinds = [f"Shard({dim})" for dim in range(ndim)] + ["Replicate()"]
        return ", ".join(self.random.choice(kinds) for _ in range(self.ndim))

    def sizes(self, name: str) -> list[int]:
        """Return another shape with the same number of elements."""
        shape = list(self.shape(name))
        for _ in range(self.random.randint(1, 2)):
            if len(shape) > 1 and self.random.random() < 0.6:
                at = self.random.randrange(len(shape) - 1)
                shape[at : at + 2] = [shape[at] * shape[at + 1]]
            elif shape:
                at = self.random.randrange(len(shape))
                parts = [each for each in range(1, shape[at] + 1) if shape[at] % each == 0]
                part = self.random.choice(parts)
                shape[at : at + 1] = [part, shape[at] // part]
        return shape


def _broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    try:
        torch.broadcast_shapes(one, other)
    except RuntimeError:
        return False
    return True


Statement = Callable[[Writer, str], str]


def _of_one(text: str) -> Statement:
    """Return a statement that writes one of these expressions, which | separates.

    Code after a semicolon changes the expression's result, {name}.
    """
    forms = [f"{{name}} = {each.strip()}" for each in text.split("|")]

    def write(writer: Writer, name: str) -> str:
        x = writer.tensor()
        form, r = writer.random.choice(forms), writer.random
        size = (writer.shape(x) or (1,))[dim := writer.dim(x)]
        places = {
            "x": x, "d": dim, "e": writer.dim(x), "i": r.randrange(-size, size), "j": r.randint(1, max(1, size)),
            "s": writer.sizes(x), "n": r.randint(1, 3), "p": writer.placements(x), "y": writer.like(x),
            "h": writer.host(x),
            "k": [r.randrange(size) for _ in range(r.randint(1, 3))],
        }  # fmt: skip
        return form.format(name=name, **places)

    return write


def _matmul(writer: Writer, name: str) -> str:
    x, y = writer.tensor(), writer.tensor()
    return writer.random.choice([
        f"{name} = {x} @ {y}", f"{name} = {x} @ {y}.transpose(-1, -2)", f"{name} = {x}.transpose(-1, -2) @ {y}",
        f"{name} = {x} @ {x}.transpose(-1, -2)", f"{name} = F.linear({x}, {y})",
        f"{name} = torch.einsum('...i,...j->...ij', {x}, {y})", f"{name} = F.linear({x}, {y}, {y}[:, 0])",
    ])  # fmt: skip


STATEMENTS: list[Statement] = [
    _matmul,
    _of_one(
        """
        {x}.relu() | {x}.tanh() * 2 | -{x} | {x}.sigmoid() | {x}.abs() + 0.1 | {x} * 0.5 + 1 | 1 - {x} | {x} / 3 |
        F.gelu({x}) | {x}.clamp(-1, 1) | {x}.double().square().float() | ({x} > 0).float() * {x} |
        {x}.sin().cos() | {x}.masked_fill({x} > 0.5, 0.25) | torch.nan_to_num({x}) | {x}.detach() * {x}
        """
    ),
    _of_one(
        """
        {x} + {y} | {x} * {y} | {y} - {x} | torch.maximum({x}, {y}) | torch.where({x} > {y}, {x}, {y} * 2) |
        {x} / ({y}.abs() + 1) | torch.add({x}, {y}, alpha=2) | torch.addcmul({x}, {x}, {x}, value=0.5) |
        torch.lerp({x}, {x} * 2, 0.3)
        """
    ),
    _of_one(
        """
        {x}.sum() | {x}.sum({d}) | {x}.mean({d}, keepdim=True) | {x}.amax({d}) | {x}.mean() | {x}.max() |
        {x}.logsumexp({d}) | {x}.cumsum({d}) | torch.linalg.vector_norm({x} + 3, dim={d}) | ({x} + 3).norm() |
        {x}.argmax({d}).float() | {x}.max({d})[0] | {x}.sort({d})[0] | {x}.topk({j}, {d})[0] | {x}.prod({d}) |
        ({x} > 0).any({d}).float() | {x}.var({d}, unbiased=False) | {x}.std(unbiased=False) |
        {x}.min({d}, keepdim=True)[0] | {x}.sum(({d}, {e})) | {x}.argsort({d}).float() | {x}.aminmax(dim={d})[1] |
        {x}.cumprod({d}) | {x}.count_nonzero({d}).float()
        """
    ),
    _of_one(
        """
        {x}.view(-1) | {x}.reshape({s}) | {x}.reshape({s}) | {x}.flatten() | {x}.reshape(-1) |
        {x}.transpose({d}, {e}) | {x}.unsqueeze({d}) | {x}.squeeze() | {x}.squeeze({d}) | {x}.t() | {x}.mT |
        {x}.flatten(0, {d}) | {x}.unflatten({d}, (-1, {j})) | {x}.movedim({d}, {e}) |
        {x}.transpose({d}, {e}).contiguous() | {x}.view({s}) |
        {x}.unsqueeze({d}).expand(*[3 if n == 1 else n for n in {x}.unsqueeze({d}).shape])
        """
    ),
    _of_one(
        """
        {x}[1:] | {x}[{i}] | {x}[..., ::2] | {x}[:, None] | {x}.select({d}, {i}) | {x}.narrow({d}, 0, {j}) |
        {x}.split({j}, {d})[-1] | {x}.chunk(2, {d})[0] | {x}[{k}] | {x}.unbind({d})[{i}] | {x}[..., -1:] |
        {x}[:-1] | {x}[None, ..., 0] | {x}.index_select({d}, torch.tensor({k})) | {x}[:, {k}] | {x}.diagonal() |
        {x}.take_along_dim({x}.argsort({d}), {d}) | {x}.gather({d}, {x}.argsort({d})) | {x}[torch.tensor({k})]
        """
    ),
    _of_one(
        """
        torch.cat([{x}, {x} * 2], {d}) | torch.stack([{x}, {x} + 1], {d}) | {x}.repeat(2, *[1] * ({x}.ndim - 1)) |
        {x}.flip({d}) | {x}.roll(1, {d}) | F.pad({x}, (1, 0)) | {x}.tril() | {x}.triu(1) |
        torch.cat([{x}, {y}], {d}) | {x}.repeat_interleave(2, {d}) | F.pad({x}, (0, 1), value=2.0) |
        torch.zeros_like({x}) + {x} | {x}.new_ones({x}.shape) * {x} | torch.full_like({x}, 2.0) - {x} |
        {x}.new_zeros(3, 2) + 1 | F.one_hot({x}.argmax({d}), 9).float() | torch.ones_like({x}).cumsum({d}) * {x}
        """
    ),
    _of_one(
        """
        {x}.softmax({d}) | {x}.log_softmax({d}) | F.layer_norm({x}, {x}.shape[-1:]) |
        F.normalize({x} + 2, dim={d}) | F.mse_loss({x}, {y}) | F.rms_norm({x}, {x}.shape[-1:]) |
        F.smooth_l1_loss({x}, {x} * 2) | F.glu({x}, {d}) | F.softplus({x}) |
        F.scaled_dot_product_attention({x}, {x}, {x}) | F.group_norm({x}, 1)
        """
    ),
    _of_one(
        """
        F.dropout({x}, 0.4) | torch.rand_like({x}) + {x} | torch.randn_like({x}) * {x} |
        torch.empty_like({x}).uniform_(-1, 1) + {x} | {x} + torch.zeros_like({x}).bernoulli_(0.5) |
        torch.empty_like({x}).normal_() + {x} | torch.bernoulli({x}.sigmoid()) * {x} |
        torch.randint_like({x}, 5) + {x} | torch.zeros_like({x}).exponential_() + {x}
        """
    ),
    _of_one(
        """
        {x}.clone(); {name}.add_({x}) | {x}.clone(); {name}.mul_(0.5) | {x} * 1; {name}[1:] = 2.0 |
        {x}.clone(); {name}.copy_({y}) | {x} * 2; {name}.clamp_(0, 1) | {x}.clone(); {name}.zero_() |
        {x}.clone(); {name}.view(-1).add_(1) | {x}.clone(); {name}.relu_() | {x}.clone(); {name}[{i}] += 1 |
        {x}.clone(); {name}.masked_fill_({x} > 0, 0.5) | {x}.clone(); {name}.transpose({d}, {e}).mul_(3) |
        {x}.clone(); {name} += {y} | {x}.clone(); {name}.fill_(0.5) |
        {x}.clone(); {name}.select({d}, {i}).fill_(3) | {x}.clone(); {name}.narrow({d}, 0, {j}).mul_(2) |
        {x}.clone(); {name}.sub_({y}, alpha=2) | {x} + 0; {name}.unsqueeze_({d}) | {x} + 0; {name}.t_() |
        {x} * 1; {name}[..., 0] = {x}[..., -1] | {x} + 0; {name}.index_fill_({d}, torch.tensor({k}), 1.0)
        """
    ),
    _of_one(
        """
        {x} + {h} | {h} * {x} | {h} - {x} | {x} / ({h}.abs() + 1) | torch.maximum({x}, {h}) | {x} * {h}.sum() |
        torch.where({h} > 0, {x}, 0.5) | torch.where({x} > 0, {x}, {h}) | {x}.masked_fill({h} > 0, 0.25) |
        {x}.clone(); {name}.add_({h}) | {x}.clone(); {name}.copy_({h}) | {x} * 1; {name} *= {h} |
        {x}.clone(); {name}[{h}.expand_as({x}) > 0] = 2.0 | torch.lerp({x}, {h}, 0.25) | F.mse_loss({x}, {h}) |
        torch.cat([{x}, {h}.expand_as({x})], {d}) | torch.stack([{h}.expand_as({x}), {x}], {d}) | {x} @ {h}.mT |
        F.linear({x}, {h}) | ({x} > {h}).float() | {x}.gather({d}, {h}.expand_as({x}).argsort({d})) |
        {h}.expand_as({x}).clone(); {name}.add_({x}.detach()) | {h}.expand_as({x}) * 1; {name} += {x}.detach() |
        {h} + 1 | torch.addcmul({x}, {h}, {x}, value=0.5) | F.layer_norm({x}, {h}.shape, {h}) |
        F.mse_loss({h}, {x}.detach())
        """
    ),
    _of_one(
        """
        place({x}, {p}) | place({x} * 2, {p}) + {x} | place({x}.sum({d}), Replicate(), Replicate())
        """
    ),
]
