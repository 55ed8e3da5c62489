"""Serialization of exceptions, also when the class, an argument or the receiver causes a problem."""

from __future__ import annotations

import asyncio
import errno
import json
import subprocess
import sys
import threading
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from monarch_backend._serialization import exceptions, pickling
from monarch_backend._serialization.exceptions import pack_exception, remote_traceback, unpack_exception
from monarch_backend._serialization.pickling import DeserializationError, SerializationError, dumps, loads
from tests.support.ranks import run_script

needs_groups = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no exception groups")


def sent(exc: BaseException) -> BaseException:
    return unpack_exception(pack_exception(exc))


def raised(exc: BaseException) -> BaseException:
    try:
        raise exc
    except BaseException as caught:
        return caught


class Plain(Exception):
    pass


class Doubling(Exception):
    """pickle would call its __init__ with the finished text."""

    def __init__(self, code: int) -> None:
        super().__init__(f"failed with {code}")
        self.code = code


class TwoArguments(ValueError):
    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} at {where}")
        self.where = where


class KeywordOnly(RuntimeError):
    def __init__(self, *, reason: str) -> None:
        self.reason = reason

    def __str__(self) -> str:
        return f"because {self.reason}"


class OwnErrno(OSError):
    def __init__(self, number: int) -> None:
        super().__init__(number, "own text", "file")
        self.number = number


class OwnReduce(Exception):
    """Replaces itself by another exception when pickled."""

    def __init__(self, secret: str) -> None:
        super().__init__(secret)

    def __reduce__(self) -> Any:
        return RuntimeError, ("without the secret",)


class Unloadable(LookupError):
    def __reduce__(self) -> Any:
        return _explode, (str(self),)


class Unsendable(TwoArguments):
    def __reduce__(self) -> Any:
        raise ValueError("no")


def _explode(text: str) -> None:
    raise ValueError(text)


class NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class BadRepr:
    def __reduce__(self) -> Any:
        raise ValueError("no")

    def __repr__(self) -> str:
        raise ValueError("no")


def decoding() -> UnicodeDecodeError:
    return UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


FAITHFUL: list[Callable[[], BaseException]] = [
    lambda: Plain(),
    lambda: Plain("text", 1, {"k": [2]}),
    lambda: KeyError("k"),
    lambda: StopIteration(5),
    lambda: SystemExit(3),
    lambda: KeyboardInterrupt(),
    lambda: asyncio.CancelledError("stop"),
    lambda: asyncio.TimeoutError(),
    lambda: OSError(errno.ENOENT, "No such file", "here"),
    lambda: ConnectionResetError(errno.ECONNRESET, "reset"),
    lambda: ImportError("no", name="module"),
    lambda: SyntaxError("bad", ("file.py", 3, 7, "x =", 3, 8)),
    decoding,
    lambda: json.JSONDecodeError("Expecting value", "{", 1),
    lambda: subprocess.CalledProcessError(2, ["ls"], b"out", b"err"),
    lambda: urllib.error.HTTPError("http://x", 404, "Not Found", None, None),  # type: ignore[arg-type]
    lambda: torch.OutOfMemoryError("out of memory"),
    lambda: torch.distributed.DistBackendError("NCCL"),
    lambda: Doubling(5),
    lambda: TwoArguments("a", "b"),
    lambda: KeywordOnly(reason="why"),
    lambda: OwnErrno(errno.EPERM),
    lambda: SerializationError("can't", "args[0]"),
]


def fields(exc: BaseException) -> dict[str, Any]:
    names = (
        "errno",
        "strerror",
        "filename",
        "code",
        "value",
        "name",
        "path",
        "lineno",
        "text",
        "start",
        "object",
        "reason",
    )
    return {name: getattr(exc, name) for name in names if hasattr(exc, name)}


@pytest.mark.parametrize("make", FAITHFUL, ids=lambda make: type(make()).__name__)
def test_type_arguments_text_and_attributes_arrive(make: Callable[[], BaseException]) -> None:
    exc = raised(make())
    got = sent(exc)
    assert type(got) is type(exc)
    assert (str(got), got.args, fields(got)) == (str(exc), exc.args, fields(exc))
    assert vars(got).keys() == vars(exc).keys()
    assert got.__traceback__ is None
    assert str(sent(got)) == str(exc)  # sent a second time


