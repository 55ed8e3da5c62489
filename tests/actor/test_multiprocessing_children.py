"""Children that an actor starts with multiprocessing import the main module of the program."""

from __future__ import annotations

import multiprocessing
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._processes import main_module
from tests.actor.script_runner import python

SCRIPT = """
import dataclasses
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

imports = sys.argv[1:]  # as the script has them


@dataclasses.dataclass
class Square:
    value: int


def square(x):
    return Square(x * x)


def put(queue, x):
    queue.put((square(x), imports, __name__))
"""
ACTORS = """
from monarch_backend.actor import Actor, endpoint, this_host


class Parent(Actor):
    @endpoint
    def pool(self, method):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
            return [each.value for each in pool.map(square, range(4))]

    @endpoint
    def process(self, method):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        child = context.Process(target=put, args=(queue, 3))
        child.start()
        found, arguments, name = queue.get(timeout=60)
        child.join(60)
        return type(found) is Square, found.value, arguments, name, child.exitcode

    @endpoint
    def loader(self, method):
        from torch.utils.data import DataLoader

        loader = DataLoader(Squares(), batch_size=2, num_workers=1, multiprocessing_context=method)
        return [batch.tolist() for batch in loader]


class Squares:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return square(index).value
"""
RUN = """
if __name__ == "__main__":
    with this_host().spawn_procs({"gpus": 1}) as procs:
        parent = procs.spawn("parent", Parent)
        for method in ("fork", "spawn", "forkserver"):
            assert parent.pool.call_one(method).get(90) == [0, 1, 4, 9], method
            assert parent.loader.call_one(method).get(90) == [[0, 1], [4, 9]], method
            same, value, arguments, name, code = parent.process.call_one(method).get(90)
            assert (same, value, arguments, code) == (True, 9, ["an argument"], 0), (method, arguments, code)
            assert name == ("__main__" if method == "fork" else "__mp_main__"), (method, name)
    print("all")
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["script", "module"])
def test_children_of_actors_find_functions_and_classes_of_the_program(how: str, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    script = package / "module.py"
    script.write_text(SCRIPT + ACTORS + RUN)
    name = [str(script)] if how == "script" else ["-m", "package.module"]
    run: Any = python(*name, "an argument", env={"PYTHONPATH": ":".join([str(tmp_path), *sys.path])})
    assert (run.returncode, run.stdout.splitlines()[-1:]) == (0, ["all"]), run.stdout + run.stderr


@pytest.mark.slow
def test_children_of_actors_without_a_main_file_fail_as_in_the_program() -> None:
    source = (
        SCRIPT
        + ACTORS
        + """
procs = this_host().spawn_procs({"gpus": 1})
print(type(procs.spawn("parent", Parent).pool.call_one("spawn").exception().__cause__).__name__)
procs.stop().get()
"""
    )
    run: Any = python("-c", source)
    assert run.returncode == 0, run.stderr
    assert "BrokenProcessPool" in run.stdout
    assert "Can't get attribute 'square' on <module '__main__'" in run.stdout + run.stderr


@pytest.mark.slow
def test_script_that_spawns_processes_at_import_is_refused_in_children(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        SCRIPT
        + ACTORS
        + textwrap.dedent("""
        procs = this_host().spawn_procs({"gpus": 1})
        error = procs.spawn("parent", Parent).pool.call_one("spawn").exception()
        print(type(error.__cause__).__name__)
        procs.stop().get()
        """)
    )
    run: Any = python(str(script))
    assert run.returncode == 0, run.stderr
    assert "BrokenProcessPool" in run.stdout
    assert "Put what the script runs under `if __name__ == '__main__':`" in run.stdout + run.stderr


def test_main_module_of_a_child_names_the_script_and_runs_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    from multiprocessing.spawn import get_preparation_data

    path = str(tmp_path / "script.py")
    for name, key, value in (
        ("", "init_main_from_path", path),
        ("package.module", "init_main_from_name", "package.module"),
    ):
        made = main_module.empty_main_module(name, path)
        monkeypatch.setitem(sys.modules, "__main__", made)
        assert get_preparation_data("child")[key] == value
        assert main_module.main_module() == (name, path)
        assert not {"square", "__builtins__"} & set(vars(made))
    monkeypatch.setitem(sys.modules, "__main__", main_module.empty_main_module("", ""))
    assert not {"init_main_from_path", "init_main_from_name"} & set(get_preparation_data("child"))
    assert main_module.main_module() == ("", "")


def test_spawning_while_the_main_module_is_imported_is_refused(monkeypatch: Any) -> None:
    main_module.refuse_import_of_main()
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(RuntimeError, match="imports the main module of its parent"):
        main_module.refuse_import_of_main()
