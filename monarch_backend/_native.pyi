from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

def boot_id() -> str:
    """Identity of the running kernel; empty where it has none."""

def ipc_namespace() -> str:
    """Identity of this process's IPC namespace; empty where there are none."""

def kernel_features() -> dict[str, bool]:
    """Abilities of the kernel, each tried: memfd_create, pidfd_open, process_vm_readv, futex."""

def cpu_features() -> list[str]:
    """Vector extensions of this processor that the core can use, named as in /proc/cpuinfo."""

def park_threads_at_exit() -> None:
    """From now on a C++ thread that wants the GIL of an ending interpreter sleeps instead of aborting the process."""

def explain_absent_memory(note: str) -> None:
    """From now on a process that ends since it used memory that is elsewhere, or address 0, says this on stderr before,
    with its pid and the address. Again: if another handler has come since."""

def set_up_tensor_address(tensor: type, forbid_writing: Callable[[Any], object], error: type[Exception], /) -> None:
    """``error``: what is raised, without arguments, in the thread that used an address, or in the main thread if that
    one has not the GIL."""

def reserve_tensor_address(to_impl: int, to_storage: int, to_address: int, to_resizable: int, /) -> bool:
    """From now on `no_pointer` gives tensors the address of memory that is elsewhere; whether there is one.

    ``to_...``: how many bytes into a tensor its C++ part stands, into that its storage, into that the address, and
    whether it can be resized."""

def close_absent_memory() -> None:
    """What was used is told again when it is used again; what was written there is gone."""

def unraisable_hook(report: Callable[[Any], object], /) -> Callable[[Any], object]:
    """For `sys.unraisablehook`: raises the error again in that thread, as soon as Python looks. Reports others.

    In C, for in a function of Python's it would be raised there."""

def no_pointer(tensor: Any, /) -> None:
    """Who wants to write a tensor's memory gets an error of torch's, and so does who resizes it; uses are told."""

def without_address(tensor: Any, /) -> None:
    """Until `no_pointer`: torch may change the tensor's sizes."""

def skip_mt19937(words: bytearray | memoryview, left: int, count: int) -> int:
    """Moves a Mersenne Twister's 624 words, changed in place, behind so many draws; returns how many are left then."""

def keep_for_ever(instance: object, /) -> None:
    """Never free this object, also not while the interpreter ends."""

# csrc/records/: what a record costs, on the controller and on a worker; see monarch_backend/dtensor.

def set_up_places(
    is_internal: Callable[[CodeType], bool], number_of: Callable[[tuple[tuple[CodeType, int], ...]], int], /
) -> None:
    """Who is asked about each code object once, and about each place."""

def place_here() -> int:
    """The number of the place in the program that runs now: its innermost frames that are not internal."""

class Sink:
    """Where the words of a set of workers go."""

    limit: int
    """In words: more are a batch."""
    records: int
    """So many have been written."""
    made: int
    """Bytes of results since what is unreachable was last deleted."""
    most: int
    """From so many on it is deleted before the next record."""
    debug: bool
    """Each record is a batch."""

    def __init__(
        self, words: list[Any], unreachable: list[int], ids: Iterator[int], wake: Callable[[], object],
        full: Callable[[], object], limit: int, /,
    ) -> None: ...  # fmt: skip

class Ref:
    """The workers' id of a tensor: in ``workers.unreachable`` when nobody has it any more."""

    workers: Any
    id: int
    nbytes: Any

    def __init__(self, workers: Any, number: int, /) -> None: ...

class Entry:
    """What is known of a signature."""

    workers: Any
    number: int
    kind: int
    outs: tuple[Any, ...]
    sequence: type
    returns: Callable[[Any, Any], Any] | None
    host: Any
    parts: list[int]
    at: int
    @property
    def used(self) -> int: ...

class Plan:
    """What is known of an operator. ``scalars``, ``names``: see `_signatures.scalars_of`."""

    entries: dict[Any, Entry]
    target: Any
    special: Callable[[Any, Any, Any], Any] | None

    def __init__(self, target: Any, special: Any, scalars: int, names: frozenset[str], /) -> None: ...