def test_attributes_and_notes() -> None:
    exc = Plain("p")
    exc.detail = {"tensor": torch.arange(3)}  # type: ignore[attr-defined]
    exc.__notes__ = ["one", "two"]  # type: ignore[attr-defined] # as add_note does from Python 3.11 on
    got: Any = sent(exc)
    assert got.detail["tensor"].tolist() == [0, 1, 2]
    assert got.__notes__ == ["one", "two"]


def test_causes_and_contexts() -> None:
    def fail() -> None:
        try:
            try:
                raise KeyError("first")
            except KeyError:
                raise ValueError("second")  # noqa: B904 # the context is what is tested
        except ValueError as error:
            raise RuntimeError("third") from error

    with pytest.raises(RuntimeError) as caught:
        fail()
    got = sent(caught.value)
    second = got.__cause__
    assert isinstance(second, ValueError)
    assert got.__context__ is second
    assert got.__suppress_context__
    assert second.__cause__ is None
    assert isinstance(second.__context__, KeyError)
    assert not second.__suppress_context__


def test_from_none_stays_from_none() -> None:
    try:
        try:
            raise KeyError("hidden")
        except KeyError:
            raise ValueError("shown") from None
    except ValueError as error:
        got = sent(error)
    assert (got.__cause__, got.__suppress_context__) == (None, True)
    assert isinstance(got.__context__, KeyError)


def test_cyclic_exception_chain_arrives() -> None:
    first, second = Plain("1"), Plain("2")
    first.__cause__, second.__cause__ = second, first
    got = sent(first)
    assert got.__cause__ is not None
    assert got.__cause__.__cause__ is got


def test_of_a_very_long_chain_the_nearest_part_arrives() -> None:
    exc = Plain("0")
    for n in range(1, 3000):
        new = Plain(str(n))
        new.__context__ = exc
        exc = new
    got: BaseException | None = sent(exc)
    texts = []
    while got is not None:
        texts.append(str(got))
        got = got.__context__
    assert texts == [str(2999 - i) for i in range(200)]


@needs_groups
def test_groups() -> None:
    inner = ExceptionGroup("inner", [raised(KeyError("k")), Doubling(3)])  # noqa: F821
    inner.exceptions[0].__cause__ = OSError(1, "cause")
    group = ExceptionGroup("outer", [inner, Plain(threading.Lock()), NoText("x")])  # noqa: F821
    group.__notes__ = ["note"]
    group.extra = 5  # type: ignore[attr-defined]
    got: Any = sent(group)
    assert (type(got), str(got), got.__notes__, got.extra) == (type(group), str(group), ["note"], 5)
    assert [type(e) for e in got.exceptions] == [type(inner), Plain, NoText]
    assert [type(e) for e in got.exceptions[0].exceptions] == [KeyError, Doubling]
    assert str(got.exceptions[0].exceptions[0].__cause__) == "[Errno 1] cause"
    matched, rest = got.split(KeyError)
    assert len(matched.exceptions) == 1
    assert len(rest.exceptions) == 3


@needs_groups
def test_groups_of_other_classes() -> None:
    class Odd(ExceptionGroup):  # type: ignore[misc, name-defined, valid-type] # noqa: F821
        def __new__(cls, number: int) -> Any:
            return super().__new__(cls, f"number {number}", [ValueError(number)])

    got: Any = sent(Odd(3))
    assert isinstance(got, ExceptionGroup)  # type: ignore[misc] # noqa: F821
    assert (type(got).__name__, str(got)) == ("Odd", str(Odd(3)))
    assert [str(e) for e in got.exceptions] == ["3"]
    again = sent(got)
    assert (str(again), [str(e) for e in again.exceptions]) == (str(got), ["3"])  # type: ignore[attr-defined]
    stop: Any = sent(BaseExceptionGroup("b", [KeyboardInterrupt()]))  # noqa: F821
    assert type(stop.exceptions[0]) is KeyboardInterrupt


