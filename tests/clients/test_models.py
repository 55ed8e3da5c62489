"""Tiny models of Hugging Face from one controller: three steps and greedy decoding as in one process.

Each case has the weights, the batch and the random numbers of one process. Workers add in another order where a sum is
split between them. Such losses of about 5 differ by 1e-6, two units in the last place; a wrong gradient or another
dropout mask differs by more than 1e-4.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from monarch_backend.actor import this_host
from tests.clients.programs import needs, run

pytestmark = [needs("transformers"), needs("peft"), pytest.mark.filterwarnings("ignore")]
hf = pytest.importorskip("tests.clients.model_runs", exc_type=ImportError)

TOLERANCE = 1e-5
CAPTURED = {"backend": "monarch", "options": {"inductor": False}}
"""The operations of a captured step one by one. Compiling them with Inductor takes minutes on two cores."""


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    procs = this_host().spawn_procs({"x": 2})
    yield procs.device_mesh("cpu")
    procs.stop().get()
    torch.set_num_threads(threads)


@functools.cache
def alone(name: str, dropout: float) -> Any:
    """Return the model before training, and what one process gets: losses and tokens."""
    model = hf.MODELS[name]
    torch.manual_seed(3)
    module = model.make(dropout)
    before, batch = copy.deepcopy(module), hf.new_batch(model)
    losses = hf.train(module, batch)
    return before, batch, losses, hf.generate(module, batch) if model.generates else None


def check(name: str, placement: str, dropout: float, mesh: Any, compiled: Any, *, generates: bool) -> None:
    before, batch, losses, tokens = alone(name, dropout)
    module = hf.place(hf.MODELS[name], copy.deepcopy(before), placement, mesh)
    assert hf.train(module, batch, compiled) == pytest.approx(losses, abs=TOLERANCE)
    assert not [key for key, each in module.named_parameters() if type(each) is torch.nn.Parameter], "not on workers"
    if tokens is not None and generates:
        assert hf.generate(module, batch) == tokens


CASES = list(itertools.product(hf.MODELS, hf.PLACEMENTS))
DROPOUT = pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["", "dropout"])


def has_plan(name: str, placement: str) -> bool:
    return placement != "TP" or bool(hf.MODELS[name].plan)


@DROPOUT
@pytest.mark.parametrize(("name", "placement"), [each for each in CASES if has_plan(*each)])
def test_eager_training_and_generation(name: str, placement: str, dropout: float, mesh: Any) -> None:
    check(name, placement, dropout, mesh, None, generates=True)


@pytest.mark.parametrize(("name", "placement"), [each for each in CASES if has_plan(*each)])
def test_captured_training(name: str, placement: str, mesh: Any) -> None:
    from monarch_backend.dtensor._compile import compile_backend

    torch._dynamo.reset()
    calls = compile_backend.statistics["calls"]
    check(name, placement, 0.1, mesh, CAPTURED, generates=False)
    assert compile_backend.statistics["calls"] - calls >= 2 * hf.STEPS, "forward and backward were not captured"


def test_captured_generation(mesh: Any) -> None:
    """`generate()` calls the model itself, so the model is compiled in place. Each length is a graph of its own."""
    from monarch_backend.dtensor._compile import compile_backend

    torch._dynamo.reset()
    before, batch, losses, tokens = alone("GPT-2", 0.0)
    module = hf.place(hf.MODELS["GPT-2"], copy.deepcopy(before), "replicated", mesh)
    assert hf.train(module, batch) == pytest.approx(losses, abs=TOLERANCE)
    module.compile(**CAPTURED)
    calls = compile_backend.statistics["calls"]
    assert hf.generate(module, batch) == tokens
    assert compile_backend.statistics["calls"] > calls, "the forwards were not captured"


@pytest.mark.parametrize("name", [name for name, each in hf.MODELS.items() if each.generates])
def test_dropout_changes_the_losses(name: str) -> None:
    assert alone(name, 0.0)[2] != alone(name, 0.1)[2]


def test_the_program_of_the_page(tmp_path: Path) -> None:
    done = run("python examples/frameworks/transformers_controller.py", tmp_path)
    assert done.status == 0, done.err[-3000:]
    assert done.out.splitlines() == ["loss below 0.5: True", "tokens: [3, 4, 5, 6, 7, 8, 9, 10]"]
