"""Weights from trainers to generators after every step, between meshes that shard them in different ways.

    python examples/weight_sync.py                                4 trainers, 3 generators
    python examples/weight_sync.py --generators 2 --width 768     58 MB for each sync
    python examples/weight_sync.py --steps 150 --unchecked        no comparison, so that it learns more in less time

This is what reinforcement learning with large models does all day. Four trainers have a small transformer under FSDP2
and tensor parallelism, on a mesh of data x tensor = 2 x 2; the generators have it under tensor parallelism alone, on
as many ranks as one asks for. So what a generator needs of a weight lies on several trainers, in pieces.

The trainers register their state dict once. After each step of the optimizer every generator reads its own part of
every weight, and nothing else, from the memory of the trainers that have it; those do nothing for it. Then it runs the
model with the new weights, while the trainers are at their next step. The text that they learn is the Zen of Python.

What it shows: ordinary torch code in actors; `ShardedState.register` and `merge`, and a `plan` that is made once and
read in every step; the order that a user gives (a step, then the reads, then the next step), which nobody checks.
Every sync is compared with the trainers' `full_tensor()`, bit by bit.
"""

import argparse
import contextlib
import io
import logging
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from monarch_backend.actor import Actor, ActorMesh, endpoint, this_host
from monarch_backend.rdma import ShardedState, StatePart

WINDOW, LETTERS, HEAD = 64, 128, 16  # HEAD: numbers of an attention head


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.norm1(x)
        # -1: as many heads as this rank has
        q, k, v = (layer(seen).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, width: int, layers: int):
        super().__init__()
        torch.manual_seed(0)
        self.letter, self.place = nn.Embedding(LETTERS, width), nn.Embedding(WINDOW, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, LETTERS)

    def forward(self, text: Tensor) -> Tensor:
        x = self.letter(text) + self.place.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).log_softmax(-1)


def tensor_parallel(model: Transformer, mesh: DeviceMesh) -> None:
    split = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    joined = {name: RowwiseParallel() for name in ("out", "down")}
    for block in model.blocks:
        parallelize_module(block, mesh, {**split, **joined})
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