def test_unpicklable_exceptions_are_sent_as_text() -> None:
    lock = threading.Lock()
    exc = Plain("broken", lock)
    exc.lock, exc.fine, exc.bad = lock, [1], BadRepr()  # type: ignore[attr-defined]
    got: Any = sent(exc)
    assert type(got) is Plain
    assert str(got) == str(exc)
    assert (got.args[0], repr(got.args[1]), repr(got.lock)) == ("broken", repr(lock), repr(lock))
    assert got.fine == [1]
    assert repr(got.bad) == "<BadRepr>"


def test_a_class_that_cannot_be_pickled_has_its_nearest_base_stand_in() -> None:
    lock = threading.Lock()

    class Local(TwoArguments):
        held = lock

    got: Any = sent(Local("a", "b"))
    assert isinstance(got, TwoArguments)
    assert (type(got).__name__, str(got), got.args) == ("Local", "a at b", ("a at b",))
    for again in (sent(got), loads(*dumps(got))):
        assert isinstance(again, TwoArguments)
        assert (type(again).__qualname__, str(again)) == (type(got).__qualname__, "a at b")
    assert "Local: a at b" in remote_traceback(got)


@pytest.mark.parametrize("base", [KeyError, OSError, decoding().__class__, SyntaxError, SystemExit, StopIteration])
def test_stand_ins_of_built_in_classes_keep_the_text(base: type[BaseException]) -> None:
    class Local(base):  # type: ignore[misc, valid-type]
        held = threading.Lock()

        def __init__(self) -> None:
            pass

        def __str__(self) -> str:
            return "own text"

    got = sent(Local.__new__(Local))
    assert isinstance(got, base)
    assert str(got) == "own text"


def test_a_class_defined_locally_arrives_whole_and_is_the_same_here() -> None:
    class Local(Exception):
        def __init__(self, code: int) -> None:
            super().__init__(f"code {code}")
            self.code = code

        def more(self) -> int:
            return self.code + 1

    method = Local.more
    got = sent(Local(4))
    assert type(got) is Local
    assert (got.code, got.more(), str(got)) == (4, 5, "code 4")
    assert Local.more is method


def test_a_reduce_of_its_own_is_respected() -> None:
    got = sent(OwnReduce("password"))
    assert type(got) is RuntimeError
    assert str(got) == "without the secret"
    assert b"password" in pack_exception(Plain("password"))


@pytest.mark.parametrize("make", [lambda: Unloadable("x"), lambda: Unsendable("x", "y")])
def test_exception_with_a_failing_reduce_arrives(make: Callable[[], BaseException]) -> None:
    exc = make()
    got = sent(exc)
    assert type(got) is type(exc)
    assert (str(got), vars(got)) == (str(exc), vars(exc))


def test_an_exception_without_a_text() -> None:
    got = sent(NoText("args"))
    assert type(got) is NoText
    assert got.args == ("args",)
    assert "ValueError" in exceptions._text(got)


def test_deeply_nested_arguments() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    exc = Plain("deep")
    exc.deep = deep  # type: ignore[attr-defined]
    got = sent(exc)
    assert (type(got), str(got)) == (Plain, "deep")
    while deep:
        deep = deep.pop()


SENDER = """
import sys
from monarch_backend._serialization.exceptions import pack_exception
from only_at_the_sender import Base, Derived

class Mine(ValueError):
    def __init__(self, a, b): super().__init__(f"{a} and {b}"); self.a = a
    def double(self): return self.a * 2

class Further(Mine): pass

try:
    try:
        Derived.fail()
    except Derived as error:
        raise Further(1, 2) from error
except Further as error:
    open(sys.argv[1], "wb").write(pack_exception(error))
"""

RECEIVER = """
import sys
from monarch_backend._serialization.exceptions import pack_exception, unpack_exception
got = unpack_exception(open(sys.argv[1], "rb").read())
assert (type(got).__name__, str(got), got.double(), type(got).__mro__[2]) == ("Further", "1 and 2", 2, ValueError), got
cause = got.__cause__
assert isinstance(cause, LookupError) and type(cause).__name__ == "Derived", type(cause).__mro__
assert (str(cause), cause.__notes__) == ("'gone'", ["a note"])
assert type(unpack_exception(pack_exception(cause))).__module__ == "only_at_the_sender"
print("ok")
"""

