"""Wrong arguments and wrong use of actors raise at the call, with a message that says what to do. No actor dies."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._actor.runtime import program
from monarch_backend._processes import resource_limits
from monarch_backend.actor import (
    Actor,
    ActorError,
    ActorMesh,
    Channel,
    DeserializationError,
    Extent,
    HostMesh,
    MeshFailure,
    ProcMesh,
    Restart,
    SerializationError,
    Shape,
    UnknownEndpointError,
    as_endpoint,
    concurrent_endpoint,
    context,
    endpoint,
    get_or_spawn_controller,
    send,
    this_host,
    this_proc,
)
from tests.actor.failing_actors import AsyncVictim, FailsInConstructor, Victim
from tests.actor.support import PATIENCE, Faults, begun, gate


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    with this_host().spawn_procs({"hosts": 2, "gpus": 2}, name="lasting") as procs:
        procs.initialized.get(PATIENCE)
        yield procs


@pytest.fixture(scope="module")
def victims(procs: ProcMesh) -> ActorMesh:
    return procs.spawn("victims", Victim)


@pytest.fixture(scope="module")
def one(victims: ActorMesh) -> ActorMesh:
    return victims.slice(hosts=1, gpus=1)


@pytest.fixture
def alive(victims: ActorMesh, faults: Faults) -> Iterator[None]:
    """Check after the test that all actors are alive."""
    yield
    assert list(victims.echo.call("alive").get(PATIENCE).values()) == ["alive"] * 4


class Unloadable:
    """An object that can be pickled but not unpickled."""

    def __getstate__(self) -> dict[str, int]:
        return {"x": 1}

    def __setstate__(self, state: dict[str, int]) -> None:
        raise LookupError("the cat ate it")


class HasLock:
    def __init__(self) -> None:
        self.lock = threading.Lock()


class Returns(Actor):
    """Actor with results that cannot be pickled or unpickled."""

    def __init__(self, *ignored: Any) -> None:
        pass

    @endpoint
    def a_lock(self) -> Any:
        return HasLock()

    @endpoint
    def unloadable(self) -> Any:
        return Unloadable()

    @endpoint
    def locks(self) -> Iterator[Any]:
        yield 1
        yield HasLock()

    @endpoint(explicit_response_port=True)
    def a_lock_by_port(self, port: Any) -> None:
        try:
            port.send(HasLock())
        except SerializationError as error:
            port.exception(error)

    @endpoint
    def itself(self) -> Any:
        return self

    @endpoint
    def instance(self) -> Any:
        return context().actor_instance

    @endpoint
    def calls(self, other: Any, value: Any) -> Any:
        return other.call_one(value).get(PATIENCE)

    @endpoint
    def waits_for(self, me: Any, verb: str) -> Any:
        return getattr(me.echo, verb)(1).get(PATIENCE)

    @endpoint
    def a_lock_to(self, port: Any) -> None:
        port.send(HasLock())

    @endpoint
    def echo(self, value: Any) -> Any:
        return value


# Values that cannot be sent


@pytest.mark.parametrize("verb", ["call_one", "call", "choose", "stream", "broadcast"])
def test_unpicklable_argument_raises_at_the_call(verb: str, victims: ActorMesh, one: ActorMesh, alive: None) -> None:
    mesh = one if verb == "call_one" else victims
    with pytest.raises(SerializationError) as told:
        getattr(mesh.echo, verb)({"config": [1, HasLock()]})
    for part in ("args[0]['config'][1].lock", "_thread.lock", "__reduce__"):
        assert part in str(told.value)
    assert isinstance(told.value, TypeError)


def test_unpicklable_constructor_argument_raises_at_spawn(procs: ProcMesh, alive: None) -> None:
    with pytest.raises(SerializationError, match=r"lock"):
        procs.spawn("locked", Victim, HasLock())


def test_unpicklable_value_for_a_port_raises_at_send(alive: None) -> None:
    port, receiver = Channel.open()
    with pytest.raises(SerializationError, match="lock"):
        port.send(HasLock())
    port.send("the next")
    assert receiver.recv().get(PATIENCE) == "the next"
    receiver.close()


@pytest.mark.parametrize("kind", [Victim, AsyncVictim])
def test_argument_that_does_not_unpickle_is_an_error_reply(
    kind: type, procs: ProcMesh, alive: None, capfd: pytest.CaptureFixture[str]
) -> None:
    actors = procs.slice(hosts=0).spawn("actors", kind)
    single = actors.slice(gpus=0)
    stream = list(actors.echo.stream(Unloadable()))
    for future in (single.echo.call_one(Unloadable()), actors.echo.call(Unloadable()), *stream):
        error = future.exception(PATIENCE)
        assert isinstance(error, ActorError) and isinstance(error.__cause__, DeserializationError)
        assert "the cat ate it" in str(error) and "LookupError" in str(error)
        assert isinstance(error.__cause__.__cause__, LookupError)
    actors.echo.broadcast(Unloadable())
    assert list(actors.echo.call("still here").get(PATIENCE).values()) == ["still here"] * 2
    actors.stop().get(PATIENCE)


def test_broadcast_that_does_not_unpickle_is_logged(faults: Faults, capfd: pytest.CaptureFixture[str]) -> None:
    """A broadcast has no reply, so the actor's process logs the error."""
    with this_host().spawn_procs({"gpus": 1}) as procs:
        procs.logging_option(aggregate_window_sec=None)
        victim = procs.spawn("victim", Victim)
        victim.echo.broadcast(Unloadable())
        victim.echo.call_one(1).get(PATIENCE)
        program().flush_logs()
    err = capfd.readouterr().err
    assert "victim dropped a message that it can't read" in err and "the cat ate it" in err


