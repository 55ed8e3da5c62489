"""Tests in the form of torch's own DTensor tests, on their base classes, with a controller's mesh.

torch's `create_local_tensor_test_class` runs such tests in one process. Here it gets a base with a controller's mesh
in place of LocalTensorMode.
"""

# ruff: noqa: PT009 # torch's bases compare tensors by assertEqual
from __future__ import annotations

import contextlib
import copy
import unittest
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from monarch_backend._core.torch_version import torch_version
from monarch_backend.dtensor import RemoteOpError
from monarch_backend.dtensor._per_rank import per_rank_int
from tests.dtensor import failing_lookup
from tests.dtensor.conftest import workers_of
from tests.dtensor.torch_test_modules import common_dtensor

DTensorTestBase, with_comms = common_dtensor.DTensorTestBase, common_dtensor.with_comms


def keep_process_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable `destroy_process_group`, which torch's `with_comms` calls after an exception.

    Later tests use the same groups.
    """
    monkeypatch.setattr(dist, "destroy_process_group", lambda group=None: None)


class ControllerTestBase(common_dtensor.LocalDTensorTestBase):  # type: ignore[misc]
    """torch's base class for LocalTensorMode, with worker processes as ranks."""

    mesh_of: Callable[[str], Any]

    @pytest.fixture(autouse=True)
    def _meshes(self, mesh_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.mesh_of = mesh_of
        keep_process_groups(monkeypatch)

    @property
    def world_size(self) -> int:
        return 2

    @property
    def rank(self) -> Any:
        return per_rank_int.by_rank(range(self.world_size))

    @rank.setter
    def rank(self, rank: Any) -> None:
        pass

    def setUp(self) -> None:
        unittest.TestCase.setUp(self)

    def tearDown(self) -> None:
        unittest.TestCase.tearDown(self)

    def _get_local_tensor_mode(self) -> Any:
        return contextlib.nullcontext()

    def build_device_mesh(self) -> Any:
        return self.mesh_of("2")

    def init_pg(self, eager_init: Any, backend: str | None = None) -> None:
        """Do nothing, because the meshes have a process group."""

    def destroy_pg(self, device_id: int | None = None) -> None:
        """Do nothing, because other tests use the process group."""


class OpsTest(DTensorTestBase):  # type: ignore[misc]
    """Operators in every combination of placements that torch's converter makes."""

    def check(self, *calls: Any) -> None:
        mesh = self.build_device_mesh()
        for function, *args in calls:
            self._test_op(mesh, function, *args)

    @with_comms
    def test_pointwise(self) -> None:
        x, y = torch.randn(4, 6), torch.randn(6)
        self.check(*[(each, x) for each in (torch.exp, torch.relu, torch.sigmoid, torch.neg)])
        self.check(*[(each, x, y) for each in (torch.add, torch.mul, torch.sub, torch.maximum)])
        self.check((torch.where, x > 0, x, torch.zeros(4, 6)), (torch.clamp, x, -1.0, 1.0), (torch.pow, x, 2))

    @with_comms
    def test_matrices(self) -> None:
        a, b, c = torch.randn(4, 6), torch.randn(6, 8), torch.randn(4, 8)
        self.check((torch.mm, a, b), (torch.addmm, c, a, b), (torch.t, a))
        self.check((torch.bmm, torch.randn(2, 4, 6), torch.randn(2, 6, 4)), (torch.einsum, "ij,jk->ik", a, b))

    @with_comms
    def test_reductions(self) -> None:
        x = torch.randn(4, 6)
        for each in (torch.sum, torch.mean, torch.amax, torch.var, torch.argmax, torch.logsumexp, torch.softmax):
            self.check(*[(each, x, dim) for dim in (0, 1)])
        self.check((torch.sum, x), (torch.linalg.vector_norm, x), (torch.any, x > 1), (torch.cumsum, x, 1))

    @with_comms
    def test_views(self) -> None:
        x = torch.randn(4, 6, 2)
        self.check((torch.permute, x, (2, 0, 1)), (torch.flatten, x, 1), (torch.unsqueeze, x, 1))
        self.check((torch.movedim, x, 0, 2), (lambda v: v.reshape(24, 2), x), (lambda v: v[:, 1:3], x))

    @with_comms
    def test_indices(self) -> None:
        x, rows = torch.randn(6, 4), torch.tensor([0, 5, 2, 2])
        self.check((torch.index_select, x, 0, rows), (torch.gather, x, 0, rows.view(1, 4)))
        self.check((lambda v, i: v[i], x, rows), (torch.scatter, x, 0, rows.view(1, 4), torch.ones(1, 4)))

    @with_comms
    def test_ops_on_distributed_tensors(self) -> None:
        mesh = self.build_device_mesh()
        for placement in (Shard(0), Shard(1), Replicate()):
            x = distribute_tensor(torch.randn(5, 7), mesh, [placement])
            self._test_op_on_dtensor(torch.sin, x)
            self._test_op_on_dtensor(torch.matmul, x, x.t())
            self._test_op_on_dtensor(torch.cat, [x, x], dim=0)


class RulesTest(DTensorTestBase):  # type: ignore[misc]
    """torch's validators of single sharding rules, forward and backward, which must also detect a wrong rule."""

    @with_comms
    def test_rules(self) -> None:
        mesh, a, b = self.build_device_mesh(), torch.randn(4, 6), torch.randn(6, 4)
        rules: list[tuple[Any, Any, Any, Any]] = [
            (torch.mm, (a, b), (Shard(1), Shard(0)), (Partial(),)),
            (torch.mm, (a, b), (Shard(0), Replicate()), (Shard(0),)),
            (torch.sum, (a,), (Shard(0),), (Partial(),)),
            (torch.add, (a, a), (Shard(1), Shard(1)), (Shard(1),)),
            (torch.t, (a,), (Shard(0),), (Shard(1),)),
        ]
        for function, args, inputs, outputs in rules:
            self.assertTrue(common_dtensor.validate_sharding_rule_sample(function, args, {}, inputs, outputs, mesh))
            if torch_version() >= (2, 13):  # older releases validate the forward only
                backward = common_dtensor.validate_sharding_rule_sample_backward(function, args, {}, inputs, mesh)
                self.assertTrue(backward)
        wrong = (torch.sum, (a,), {}, (Shard(0),), (Replicate(),), mesh)
        self.assertFalse(common_dtensor.validate_sharding_rule_sample(*wrong))

    @with_comms
    def test_ranks_are_numbers(self) -> None:
        mine = common_dtensor.map_local_for_rank(self.rank, lambda rank: torch.full((2,), float(rank)))
        whole = DTensor.from_local(mine, self.build_device_mesh(), [Shard(0)]).full_tensor()
        self.assertEqual(whole.tolist(), [0.0, 0.0, 1.0, 1.0])

    @with_comms
    def test_orders_of_shards(self) -> None:
        mesh, whole = self.mesh_of("2x2"), torch.randn(8, 8)
        orders = list(common_dtensor.generate_shard_orders(mesh, 2))
        self.assertGreater(len(orders), 4)
        for order in orders:
            x = common_dtensor.patched_distribute_tensor(whole, mesh, None, order)
            self.assertEqual(x._spec.shard_order, order)
            self.assertEqual(common_dtensor.make_full_tensor(x), whole)


class ModulesTest(DTensorTestBase):  # type: ignore[misc]
    """Modules of torch's suite, one value of each configuration at a time."""

    @with_comms
    def test_layers(self) -> None:
        self.run_subtests({"layers": [1, 3], "rows": [4, 5]}, self._layers)

    def _layers(self, layers: int, rows: int) -> None:
        mesh, alone = self.build_device_mesh(), common_dtensor.MLPStacked("cpu", layers)
        ours = copy.deepcopy(alone)
        for each in ours.layers:
            for name, first in (("net1", 0), ("net2", 1)):
                linear = getattr(each, name)
                linear.weight = torch.nn.Parameter(distribute_tensor(linear.weight, mesh, [Shard(first)]))
        x = torch.randn(rows, 10)
        found = ours(distribute_tensor(x, mesh, [Replicate()]))
        self.assertEqual(found.full_tensor(), alone(x))
        found.sum().backward()
        alone(x).sum().backward()
        for mine, theirs in zip(ours.parameters(), alone.parameters(), strict=True):
            gradient = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
            self.assertEqual(gradient, theirs.grad)

    @with_comms
    def test_python_norm(self) -> None:
        mesh, norm, x = self.build_device_mesh(), common_dtensor.RMSNormPython(8), torch.randn(4, 8)
        for placement in (Shard(0), Shard(1), Replicate()):
            found: Any = norm(distribute_tensor(x, mesh, [placement]))
            self.assertEqual(found.full_tensor(), norm(x))


def _with_controller(suite: Any) -> Any:
    made = common_dtensor.create_local_tensor_test_class(suite, base_class=ControllerTestBase)
    made.__name__ = made.__qualname__ = suite.__name__.removesuffix("Test") + "FromController"
    made.__test__ = True
    return made


class FailingTest(DTensorTestBase):  # type: ignore[misc]
    """A test that raises."""

    @with_comms
    def test_raises(self) -> None:
        raise ZeroDivisionError


OpsFromController = _with_controller(OpsTest)
RulesFromController = _with_controller(RulesTest)
ModulesFromController = _with_controller(ModulesTest)
OpsTest.__test__ = RulesTest.__test__ = ModulesTest.__test__ = FailingTest.__test__ = False


def test_failed_test_keeps_the_process_groups(mesh_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    group = mesh_of("2").get_group()
    keep_process_groups(monkeypatch)
    with pytest.raises(ZeroDivisionError):
        _with_controller(FailingTest)("test_raises").test_raises()
    assert dist.is_initialized()
    assert mesh_of("2").get_group() is group


def test_barrier_waits_for_the_workers_and_raises_failures(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")
    workers = workers_of(mesh)
    dist.barrier(group=mesh.get_group())
    failed = failing_lookup.look_up(workers.put(torch.tensor([5])), workers.put(torch.randn(3, 2)))
    with pytest.raises(RemoteOpError, match=failing_lookup.OPERATION):
        dist.barrier()
    dist.barrier()  # the failure has been raised
    del failed