MODULE = """
class Base(KeyError): pass
class Derived(Base):
    @classmethod
    def fail(cls):
        error = cls("gone")
        error.__notes__ = ["a note"]
        raise error
"""


def test_between_processes_where_the_receiver_lacks_a_module(tmp_path: Path) -> None:
    for name, text in {"sender/s.py": SENDER, "sender/only_at_the_sender.py": MODULE, "r.py": RECEIVER}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    message = str(tmp_path / "message")
    command = [sys.executable, str(tmp_path / "sender" / "s.py"), message]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert run_script(str(tmp_path / "r.py"), message) == "ok\n"


@pytest.mark.parametrize("data", [b"", b"garbage", b"\x80\x05].", b"\x80\x05K\x01.", b"\x80\x05]K\x01a."])
def test_bytes_that_are_no_exception(data: bytes) -> None:
    with pytest.raises(DeserializationError, match=f"these {len(data)} bytes are no packed exception"):
        unpack_exception(data)


def test_every_cut_of_the_bytes_is_an_error() -> None:
    data = pack_exception(raised(Doubling(3)))
    for cut in range(len(data)):
        with pytest.raises(DeserializationError):
            unpack_exception(data[:cut])


# --- tracebacks


def users_code() -> None:
    raise Doubling(7)  # the line to be seen


def users_chain() -> None:
    try:
        users_code()
    except Doubling as error:
        raise KeyError("chained") from error


def as_if_ours(function: Callable[[], None], filename: str) -> Callable[[], None]:
    """Return a function that calls ``function`` in a frame with this file name."""
    namespace: dict[str, Any] = {"function": function}
    exec(compile("def endpoint_loop():\n    function()\n", filename, "exec"), namespace)
    loop: Callable[[], None] = namespace["endpoint_loop"]
    return loop


OURS = str(Path(pickling.__file__).parents[1] / "_actor" / "loop.py")


def test_the_traceback_starts_with_the_users_frames() -> None:
    with pytest.raises(KeyError) as caught:
        as_if_ours(users_chain, OURS)()
    assert caught.value.__traceback__ is not None
    caught.value.__traceback__ = caught.value.__traceback__.tb_next  # drops this test's own frame
    text = remote_traceback(caught.value)
    assert "endpoint_loop" not in text
    assert text.count("in users_code") == 1
    assert "raise Doubling(7)  # the line to be seen" in text
    assert "direct cause" in text
    assert text.endswith("KeyError: 'chained'\n")


def test_frames_of_ours_in_the_middle_and_of_others_stay() -> None:
    def inner() -> None:
        as_if_ours(users_code, OURS)()

    with pytest.raises(Doubling) as caught:
        as_if_ours(inner, OURS)()
    text = remote_traceback(caught.value)
    assert "endpoint_loop" in text
    with pytest.raises(Doubling) as caught:
        as_if_ours(users_code, "/elsewhere/monarch_backend_user/loop.py")()
    caught.value.__traceback__ = caught.value.__traceback__.tb_next  # type: ignore[union-attr]
    assert "endpoint_loop" in remote_traceback(caught.value)


def test_an_error_of_our_own_keeps_its_frames() -> None:
    with pytest.raises(SerializationError) as caught:
        dumps(threading.Lock())
    caught.value.__traceback__ = caught.value.__traceback__.tb_next  # type: ignore[union-attr]
    text = remote_traceback(caught.value)
    assert "_serialization/pickling.py" in text
    assert "cannot pickle '_thread.lock' object" in text


@needs_groups
def test_tracebacks_of_groups() -> None:
    with pytest.raises(Doubling) as caught:
        as_if_ours(users_code, OURS)()
    caught.value.__traceback__ = caught.value.__traceback__.tb_next  # type: ignore[union-attr]
    text = remote_traceback(ExceptionGroup("g", [caught.value]))  # noqa: F821
    assert "endpoint_loop" not in text
    assert "in users_code" in text


def test_an_exception_that_was_never_raised() -> None:
    assert remote_traceback(Plain("p")).endswith("Plain: p\n")
    assert "NoText" in remote_traceback(NoText())