def set_up_issue(
    tensor: type, make: Callable[..., Any], no_pointer: Callable[[Any], object], is_inference: Callable[[], bool],
    constants: tuple[type, ...], part: Callable[[Any], Any], not_plain: type[Exception],
    with_host_tensors: Callable[[Plan, Any, Any], Any], missing: Callable[[Plan, Any, Any, Any, Any], Entry],
    plan_of: Callable[[Any], Plan], yes: object, no: object, /,
) -> None:  # fmt: skip
    """What is asked of Python."""

def dispatch(func: Any, args: Any, kwargs: Any, /) -> Any:
    """An operator's result, as remote tensors."""

def issue(plan: Plan, args: Any, kwargs: Any, workers: Any, /) -> Any:
    """As dispatch, of the plain operation. ``workers``: of one without tensors among its arguments, else None."""

class Call:
    """A function and its arguments, which are ("constant", value), ("tensor", at), ("number", at), ("list", [...])."""

    function: Callable[..., Any]

    def __init__(
        self, function: Callable[..., Any], arguments: list[Any], names: tuple[str, ...], operands: int, results: int,
        kind: int, writes: bool, /,
    ) -> None: ...  # fmt: skip
    def run(self, tensors: Any, words: list[Any], i: int, /) -> None:
        """Execute the record at ``words[i]``."""

    def given(self, tensors: Any, words: list[Any], i: int, /) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the function is given for it."""

def execute(
    words: list[Any], i: int, calls: dict[int, Call], tensors: dict[int, Any], pending: dict[int, Any],
    cursor: list[int], /,
) -> int:  # fmt: skip
    """Execute records from ``words[i]`` on; returns where one is that is not among the calls, or has to wait.

    Raises what a call raises; then ``cursor[0]`` says where its record is.
    """

class Peer:
    """Another process of this host, which may have ended since we met. Linux only, as all below."""

class Host:
    """This process among those of its host: its arena and its peers."""

    def __init__(self, arena_bytes: int, token: str = "") -> None:
        """``token``: its name, 32 hexadecimal digits, if somebody else has chosen one."""

    def tether(self, token: str, /) -> bool:
        """Die with the peer of this token, at once; False if it is not there any more."""

    @property
    def token(self) -> str:
        """The name under which this process listens."""

    def connect(self, token: str, seconds: float = 1.0) -> Peer | None:
        """Connect to the process with this token and exchange arenas.

        None if it can't be reached from here, or is there and does not answer for so many seconds.
        """

    def accepted(self, token: str, seconds: float, /) -> Peer | None:
        """Wait until the process with this token has connected to us; None if it has not within ``seconds``."""

    def make_board(self, size: int, /) -> int:
        """Room in the arena for one rank of a group of ``size``; its offset, or 0 when the arena is full."""

    def drop_board(self, board: int, /) -> None:
        """Give back a board that no group came of."""

    def used(self) -> int:
        """Bytes of the arena in use."""

    def size(self) -> int:
        """Bytes of the arena."""

    def leave(self) -> None:
        """Tell the peers that this process ends in peace."""

    def abandon(self) -> None:
        """In a forked child: give up what belongs to the parent, without a word to the peers."""

class Room:
    """Writable memory of the arena, by the buffer protocol, for as long as this object lives."""

    def __init__(self, host: Host, size: int) -> None:
        """Raises MemoryError where the arena has no room for it in one piece."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

_Spans = list[tuple[int, int]]  # address, bytes
_Fault = tuple[str, int, str]  # dead, left, late, mismatch or closed; rank of the culprit or -1; what happened

class Operation:
    """An operation under way."""

    @property
    def done(self) -> bool:
        """True once it has ended, with a fault or without."""

    @property
    def source(self) -> int:
        """Of a receive: the rank that sent."""

    def forget(self) -> None:
        """Let go of the owner of the memory: somebody else keeps it."""

    @property
    def fault(self) -> _Fault | None:
        """Why it failed, once it is done."""