def test_constructor_argument_that_does_not_unpickle_fails_the_mesh(
    procs: ProcMesh, faults: Faults, alive: None
) -> None:
    actors = procs.slice(hosts=0, gpus=0).spawn("actors", Returns, Unloadable())
    error = actors.initialized.exception(PATIENCE)
    assert isinstance(error, MeshFailure) and "the cat ate it" in str(error)
    assert "the cat ate it" in faults.next().report()


def test_class_that_the_worker_cannot_import_fails_the_mesh(procs: ProcMesh, victims: ActorMesh, alive: None) -> None:
    """The class can be imported in the main program only."""
    import sys
    import types

    module = sys.modules["only_here"] = types.ModuleType("only_here")
    exec("class Card:\n    pass", vars(module))
    try:
        error = victims.slice(hosts=0, gpus=0).echo.call_one(module.Card()).exception(PATIENCE)  # type: ignore[attr-defined]
    finally:
        del sys.modules["only_here"]
    assert isinstance(error, ActorError) and "only_here" in str(error)


def test_unpicklable_result_is_an_error_of_the_call(procs: ProcMesh, alive: None) -> None:
    actors = procs.slice(hosts=0, gpus=0).spawn("returns", Returns)
    for future in (actors.a_lock.call_one(), actors.a_lock.call(), actors.a_lock_by_port.call_one()):
        error = future.exception(PATIENCE)
        assert isinstance(error, ActorError) and isinstance(error.__cause__, SerializationError)
        assert "lock" in str(error)
    values = actors.locks.call_one()
    assert next(values) == 1
    with pytest.raises(ActorError, match="lock"):
        next(values)
    port, receiver = Channel.open()
    error = actors.a_lock_to.call_one(port).exception(PATIENCE)
    assert isinstance(error, ActorError) and isinstance(error.__cause__, SerializationError)
    receiver.close()
    assert actors.echo.call_one("lives").get(PATIENCE) == "lives"
    actors.stop().get(PATIENCE)


def test_result_that_does_not_unpickle_raises_at_get(procs: ProcMesh, alive: None) -> None:
    actors = procs.slice(hosts=0).spawn("returns", Returns)
    for future in (
        actors.slice(gpus=0).unloadable.call_one(),
        actors.unloadable.call(),
        *actors.unloadable.stream(),
    ):
        for _ in range(2):  # each read raises the same error
            with pytest.raises(DeserializationError, match="the cat ate it"):
                future.get(PATIENCE)
    actors.stop().get(PATIENCE)


def test_objects_bound_to_a_process_are_not_sent(victims: ActorMesh, one: ActorMesh, alive: None) -> None:
    _, receiver = Channel.open()
    with pytest.raises(SerializationError, match="send its port"):
        one.echo.call_one(receiver)
    with pytest.raises(TypeError, match="send its port"):
        pickle.dumps(receiver)
    receiver.close()
    with pytest.raises(SerializationError, match="send its value"):
        one.echo.call_one(one.echo.call_one(1))
    with pytest.raises(SerializationError, match="send the mesh"):
        one.echo.call_one(as_endpoint(one.say))


