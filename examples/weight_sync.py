"""Weights from trainers to generators after every step, between meshes that shard them in different ways.

    python examples/weight_sync.py                                4 trainers, 3 generators
    python examples/weight_sync.py --generators 2 --width 768     58 MB for each sync
    python examples/weight_sync.py --steps 150 --unchecked        faster: does not compare weights after each sync

Reinforcement learning with large models needs such a sync after every step. Four trainers have a small transformer
under FSDP2 and tensor parallelism, on a mesh of data x tensor = 2 x 2. The generators have it under tensor parallelism
only, on `--generators` ranks. So each generator's part of a weight is spread over several trainers.

The trainers register their state dict once. After each optimizer step every generator reads exactly its own part of
every weight from the trainers' memory. The trainers do not take part in the reads. Then the generators run the model
with the new weights while the trainers compute the next step. The training text is the Zen of Python.

The example shows:

- ordinary torch code in actors
- `ShardedState.register` and `merge`, and a `plan` that is made once and read after every step
- the order of steps and reads, which the program must ensure: the library does not detect a read during a step

Each sync is compared with the trainers' `full_tensor()`, bit by bit.
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

WINDOW, LETTERS, HEAD = 64, 128, 16  # HEAD: size of an attention head


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.norm1(x)
        # -1: the number of heads of this rank
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
    """Return the Zen of Python as character codes."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        import this  # noqa: F401
    return torch.tensor([ord(letter) for letter in said.getvalue()])


class Sync(NamedTuple):
    nbytes: int
    seconds: float
    owners: list[int]  # ranks of the trainers that were read from


# ---- actors


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
        self.optimizer.step()  # updates in place, so the registered addresses stay valid
        self.optimizer.zero_grad()
        return loss.item()

    @endpoint
    def whole(self) -> dict[str, Tensor] | None:
        """Return all weights unsharded, for the comparison."""
        # DTensor warns that full_tensor() needs more than one collective here. A `ShardedState` needs none.
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
        """Return the number of weights whose part on this rank differs in any bit from the trainers' weights."""
        return sum(not same_bits(value, whole[name]) for name, value in self.model.state_dict().items())

    @endpoint
    @torch.no_grad()
    def known(self) -> float:
        """Return the fraction of the text's letters that the model predicts from the preceding ones."""
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
        # every rank has the whole tensor, so with src_data_rank=None each takes its part without communication
        whole = distribute_tensor(whole, mine.device_mesh, mine.placements, src_data_rank=None).to_local()
        mine = mine.to_local()
    return torch.equal(mine.contiguous().view(torch.int32), whole.contiguous().view(torch.int32))


# ---- main program


def connect(trainers: ActorMesh, generators: ActorMesh) -> None:
    """Merge the registered parts of all trainers and send the result to all generators. Needed once."""
    state = ShardedState.merge(trainers.offer.call().get())
    print(state)
    for point, plan in generators.connect.call(state).get():
        print(f"generator {point.rank}: {plan}")


def sync(generators: ActorMesh) -> Sync:
    """Sync all generators at the same time. Return the total bytes and the time of the slowest generator."""
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
        # The sync comes between two steps, so no trainer writes to its weights during the reads.
        syncs.append(sync(generators))
        done = syncs[-1]
        pace = f"{done.nbytes / 1e6:.1f} MB in {done.seconds * 1e3:.1f} ms, {done.nbytes / done.seconds / 1e9:.2f} GB/s"
        if checked and (wrong := compare(trainers, generators)):
            raise SystemExit(f"step {step}: {wrong} weights are not those of the trainers")
        print(f"step {step:3}  loss {loss:.3f}  {pace}{', the same bits' if checked else ''}", end="", flush=True)
        known = generators.known.call()  # runs while the trainers compute the next step
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
            procs.process_group().get()  # makes each mesh a torch.distributed world
        trainers = training.spawn("trainers", Trainer, args.width, args.layers, args.lr)
        generators = generating.spawn("generators", Generator, args.generators, args.width, args.layers)
        connect(trainers, generators)
        syncs = train(trainers, generators, args.steps, not args.unchecked)
        print("they report:", generators.recite.call("Beautiful is").get().item(tensor=0).replace("\n", " / "))
    nbytes, seconds = sum(one.nbytes for one in syncs), sum(one.seconds for one in syncs)
    print(f"{len(syncs)} syncs: {nbytes / 1e6:.1f} MB in {seconds:.3f} s, {nbytes / seconds / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
