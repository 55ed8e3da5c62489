"""The parts of torchelastic that _launch/torchelastic_patches.py replaces exist and behave as it needs."""

from __future__ import annotations

import inspect
import re
import sys

import pytest
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import PContext, SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import handlers
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher import api as launcher

from monarch_backend._launch import torchelastic_patches


def test_the_launcher_finds_its_agent_by_the_name_that_we_replace() -> None:
    assert "LocalElasticAgent" in launcher.launch_agent.__code__.co_names
    assert launcher.LocalElasticAgent is LocalElasticAgent


def test_the_agent_finds_the_start_by_the_name_that_we_replace() -> None:
    """The agent passes its arguments by name. SubprocessContext takes all of them except the start method."""
    source = inspect.getsource(inspect.unwrap(LocalElasticAgent._start_workers))
    (call,) = re.findall(r"(?s)self\._pcontext = start_processes\((.*?)\n        \)", source)
    names = re.findall(r"(?m)^            (\w+)=", call)
    assert len(names) == call.count("\n") and "start_method" in names
    taken = inspect.signature(SubprocessContext).parameters
    assert set(names) - {"start_method"} <= set(taken)


def test_torch_start_processes_has_the_expected_steps() -> None:
    """torch creates the context, starts it, and closes it if the start fails. The replacement does the same."""
    source = inspect.getsource(local_elastic_agent.start_processes)
    assert source.endswith(
        "    try:\n        context.start()\n        return context\n"
        "    except Exception:\n        context.close()\n        raise\n"
    )


def test_the_agent_sleeps_and_then_looks() -> None:
    """The agent reads the interval from the spec before its loop. An interval of 0 is no sleep."""
    source = inspect.getsource(SimpleElasticAgent._invoke_run)
    assert re.search(r"monitor_interval = spec\.monitor_interval\n", source)
    assert re.search(r"time\.sleep\(monitor_interval\)\s+run_result = self\._monitor_workers\(", source)
    assert source.count("monitor_interval") == 3
    assert "self._pcontext" in inspect.getsource(inspect.unwrap(LocalElasticAgent._monitor_workers))


def test_the_first_pause_of_a_rendezvous() -> None:
    source = inspect.getsource(dynamic_rendezvous)
    assert re.findall(r"_delay\(seconds=(\(0, 0\.3\))\)", source) == [str(torchelastic_patches._FIRST_DELAY)]
    assert "_delay" in dynamic_rendezvous.DynamicRendezvousHandler.next_rendezvous.__code__.co_names
    waited: list[object] = []
    delay = torchelastic_patches._but_the_first(waited.append)
    delay(seconds=(0, 0.3))
    delay(seconds=1)
    assert waited == [1]


def test_torch_uses_the_expected_process_attributes() -> None:
    source = inspect.getsource(SubprocessContext)
    assert set(re.findall(r"(?:handler|sh)\.proc\.(\w+)", source)) == {"poll", "pid", "wait"}
    assert set(re.findall(r"(?:handler|sh)\.(\w+)", source)) <= {"proc", "close", "SubprocessHandler"}
    assert "self.subprocess_handlers" in inspect.getsource(SubprocessContext.pids)


def test_subprocess_handler_found_by_replaced_name() -> None:
    assert "SubprocessHandler" in handlers.get_subprocess_handler.__code__.co_names
    source = inspect.getsource(handlers.SubprocessHandler)
    assert 'kwargs["start_new_session"] = True' in source and "os.killpg(self.proc.pid, death_sig)" in source


def test_context_has_the_expected_attributes_at_start() -> None:
    names = PContext.__init__.__code__.co_names
    assert {"args", "envs", "stdouts", "stderrs", "nprocs"} <= set(names)
    assert "_start" in PContext.start.__code__.co_names


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["x.py", "-a", "b"], ["-u", "x.py", "-a", "b"]),
        (["-m", "x", "-m"], ["-u", "-m", "x", "-m"]),
    ],
)
def test_the_command_of_a_rank(words: list[str], command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """_launch/run_script.py parses this command in a forked rank."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    args = torchrun.get_args_parser().parse_args(["--log-dir=/dev/null", *words])
    _, program, arguments = torchrun.config_from_args(args)
    assert (program, arguments) == (sys.executable, command)


@pytest.mark.parametrize(
    ("words", "reason", "unusual"),
    [
        (["x.py"], "", False),
        (["--no-python", "x"], "--no-python", False),
        (["--run-path", "x.py"], "--run-path", False),
        (["--numa-binding", "node", "x.py"], "--numa-binding starts ranks with numactl", True),
    ],
)
def test_when_torch_starts_the_ranks(words: list[str], reason: str, unusual: bool) -> None:
    assert torchelastic_patches._why_not_forked(torchrun.get_args_parser().parse_args(words), "") == (reason, unusual)


def test_a_torch_without_one_of_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dynamic_rendezvous, "_delay")
    with (
        pytest.raises(RuntimeError, match=r"has no .*dynamic_rendezvous\._delay.*torchrun"),
        torchelastic_patches._replaced(dynamic_rendezvous, "_delay", None),
    ):
        pass