def collectives() -> tuple[tuple[str, bool, bool], ...]:
    """Of each collective the name, whether it has a root, and whether it reduces."""

class ShmGroup:
    """A group of ranks on this host."""

    def __init__(
        self, host: Host, rank: int, peers: list[Peer | None], boards: list[int], read_from: int, label: str
    ) -> None:
        """``read_from``: bytes from which it reads its peers' memory, 0 for never; ``label``: how lines on stderr about
        the ways that operations take begin, "" for none."""

    def run(
        self,
        collective: int,
        dtype: int,
        op: int,
        root: int,
        size: int,
        ins: _Spans,
        outs: _Spans,
        seconds: Callable[[object], float],
        options: object,
        /,
    ) -> Operation | None:
        """Run an operation on this thread; None if it ended well. One that is late is given ``seconds(options)``."""

    @property
    def sequence(self) -> int:
        """How many collectives there have been."""

    def shortcut(
        self,
        collective: int,
        form: int,
        owner: object,
        name: str,
        options: type,
        work: type,
        failed: Callable[[Operation, list[object]], object],
        seconds: Callable[[object], float],
        torch: tuple[object, ...],
        /,
    ) -> Any:
        """A callable for the method ``name`` of ``owner``, which does what most callers want with no Python in between.

        It returns a ``work()``, or what ``failed`` returns. ``torch`` is as in csrc/shm/python/fast_paths.h. After
        ``end()`` it forwards every call.
        """

    def message(
        self, sends: bool, dtype: int, other: int, tag: int, address: int, size: int, owner: object, /
    ) -> Operation:
        """Begin to send to or receive from a rank, -1: any; it may have ended already. Keeps ``owner`` meanwhile."""

    def finish(self, operation: Operation, seconds: float, /) -> _Fault | None:
        """Wait until an operation of this thread is done; it fails after ``seconds``."""

    def wait(self, operation: Operation, seconds: float, /) -> bool:
        """Help an operation along until it is done; False after ``seconds``."""

    def set_reason(self, text: str, /) -> None:
        """Say why this rank is about to close the group or to end; at most 255 bytes, for the errors of the others."""

    def close(self) -> None:
        """End the group for this rank; operations under way fail."""

class Engine:
    """The progress thread of asynchronous operations."""

    def __init__(self, host: Host) -> None: ...
    def start(
        self,
        group: ShmGroup,
        collective: int,
        dtype: int,
        op: int,
        root: int,
        size: int,
        ins: _Spans,
        outs: _Spans,
        seconds: float,
        then: Callable[[], object],
        /,
    ) -> Operation:
        """Start an operation; ``then`` is called from the progress thread when it is done."""

    def submit_async(
        self, group: ShmGroup, operation: Operation, seconds: float, then: Callable[[], object], /
    ) -> None:
        """Do the same for an operation that has begun."""

    def stop(self) -> None:
        """End the thread; what is under way stays as it is."""

class Block:
    """A message's memory in its sender's arena; has the buffer protocol. Given back when nobody holds it."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

class Post:
    """Frames to and from the other processes of this host, and the turn to read them."""

    def __init__(self, host: Host, crowded: bool, share: int = ...) -> None: ...
    def connect(self, token: str, /) -> int:
        """The link to the process with this token; -1 if it can't be reached, -2 if it does not answer yet."""

    def send(
        self,
        link: int,
        kind: int,
        target: int,
        ref: int,
        seq: int,
        rank: int,
        epoch: int,
        prefix: bytes,
        body: Any,
        buffers: Sequence[Any] | None,
        /,
    ) -> bool:
        """A frame; False if there is no room for its payload now, and nothing was sent. Never waits."""

    def cast(
        self,
        to: list[tuple[int, int, int, int]],
        kind: int,
        target: int,
        ref: int,
        prefix: bytes,
        body: Any,
        buffers: Sequence[Any] | None,
        /,
    ) -> bool:
        """The same frame to many, each (link, seq, rank, epoch); its payload is copied once."""

    def drop(self, link: int, /) -> None:
        """Send nothing more on this link."""

    def take(self) -> bool:
        """Take the turn to read, from the standby if need be; False if another reader has it."""

    def pass_on(self) -> None:
        """Give up the turn."""

    def receive(self, seconds: float | None, standby: bool = False) -> list[Any]:
        """With the turn: what has come. Empty after so many seconds, after `wake`, after a signal.

        Frames are (link, kind, target, ref, seq, rank, epoch, prefix, body, buffers); a process that was met is
        (link, -1, token, pid), one that is gone (link, -2, how it ended, whether in peace).
        """

    def stand_by(self) -> bool:
        """Wait until nobody else reads, and take the turn; False once closed."""

    def wanted(self) -> bool:
        """A reader waits for the standby to go."""

    def unread(self, link: int, /) -> int:
        """Bytes of frames that the receiver has not read yet."""

    def wake(self) -> None:
        """Whoever reads returns."""

    def close(self) -> None:
        """The standby returns for good."""

    def crowd(self, crowded: bool, /) -> None:
        """Whether there are more processes than processors, so that waiting must not spin."""

    def kept_back(self) -> int:
        """Bytes of frames that wait for room in a ring."""