def test_objects_bound_to_an_actor_are_not_sent(procs: ProcMesh, alive: None) -> None:
    one = procs.slice(gpus=0, hosts=0).spawn("itself", Returns)
    for method, text in (
        (one.itself, "cannot leave its process: send its mesh"),
        (one.instance, "send its name and rank"),
    ):
        error = method.call_one().exception(PATIENCE)
        assert isinstance(error, ActorError) and text in str(error)
    one.stop().get(PATIENCE)


def test_endpoint_can_be_sent(procs: ProcMesh, one: ActorMesh, alive: None) -> None:
    caller = procs.slice(gpus=0, hosts=0).spawn("caller", Returns)
    assert caller.calls.call_one(one.echo, 3).get(PATIENCE) == 3
    caller.stop().get(PATIENCE)


def test_actor_that_waits_for_itself_gets_an_error(procs: ProcMesh, alive: None) -> None:
    me = procs.slice(gpus=0, hosts=0).spawn("me", Returns)
    for verb in ("call_one", "call"):
        error = me.waits_for.call_one(me, verb).exception(PATIENCE)
        assert isinstance(error, ActorError) and "would never continue" in str(error) and "echo" in str(error)
    assert me.echo.call_one(1).get(PATIENCE) == 1
    me.stop().get(PATIENCE)


def test_stop_of_a_slice_is_refused(procs: ProcMesh, victims: ActorMesh, alive: None) -> None:
    for what in ("stop", "abort", "kill"):
        with pytest.raises(ValueError, match=rf"{what}\(\) is for whole meshes"):
            getattr(procs.slice(gpus=0), what)()
    with pytest.raises(ValueError, match="whole meshes"):
        procs.slice(gpus=0).logging_option(level="ERROR")
    for what in ("stop", "abort"):
        with pytest.raises(ValueError, match=rf"{what}\(\) is for whole meshes"):
            getattr(victims.slice(gpus=0), what)()


# Names, ranks and options that do not exist


def test_unknown_endpoint_error_lists_endpoints(victims: ActorMesh, alive: None) -> None:
    with pytest.raises(UnknownEndpointError, match=r"Victim has no endpoint 'ecco'") as told:
        victims.ecco.call(1)
    assert "echo" in str(told.value) and isinstance(told.value, AttributeError)
    assert not hasattr(victims, "ecco")


def test_undecorated_method_error_says_how_to_call_it(victims: ActorMesh, one: ActorMesh, alive: None) -> None:
    for call in (lambda: victims.say.call("x"), lambda: victims.say("x")):
        with pytest.raises(UnknownEndpointError, match=r"decorate it with @endpoint.*as_endpoint\(mesh\.say\)"):
            call()
    assert as_endpoint(one.say).call_one("x").get(PATIENCE) is None
    with pytest.raises(TypeError, match=r"as_endpoint takes mesh\.method"):
        as_endpoint(5)


def test_calling_an_endpoint_directly_says_how_to_send(victims: ActorMesh, alive: None) -> None:
    with pytest.raises(TypeError, match=r"victims\.echo is an endpoint of a mesh.*\.call\(") as told:
        victims.echo(1)
    for verb in ("call_one", "choose", "stream", "broadcast"):
        assert f".{verb}(" in str(told.value)


def test_wrong_arguments_raise_at_the_call(victims: ActorMesh, one: ActorMesh, alive: None) -> None:
    for call in (
        one.echo.call_one,
        victims.echo.call,
        victims.echo.broadcast,
        victims.echo.choose,
        victims.echo.stream,
    ):
        with pytest.raises(TypeError, match=r"echo\(\) missing 1 required positional argument: 'value'"):
            call()
        with pytest.raises(TypeError, match=r"echo\(\) takes 1 positional argument but 2"):
            call(1, 2)
        with pytest.raises(TypeError, match=r"echo\(\) got an unexpected keyword argument 'valeu'"):
            call(valeu=1)
    with pytest.raises(TypeError, match=r"count\(\) missing"):
        victims.count.stream()
    with pytest.raises(TypeError, match=r"answers_never\(\) takes 0 positional"):
        one.answers_never.call_one("the port is not the caller's")
    assert one.all_notes.call_one().get(PATIENCE) == []