def zen() -> Tensor:
    """The text, a letter each."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        import this  # noqa: F401
    return torch.tensor([ord(letter) for letter in said.getvalue()])


class Sync(NamedTuple):
    nbytes: int
    seconds: float
    owners: list[int]  # ranks of trainers


# ---- the actors


class Trainer(Actor):
    def __init__(self, width: int, layers: int, lr: float):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        self.model = Transformer(width, layers)
        tensor_parallel(self.model, mesh["tensor"])
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(self.model, mesh=mesh["data"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.rng = torch.Generator().manual_seed(mesh.get_local_rank("data"))
        self.text, self.leader = zen(), mesh.get_rank() == 0

    @endpoint
    def offer(self) -> StatePart:
        return ShardedState.register(self.model.state_dict())

    @endpoint
    def step(self) -> float:
        starts = torch.randint(len(self.text) - WINDOW, (8,), generator=self.rng)
        batch = torch.stack([self.text[start : start + WINDOW + 1] for start in starts])
        loss = F.nll_loss(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()  # in place: what was offered is still where it was
        self.optimizer.zero_grad()
        return loss.item()

    @endpoint
    def whole(self) -> dict[str, Tensor] | None:
        """All weights, unsharded; for comparison only."""
        # It tells that more than one collective is needed. A `ShardedState` needs none.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        state = {name: value.full_tensor() for name, value in self.model.state_dict().items()}
        return state if self.leader else None


class Generator(Actor):
    def __init__(self, ranks: int, width: int, layers: int):
        self.model = Transformer(width, layers).requires_grad_(False)
        tensor_parallel(self.model, init_device_mesh("cpu", (ranks,)))
        self.text = zen()

    @endpoint
    def connect(self, state: ShardedState) -> str:
        self.plan = state.plan(self.model.state_dict())
        return repr(self.plan)

    @endpoint
    def sync(self) -> Sync:
        start = time.perf_counter()
        self.plan.read(timeout=60).get()
        return Sync(self.plan.nbytes, time.perf_counter() - start, list(self.plan.bytes_by_rank))

    @endpoint
    def compare(self, whole: dict[str, Tensor]) -> int:
        """Weights of which this rank's part is not that of the whole, bit by bit."""
        return sum(not same_bits(value, whole[name]) for name, value in self.model.state_dict().items())

    @endpoint
    @torch.no_grad()
    def known(self) -> float:
        """How many of the letters of the text it foretells from those before them."""
        rows = self.text[: len(self.text) // WINDOW * WINDOW].view(-1, WINDOW)
        guess = self.model(rows)[:, :-1].argmax(-1)
        return (guess == rows[:, 1:]).float().mean().item()

    @endpoint
    @torch.no_grad()
    def recite(self, begin: str) -> str:
        text = [ord(letter) for letter in begin]
        while len(text) < WINDOW:
            text.append(int(self.model(torch.tensor([text]))[0, -1].argmax()))
        return "".join(map(chr, text))


def same_bits(mine: Tensor, whole: Tensor) -> bool:
    if isinstance(mine, DTensor):
        # every rank has the whole: each takes its part, and nothing is sent
        whole = distribute_tensor(whole, mine.device_mesh, mine.placements, src_data_rank=None).to_local()
        mine = mine.to_local()
    return torch.equal(mine.contiguous().view(torch.int32), whole.contiguous().view(torch.int32))


# ---- the program


def connect(trainers: ActorMesh, generators: ActorMesh) -> None:
    """Once: what each trainer has, merged, to all generators."""
    state = ShardedState.merge(trainers.offer.call().get())
    print(state)
    for point, plan in generators.connect.call(state).get():
        print(f"generator {point.rank}: {plan}")


def sync(generators: ActorMesh) -> Sync:
    """All generators at the same time; the bytes of all, and the time of the slowest."""
    done = list(generators.sync.call().get().values())
    owners = sorted({rank for one in done for rank in one.owners})
    return Sync(sum(one.nbytes for one in done), max(one.seconds for one in done), owners)


def compare(trainers: ActorMesh, generators: ActorMesh) -> int:
    whole = next(state for state in trainers.whole.call().get().values() if state is not None)
    return sum(generators.compare.call(whole).get().values())


def train(trainers: ActorMesh, generators: ActorMesh, steps: int, checked: bool) -> list[Sync]:
    syncs, known = [], None
    for step in range(1, steps + 1):
        loss = next(iter(trainers.step.call().get().values()))
        if known is not None:
            print(f"   {known.get().item(tensor=0):.0%} of the text is known", flush=True)
        # Between two steps: nobody writes to the weights while they are read.
        syncs.append(sync(generators))
        done = syncs[-1]
        pace = f"{done.nbytes / 1e6:.1f} MB in {done.seconds * 1e3:.1f} ms, {done.nbytes / done.seconds / 1e9:.2f} GB/s"
        if checked and (wrong := compare(trainers, generators)):
            raise SystemExit(f"step {step}: {wrong} weights are not those of the trainers")
        print(f"step {step:3}  loss {loss:.3f}  {pace}{', the same bits' if checked else ''}", end="", flush=True)
        known = generators.known.call()  # and meanwhile the trainers go on
    if known is not None:
        print(f"   {known.get().item(tensor=0):.0%} of the text is known")
    return syncs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generators", type=int, default=3, help="ranks that the generators' model is split over")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=192, help="of the model, a multiple of 96 for 3 generators")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--unchecked", action="store_true", help="do not compare the weights after each sync")
    args = parser.parse_args()

    with (
        this_host().spawn_procs({"data": 2, "tensor": 2}) as training,
        this_host().spawn_procs({"tensor": args.generators}) as generating,
    ):
        for procs in (training, generating):
            procs.process_group().get()  # each is a world of torch.distributed
        trainers = training.spawn("trainers", Trainer, args.width, args.layers, args.lr)
        generators = generating.spawn("generators", Generator, args.generators, args.width, args.layers)
        connect(trainers, generators)
        syncs = train(trainers, generators, args.steps, not args.unchecked)
        print("they say:", generators.recite.call("Beautiful is").get().item(tensor=0).replace("\n", " / "))
    nbytes, seconds = sum(one.nbytes for one in syncs), sum(one.seconds for one in syncs)
    print(f"{len(syncs)} syncs: {nbytes / 1e6:.1f} MB in {seconds:.3f} s, {nbytes / seconds / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