_Ticket = tuple[int, int, int]  # slot, epoch, key
_Segments = Sequence[tuple[int, int, int]]  # offset in the registration, local address, bytes

class Patient:
    """What ends a transfer before its time: a deadline in so many seconds, a cancellation."""

    def __init__(self, seconds: float | None = None) -> None: ...
    def cancel(self) -> None: ...
    def over(self) -> int:
        """The Outcome that a transfer has now: of lateness, of cancellation, or 0."""

class View:
    """Memory that an object with the buffer protocol lends, for as long as this lives."""

    def __init__(self, lender: object) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def readonly(self) -> bool: ...
    @property
    def contiguous(self) -> bool: ...

class Memory:
    """Memory that this process has registered, and its ways to that of others on this host."""

    def __init__(self, host: Host, kernel: bool = True, ipc: bool = True, threads: int = 1) -> None:
        """``threads``: how many of this process make one large copy."""

    def add(self, address: int, nbytes: int, writable: bool) -> _Ticket: ...
    def drop(self, ticket: _Ticket, seconds: float) -> int: ...
    def user_of(self, ticket: _Ticket) -> int: ...
    def check(self, ticket: _Ticket, offset: int, nbytes: int, access: int) -> int:
        """A Refusal, 0 for none."""

    def count(self) -> int: ...
    def move(
        self,
        token: str,
        ticket: _Ticket,
        write: bool,
        segments: _Segments,
        patient: Patient,
    ) -> tuple[int, int, int, int, str]: ...
    def at_once(self, token: str, ticket: _Ticket, write: bool, offset: int, local: int, nbytes: int) -> bool:
        """True if it is done; False if somebody is needed for it, or it failed: `move` says why."""

    def change(
        self,
        token: str,
        ticket: _Ticket,
        access: int,
        offset: int,
        operand: int,
        expected: int,
        patient: Patient,
    ) -> tuple[int, int, int, int, str]: ...
    def move_here(self, ticket: _Ticket, write: bool, segments: _Segments) -> tuple[int, int, int, int, str]: ...
    def change_here(
        self, ticket: _Ticket, access: int, offset: int, operand: int, expected: int
    ) -> tuple[int, int, int, int, str]: ...
    def way(self, token: str, ticket: _Ticket) -> int:
        """A Way; -1 of a process that this one has not met yet."""

    def why_not_mapped(self, token: str, ticket: _Ticket) -> str:
        """Of memory of a GPU, for people; empty where nothing is known to be in the way."""

    def lend(self, token: str, ticket: _Ticket, address: int) -> bool:
        """That memory of a GPU is mapped here, by the caller, until it is `returned`; False if its owner is not met."""

    def returned(self) -> list[tuple[str, int, int]]:
        """Token, slot and epoch of what was lent and nobody uses any more; each is told once."""

    def sweep(self) -> None:
        """Unmap other processes' GPU memory that was dropped, or whose process is gone."""

    def mapped(self) -> int:
        """Other processes' allocations of GPUs that are mapped here, or that the driver has refused to map."""