@pytest.mark.parametrize("select", [{}, {"hosts": 1}, {"gpus": 0}])
def test_call_one_on_several_actors_is_refused(select: dict[str, int], victims: ActorMesh, alive: None) -> None:
    mesh = victims.slice(**select) if select else victims
    with pytest.raises(ValueError, match=rf"'victims' .* has {len(mesh)}: slice it, or use call, choose or broadcast"):
        mesh.echo.call_one(1)


def test_unknown_selection_is_refused(victims: ActorMesh, alive: None) -> None:
    with pytest.raises(ValueError, match=r"selection='some': it must be 'all' or 'choose'"):
        send(victims.note, (1,), selection="some")


COORDINATES: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "too large": (lambda m: m.slice(gpus=2), IndexError, "gpus"),
    "too small": (lambda m: m.slice(gpus=-3), IndexError, "gpus"),
    "no such dimension": (lambda m: m.slice(gpu=0), KeyError, "hosts.*gpus|gpus.*hosts"),
    "no number": (lambda m: m.slice(gpus="first"), TypeError, "gpus"),
    "nothing left": (lambda m: m.slice(gpus=slice(5, 9)), (IndexError, ValueError), "gpus"),  # type: ignore[dict-item]
    "a factor that does not fit": (lambda m: m.split(gpus=("a", "b"), a=3), ValueError, "gpus|a"),
    "a name that is taken": (lambda m: m.rename(gpus="hosts"), ValueError, "hosts"),
    "size of nothing": (lambda m: m.size("gpu"), KeyError, "gpu"),
}


@pytest.mark.parametrize("kind", COORDINATES)
def test_wrong_coordinate_of_a_mesh_is_refused(kind: str, victims: ActorMesh, procs: ProcMesh, alive: None) -> None:
    wrong, error, text = COORDINATES[kind]
    values = victims.echo.call(1).get(PATIENCE)
    for mesh in (victims, procs, values):
        with pytest.raises(error, match=text):
            wrong(mesh)


def test_wrong_coordinate_of_a_value_mesh_is_refused(victims: ActorMesh, alive: None) -> None:
    values = victims.echo.call(1).get(PATIENCE)
    for wrong in ({"hosts": 0, "gpus": 2}, {"hosts": 0}, {"hosts": 0, "gpu": 1}, {}):
        with pytest.raises((KeyError, IndexError), match="gpus"):
            values.item(**wrong)


# Classes


def test_calling_an_actor_class_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Victim is an actor: spawn it, proc_mesh\.spawn\('name', Victim"):
        Victim()


def test_class_with_sync_and_async_endpoints_is_refused(procs: ProcMesh, alive: None) -> None:
    class Mixed(Actor):
        @endpoint
        def plain(self) -> None: ...

        @endpoint
        async def asynchronous(self) -> None: ...

    with pytest.raises(ValueError, match=r"Mixed mixes `def` and `async def` endpoints.*Make these async, too: plain"):
        procs.spawn("mixed", Mixed)


@pytest.mark.parametrize(
    "name", ["stop", "slice", "size", "extent", "initialized", "name", "failed_ranks", "_core", "_shape"]
)
def test_endpoint_with_the_name_of_a_mesh_attribute_is_refused(name: str, procs: ProcMesh, alive: None) -> None:
    def method(self: Any) -> None: ...

    method.__name__ = name
    hides = type("Hides", (Actor,), {name: endpoint(method)})
    with pytest.raises(ValueError, match=rf"Hides\.{name}: every mesh has an attribute '{name}'.*another name"):
        procs.spawn("hides", hides)


def test_endpoint_decorator_refuses_non_methods() -> None:
    with pytest.raises(TypeError, match="an endpoint is a method, not 5"):
        endpoint(5)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"needs an `async def` method: .*method is a plain function"):

        @concurrent_endpoint
        def method(self: Any) -> None: ...


@pytest.mark.parametrize("what", [int, 5, lambda: None, "Victim", threading.Lock], ids=str)
def test_spawn_refuses_classes_that_are_not_actors(what: Any, procs: ProcMesh, alive: None) -> None:
    with pytest.raises(TypeError, match=r"is not an Actor: derive the class from monarch_backend\.actor\.Actor"):
        procs.spawn("wrong", what)


def test_wrong_constructor_arguments_raise_at_spawn(procs: ProcMesh, alive: None) -> None:
    for args, kwargs, text in (
        ((), {}, "missing a required argument: 'error'"),
        ((ValueError(), (), 3), {}, "too many positional arguments"),
        ((ValueError(), ()), {"rank": 1}, "got an unexpected keyword argument 'rank'"),
    ):
        with pytest.raises(
            TypeError, match=re.escape("FailsInConstructor is constructed by __init__(self, error")
        ) as told:
            procs.spawn("wrong", FailsInConstructor, *args, **kwargs)  # type: ignore[arg-type]
        assert text in str(told.value)


def test_class_without_constructor_refuses_arguments(procs: ProcMesh, alive: None) -> None:
    class Bare(Actor):
        @endpoint
        def nothing(self) -> None: ...

    with pytest.raises(TypeError, match="Bare has no __init__, so it takes no arguments"):
        procs.spawn("bare", Bare, 1, lr=3)


@pytest.mark.parametrize("name", ["", None, 5])
def test_wrong_mesh_name_is_refused(name: Any, procs: ProcMesh, alive: None) -> None:
    with pytest.raises((ValueError, TypeError), match="name"):
        procs.spawn(name, Victim)


def test_named_actor_of_another_class_is_refused(faults: Faults) -> None:
    first = get_or_spawn_controller("the only one", Victim).get(PATIENCE)
    assert get_or_spawn_controller("the only one", Victim).get(PATIENCE).echo.call_one(1).get(PATIENCE) == 1
    with pytest.raises(TypeError, match=r"'the only one' is a Victim, not a Returns.*another name"):
        get_or_spawn_controller("the only one", Returns).get(PATIENCE)
    first.stop().get(PATIENCE)


# Processes


@pytest.mark.parametrize("count", [0, -1])
def test_mesh_of_zero_processes_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="gpus"):
        this_host().spawn_procs({"gpus": count})