class GpuFailure(RuntimeError):
    """What the driver of a GPU has refused."""

def gpu_open() -> None:
    """Open the driver, CUDA's or HIP's. Raises GpuFailure where there is none. Twice is as good as once."""

def gpu_library() -> str:
    """The driver's library that was opened, or an empty string."""

def gpu_device_of(address: int) -> int:
    """The number of the GPU whose memory that is, -1 for none; before gpu_open nobody has any."""

def gpu_allocation_of(address: int) -> tuple[int, int]:
    """Address and bytes of the allocation that this lies in. Raises GpuFailure."""

def gpu_wait_for_stream(device: int, stream: int) -> None:
    """Until it is done with what it was asked for. Raises GpuFailure."""

def gpu_dma_buf(address: int, nbytes: int) -> int:
    """A new descriptor of the dma-buf of this range, of whole pages. Raises GpuFailure."""

class PinnedMemory:
    """Memory of the host that GPUs' drivers copy to and from straight; it has the buffer protocol."""

    def __init__(self, device: int, nbytes: int) -> None:
        """For copies by any GPU; ``device``: whose driver is asked for it. Raises GpuFailure."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class GpuCopies:
    """Copies between a GPU's memory and the host's, in two lanes: what is asked of one is done in that order."""

    lanes: int

    def __init__(self, device: int) -> None:
        """Raises GpuFailure, as all of it."""

    def begin(self, lane: int, to_gpu: bool, host: int, parts: _Segments) -> None:
        """Of all parts, whose local addresses are the GPU's, to or from ``host``, one after the other."""

    def finish(self, lane: int) -> None:
        """Until all of the lane's are done."""

class Copies:
    """Copies between this process and others of its host that are made again and again."""

    def __init__(self, memory: Memory, copies: Sequence[tuple[str, _Ticket, bool, int, int, int]]) -> None:
        """Token, ticket, whether it is written to; offset, local address, bytes."""

    def run(self) -> bool:
        """True if all are done; False if not: `Memory.move` says why."""

class MemoryIdentity:
    """Who this process is for those who want its memory, and how it proves it."""

    def __init__(self, token: str, secret: bytes, certificate: bytes = b"", key: bytes = b"", ca: bytes = b"") -> None:
        """``token``: 32 hexadecimal digits. Certificate, key and CA as DER, or none for no TLS. Raises ValueError, and
        RuntimeError where there is no OpenSSL.
        """

    @property
    def encrypted(self) -> bool:
        """With TLS."""

class Cancel:
    """Ends transfers that wait, once and for all."""

    def set(self) -> None: ...
    def is_set(self) -> bool: ...

class TransferResult:
    """How a transfer has ended."""

    @property
    def outcome(self) -> str:
        """done, refused, unreachable (nothing was asked for), lost (it may have been done), timed_out or cancelled."""

    @property
    def refusal(self) -> str:
        """Of "refused": dropped, wrong_key, out_of_range, read_only or misaligned."""

    @property
    def text(self) -> str:
        """For people, where it is not done."""

    @property
    def value(self) -> int:
        """What an atomic operation has found."""

class MemoryServer:
    """Serves the memory of a table to other hosts, on native threads."""

    def __init__(self, memory: Memory, identity: MemoryIdentity, most: int = 1024) -> None:
        """``most``: connections of processes of this program."""

    def listen(self, address: str, port: int = 0) -> int:
        """The port, at a numeric address, IPv4 or IPv6. Raises OSError or ValueError."""

    def add_staging(self, key: int, memory: PinnedMemory, slot_bytes: int) -> None:
        """Requests may name it from now on, by this key."""

    def remove_staging(self, key: int) -> None:
        """Not any more; those that have begun go on."""

    def connections(self) -> int:
        """Of processes that have proved who they are."""

    def close(self) -> None:
        """Ends all connections and threads."""

    def abandon(self) -> None:
        """In a forked child: close what belongs to the parent, without a word to anybody."""