@pytest.mark.parametrize("wrong", [{"gpus": 1.5}, {"gpus": "2"}, {3: 2}, {"": 2}, {"gp us": 2}, 8, "gpus"], ids=str)
def test_wrong_extent_is_refused(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        this_host().spawn_procs(wrong)


def test_ten_thousand_processes_raise_a_limit_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole spawn is refused at once.

    Each process is assumed to need 1 TiB, so that no machine has enough memory.
    """
    monkeypatch.setattr(resource_limits, "MEMORY_BYTES_PER_PROCESS", 1 << 40)
    monkeypatch.setattr(resource_limits, "MEMORY_EACH_SPAWNED", 1 << 40)
    text = r"can't start 10000 processes: they need \d+ MiB of memory, and .* leaves \d+\. Start at most \d+, or raise"
    start = time.monotonic()
    with pytest.raises(resource_limits.SpawnLimitError, match=text):
        this_host().spawn_procs({"hosts": 10, "gpus": 1000})
    assert time.monotonic() - start < 5.0


def test_taken_dimension_name_is_refused() -> None:
    hosts = HostMesh(Shape.of(Extent(("gpus",), (1,))))
    with pytest.raises(ValueError, match="the hosts have a dimension 'gpus' already: give per_host another name"):
        hosts.spawn_procs({"gpus": 1})


BINDINGS: dict[str, tuple[Any, str]] = {
    "no such way": ("sockets", 'give "cores", "numa"'),
    "too few": ([[0]], "proc_bind has cpus for 1 processes, and 2 are to be spawned"),
    "not ours": ([[0], [9999]], "proc_bind of process 1: cpus 9999 can't be used"),
    "no numbers": ([[0], "first"], "proc_bind of process 1 is 'first'"),
    "none": ([[0], []], "proc_bind of process 1 has no cpu in it"),
    "a number": (3, "proc_bind=3"),
}


@pytest.mark.parametrize("kind", BINDINGS)
def test_wrong_proc_bind_is_refused(kind: str) -> None:
    wrong, text = BINDINGS[kind]
    with pytest.raises(ValueError, match=re.escape(text)):
        this_host().spawn_procs({"gpus": 2}, proc_bind=wrong)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"strategy": "some"}, "it must be 'one_for_one' or 'all'"),
        ({"max_restarts": -1}, "must not be negative"),
        ({"within": 0}, "within must be above 0"),
        ({"backoff": -0.1}, "must not be negative"),
        ({"backoff": 2.0, "most_backoff": 1.0}, "most_backoff at least backoff"),
    ],
)
def test_wrong_restart_policy_value_is_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Restart(**wrong)


@pytest.mark.parametrize("wrong", ["always", True, 3], ids=str)
def test_non_policy_is_refused(wrong: Any, procs: ProcMesh, alive: None) -> None:
    for spawn in (
        lambda: procs.spawn("wrong", Victim, restart=wrong),
        lambda: this_host().spawn_procs({"gpus": 1}, restart=wrong),
    ):
        with pytest.raises(TypeError, match=r"restart=.*Restart\("):
            spawn()


def test_wrong_bootstrap_and_environment_are_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match="bootstrap"):
        this_host().spawn_procs({"gpus": 1}, bootstrap=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="bootstrap"):
        this_host().spawn_procs({"gpus": 1}, bootstrap=lambda: lock.acquire())
    with pytest.raises(TypeError, match="DEPTH"):
        this_host().spawn_procs({"gpus": 1}, env={"DEPTH": 3})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="A=B"):
        this_host().spawn_procs({"gpus": 1}, env={"A=B": "c"})


def test_wrong_log_options_are_refused(faults: Faults, capfd: pytest.CaptureFixture[str]) -> None:
    with this_host().spawn_procs({"gpus": 1}) as procs:
        victim = procs.spawn("victim", Victim)
        with pytest.raises(ValueError, match="LOUD"):
            procs.logging_option(level="LOUD")
        with pytest.raises(ValueError, match="aggregate_window_sec"):
            procs.logging_option(aggregate_window_sec=-1)
        victim.echo.call_one(1).get(PATIENCE)
        program().flush_logs()
    assert capfd.readouterr() == ("", ""), "the workers hear nothing of it"


# Blocking waits inside an event loop


def test_get_in_a_running_loop_warns(one: ActorMesh, alive: None, tmp_path: Path) -> None:
    async def holds_the_loop_up(name: str, open_gate: Callable[[], None]) -> Any:
        future = one.wait.call_one(None, name)
        with pytest.warns(RuntimeWarning, match="await the future instead"), pytest.raises(TimeoutError):
            future.get(0.001)
        open_gate()
        return await future

    with gate(tmp_path) as (name, open_gate):
        assert asyncio.run(holds_the_loop_up(name, open_gate)) == "waited"

    async def does_not() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return await one.echo.call_one(2)

    assert asyncio.run(does_not()) == 2


def test_wait_in_a_callback_is_refused(one: ActorMesh, alive: None) -> None:
    caught: list[BaseException | None] = []
    there = threading.Event()

    def callback(_: Any) -> None:
        try:
            one.echo.call_one(2).get(PATIENCE)
            caught.append(None)
        except BaseException as error:
            caught.append(error)
        there.set()

    port, receiver = Channel.open()
    future = one.pid.call_one()
    future.add_done_callback(callback)
    future.get(PATIENCE)
    assert there.wait(PATIENCE)
    receiver.close()
    assert port is not None
    assert caught[0] is None or (isinstance(caught[0], RuntimeError) and "use another thread" in str(caught[0]))


def test_wrong_timeout_is_refused(one: ActorMesh, alive: None) -> None:
    for wrong in (-1, "soon"):
        with pytest.raises((ValueError, TypeError), match="timeout"):
            one.echo.options(timeout=wrong)  # type: ignore[arg-type]


def test_wait_after_a_timeout_can_be_repeated(one: ActorMesh, tmp_path: Path, alive: None) -> None:
    with gate(tmp_path) as (name, open_gate):
        future = begun(one.wait.call_one, name)
        for _ in range(2):
            with pytest.raises(TimeoutError, match=r"no answer within 0.01 s; the call goes on, see Future.cancel"):
                future.get(0.01)
        open_gate()
        assert future.get(PATIENCE) == "waited"


def test_stop_of_the_mesh_of_this_process_is_refused() -> None:
    for how in ("stop", "abort", "kill"):
        with pytest.raises(RuntimeError, match=r"this process|only the program or actor that has spawned"):
            getattr(this_proc(), how)()
    assert os.getpid()