class Errand:
    """A small transfer that was asked for, and whose answer somebody has to fetch."""

    def fetch(self, seconds: float | None) -> tuple[int, int, int, int, str] | None:
        """How it has ended, told once; None if it is not over by then, another thread waits, or a signal came. Without
        seconds: wait also for other threads that wait.
        """

    @property
    def over(self) -> bool:
        """Nobody touches its memory any more."""

class MemoryLine:
    """A connection that one thread has for itself, to have a peer copy to and from its staging memory."""

    def ask(
        self, write: bool, ticket: _Ticket, ranges: _Segments, buffer: int, slot: int, turn: int
    ) -> tuple[int, int, int, int, str]:
        """To copy it: from its slot to the ranges to write, else the other way. How the sending went."""

    def hear(self) -> tuple[int, int, int, int, str]:
        """What became of the first request that was not heard of yet."""

    def close(self) -> None:
        """Others may have the connection, or it is hung up."""

class MemoryClient:
    """Reads and writes the memory of one process elsewhere; every call waits, with the GIL released."""

    def __init__(self, address: str, port: int, identity: MemoryIdentity, whom: str, streams: int = 4) -> None:
        """``whom``: the token of the process that has to be there."""

    def read(
        self, ticket: _Ticket, segments: _Segments, seconds: float | None = None, cancel: Cancel | None = None
    ) -> TransferResult:
        """Into local memory, which has to stay until this returns."""

    def write(
        self, ticket: _Ticket, segments: _Segments, seconds: float | None = None, cancel: Cancel | None = None
    ) -> TransferResult:
        """From local memory."""

    def fetch_add(
        self, ticket: _Ticket, offset: int, operand: int, seconds: float | None = None, cancel: Cancel | None = None
    ) -> TransferResult:
        """Of 8 aligned bytes, modulo 2**64; the value is what was there."""

    def compare_and_swap(
        self,
        ticket: _Ticket,
        offset: int,
        expected: int,
        wanted: int,
        seconds: float | None = None,
        cancel: Cancel | None = None,
    ) -> TransferResult:
        """The value is what was there: if it is ``expected``, ``wanted`` is there now."""

    def move(
        self, ticket: _Ticket, write: bool, segments: _Segments, patient: Patient, /
    ) -> tuple[int, int, int, int, str]: ...
    def change(
        self, ticket: _Ticket, access: int, offset: int, operand: int, expected: int, patient: Patient, /
    ) -> tuple[int, int, int, int, str]: ...
    def begin(
        self,
        ticket: _Ticket,
        access: int,
        segments: _Segments,
        operand: int,
        expected: int,
        patient: Patient,
        /,
    ) -> Errand | None:
        """Ask for a small transfer, without waiting; None if no connection is idle: nothing was asked for."""

    def line(self, patient: Patient, /) -> tuple[MemoryLine | None, tuple[int, int, int, int, str]]:
        """Wait for a connection; None, and why there is none."""

    def close(self) -> None:
        """Ends all transfers, connections and threads."""

    def abandon(self) -> None:
        """In a forked child: close what belongs to the parent, without a word to anybody."""

class VerbsCompletionQueue:
    """A completion queue that a package for libibverbs has made, asked without its Python. Raises OSError."""

    @staticmethod
    def find(owner: object, fd: int, entries: int) -> VerbsCompletionQueue | None:
        """Of this object of a package; None where that can't be told."""

    def arm(self) -> None: ...
    def poll(self, most: int) -> list[Any]:
        """Tuples as _binding.py's Completion, 64 at most."""

    def forget(self) -> None:
        """It is about to be destroyed."""

class VerbsQueuePair:
    """The same of a queue pair. Raises OSError."""

    @staticmethod
    def find(owner: object, number: int, queue: VerbsCompletionQueue) -> VerbsQueuePair | None:
        """Of this object of a package; None where that can't be told."""

    def post(self, works: Sequence[tuple[int, ...]]) -> None:
        """Tuples as _binding.py's Work, in one go."""

    def forget(self) -> None:
        """It is about to be destroyed."""
