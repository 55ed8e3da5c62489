from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any, TypeVar

_Item = TypeVar("_Item")

is_portable: bool
"""Whether the core was built without what only Linux has: on macOS, and with MONARCH_BUILD_PORTABLE=1."""

def boot_id() -> str:
    """Identity of the running kernel; empty where it has none."""

def ipc_namespace() -> str:
    """Identity of this process's IPC namespace; empty where there are none."""

def kernel_features() -> dict[str, bool]:
    """Abilities of the kernel, each tried: memfd_create, pidfd_open, process_vm_readv, futex."""

def cpu_features() -> list[str]:
    """Vector extensions of this processor that the core can use, named as in /proc/cpuinfo."""

def park_threads_at_exit() -> None:
    """Let C++ threads that wait for the GIL of an ending interpreter sleep, instead of aborting the process."""

def explain_absent_memory(note: str) -> None:
    """Install a signal handler that explains a crash at the address of a remote tensor, or near address 0.

    It writes ``note``, the pid and the address to stderr. Call it again after another handler was installed."""

def set_up_tensor_address(tensor: type, forbid_writing: Callable[[Any], object], error: type[Exception], /) -> None:
    """Set the exception class that is raised, without arguments, in the thread that used an address.

    A thread without the GIL cannot get it: then the main thread does."""

def reserve_tensor_address(to_impl: int, to_storage: int, to_address: int, to_resizable: int, /) -> bool:
    """Reserve the addresses that `no_pointer` gives to tensors. Return False if there is no address space for them.

    ``to_...``: offsets in bytes: of the C++ part in a tensor, of the storage in that, and of the address and the
    resizable flag in the storage."""

def close_absent_memory() -> None:
    """Unmap addresses that were used: the next use is reported again, and written bytes are lost."""

def unraisable_hook(report: Callable[[Any], object], /) -> Callable[[Any], object]:
    """Return a function for `sys.unraisablehook` that raises the address error again in the thread.

    Other errors go to ``report``. The function is in C, because a Python function would itself be interrupted."""

def no_pointer(tensor: Any, /) -> None:
    """Make writes to a tensor's memory and resizing it raise torch's errors; other uses are reported."""

def without_address(tensor: Any, /) -> None:
    """Let torch change the tensor's sizes until the next `no_pointer`."""

def skip_mt19937(words: bytearray | memoryview, left: int, count: int) -> int:
    """Advance the 624 words of a Mersenne Twister in place by ``count`` draws. Return how many words are left then."""

def keep_for_ever(instance: object, /) -> None:
    """Never free this object, not even while the interpreter ends."""

# csrc/records/: the hot paths of a command, in the controller and in a worker; see monarch_backend/dtensor.

def set_up_call_sites(
    is_internal: Callable[[CodeType], bool], number_of: Callable[[tuple[tuple[CodeType, int], ...]], int], /
) -> None:
    """Set the functions that are called once for each code object, and once for each call site."""

def current_call_site() -> int:
    """Return the number of the current call site: the innermost frames of the program that are not internal."""

class Sink:
    """Buffer of the command words of one worker set."""

    limit: int
    """Words of a batch: with more, it is sent."""
    records: int
    """Number of records written."""
    made: int
    """Bytes of results since unreachable tensors were last deleted."""
    most: int
    """Bytes of results from which they are deleted before the next record."""
    debug: bool
    """Whether each record is a batch."""

    def __init__(
        self, words: list[Any], unreachable: list[int], ids: Iterator[int], wake: Callable[[], object],
        full: Callable[[], object], limit: int, /,
    ) -> None: ...  # fmt: skip

class Ref:
    """The workers' id of a tensor. It is added to ``workers.unreachable`` when the last reference is gone."""

    workers: Any
    id: int
    nbytes: Any

    def __init__(self, workers: Any, number: int, /) -> None: ...

class Entry:
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
    """Cached data of an operator. ``scalars``, ``names``: see `op_signatures.scalars_of`."""

    entries: dict[Any, Entry]
    target: Any
    special: Callable[[Any, Any, Any], Any] | None

    def __init__(self, target: Any, special: Any, scalars: int, names: frozenset[str], /) -> None: ...
    def forget(self, key: Any, /) -> None:
        """Remove an entry. Records that use it were written before this returns."""

def take_all(words: list[_Item], /) -> list[_Item]:
    """Remove all items of a list, and return them as a new list, in one step."""

def set_up_issue(
    tensor: type, make: Callable[..., Any], no_pointer: Callable[[Any], object], is_inference: Callable[[], bool],
    constants: tuple[type, ...], part: Callable[[Any], Any], not_plain: type[Exception],
    with_host_tensors: Callable[[Plan, Any, Any], Any], missing: Callable[[Plan, Any, Any, Any, Any], Entry],
    plan_of: Callable[[Any], Plan], yes: object, no: object, /,
) -> None:  # fmt: skip
    """Set the Python functions that dispatch calls."""

def dispatch(func: Any, args: Any, kwargs: Any, /) -> Any:
    """Run an operator. Return its result, as remote tensors."""

def issue(plan: Plan, args: Any, kwargs: Any, workers: Any, /) -> Any:
    """Do the same, without special operators. ``workers``: the worker set of an operation without tensor arguments."""

class Call:
    """A function and its arguments: ("constant", value), ("tensor", index), ("number", index) or ("list", [...])."""

    function: Callable[..., Any]

    def __init__(
        self, function: Callable[..., Any], arguments: list[Any], names: tuple[str, ...], operands: int, results: int,
        kind: int, writes: bool, /,
    ) -> None: ...  # fmt: skip
    def run(self, tensors: Any, words: list[Any], i: int, /) -> None: ...
    def given(self, tensors: Any, words: list[Any], i: int, /) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with which the record calls the function."""

def execute(
    words: list[Any], i: int, calls: dict[int, Call], tensors: dict[int, Any], pending: dict[int, Any],
    cursor: list[int], /,
) -> int:  # fmt: skip
    """Execute records from ``words[i]`` on. Return the index of the first that is not among the calls or must wait.

    Raises what a call raises; then ``cursor[0]`` is the index of its record.
    """

class Peer:
    """Another process of this host, which may have ended since it connected. Linux only, as all below."""

class Host:
    """Arena and peers of this process on its host."""

    def __init__(self, arena_bytes: int, token: str = "") -> None:
        """``token``: the token of this process, 32 hexadecimal digits, if another process has chosen it."""

    def die_with_peer(self, token: str, /) -> bool:
        """Kill this process as soon as the peer with this token ends. Return False if it has ended already."""

    @property
    def token(self) -> str: ...
    def connect(self, token: str, seconds: float = 1.0) -> Peer | None:
        """Connect to the process with this token and exchange arenas.

        Return None if it can't be reached from here, or does not answer within ``seconds``.
        """

    def accepted(self, token: str, seconds: float, /) -> Peer | None:
        """Wait until the process with this token has connected. Return None if it has not within ``seconds``."""

    def allocate_control_block(self, size: int, /) -> int:
        """Allocate a rank's control block for a group of ``size``. Return its offset, or 0 when the arena is full."""

    def free_control_block(self, control_block: int, /) -> None: ...
    def used(self) -> int: ...
    def size(self) -> int: ...
    def prefault(self, nbytes: int, /) -> None:
        """Commit the first ``nbytes`` of the arena in the background, while a processor is idle. Once.

        Raises RuntimeError if the system allows no further thread.
        """

    def return_idle_memory(self, seconds: float, /) -> None:
        """Give memory back to the system that was not used for ``seconds`` to twice that time. 0: never."""

    def leave(self) -> None:
        """Tell the peers that this process ends without a failure."""

    def abandon(self) -> None:
        """In a forked child: drop the parent's connections without a message to the peers."""

class ArenaBuffer:
    """Writable memory of the arena with the buffer protocol. It is freed with this object."""

    def __init__(self, host: Host, size: int) -> None:
        """Raises MemoryError if the arena has no free block of this size."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

_Spans = list[tuple[int, int]]  # address, bytes
_Failure = tuple[str, int, str]  # dead, left, late, mismatch or closed; failed rank or -1; text

class Operation:
    @property
    def done(self) -> bool: ...
    @property
    def source(self) -> int:
        """Of a receive: the rank that sent."""

    def set_time(self, seconds: float, /) -> None:
        """Set the time limit of an asynchronous operation, from now."""

    def forget(self) -> None:
        """Drop the reference to the owner of the memory, because the caller keeps it."""

    @property
    def failure(self) -> _Failure | None: ...

def collectives() -> tuple[tuple[str, bool, bool], ...]:
    """Return for each collective its name, whether it has a root, and whether it reduces."""

def work_wait(method: Callable[..., bool]) -> Any:
    """Return the method ``wait`` for a class of works that fast paths make, in place of this one in Python."""

class ShmGroup:
    def __init__(
        self, host: Host, rank: int, peers: list[Peer | None], control_blocks: list[int], read_from: int, label: str
    ) -> None:
        """``read_from``: bytes from which it reads its peers' memory directly, 0 for never.

        ``label``: start of the lines on stderr that name the algorithm of an operation, "" for no lines."""

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
        """Run an operation on this thread. Return None if it succeeded.

        ``seconds(options)`` is called if it is late, for the time limit.
        """

    def record_as(self, name: str, rank: int, identity: int) -> None:
        """Record operations under this name from now on, if this process records.

        ``identity``: 64 bits that are the same on all ranks, and that no other group has.
        """

    def begin(
        self, collective: int, dtype: int, op: int, root: int, size: int, ins: _Spans, outs: _Spans, owner: object, /
    ) -> tuple[Operation, bool]:
        """Submit an asynchronous operation, which keeps ``owner`` of its memory until `Operation.forget`.

        Return it, and whether other ranks need nothing more of this one.
        """

    def poll(self, operation: Operation, /) -> bool:
        """Move what can be moved now. Return whether the operation is done."""

    @property
    def sequence(self) -> int: ...
    @property
    def waiting_thread(self) -> int:
        """`threading.get_ident` of the thread that waits in a collective, 0 if none does."""

    def fast_path(
        self,
        collective: int,
        form: int,
        owner: object,
        name: str,
        options: type,
        work: type,
        failed: Callable[[Operation, list[object]], object],
        pending: Callable[[Operation, list[object], object, bool], object],
        seconds: Callable[[object], float],
        backend: object,
        engine: Engine,
        torch: tuple[object, ...],
        /,
    ) -> Any:
        """Return a callable for the method ``name`` of ``owner`` that runs most calls without Python code.

        It returns ``work()``, or the result of ``failed`` or ``pending``. ``torch``: see
        csrc/shm/python/fast_paths.h. After ``end()`` it forwards every call.
        """

    def message_path(
        self,
        kind: int,
        owner: object,
        name: str,
        work: type,
        failed: Callable[[Operation, list[object]], object],
        seconds: Callable[[], float],
        backend: object,
        engine: Engine,
        waiting: tuple[object, ...],
        passing: tuple[object, ...],
        torch: tuple[object, ...],
        /,
    ) -> Any:
        """Return a callable for the method ``name`` of ``owner`` that sends or receives without Python code.

        It returns ``work()``, or the result of ``failed``. ``waiting`` and ``passing`` are code objects of callers, see
        csrc/shm/python/messages.h.
        """

    def message(
        self, sends: bool, dtype: int, other: int, tag: int, address: int, size: int, owner: object, /
    ) -> Operation:
        """Start to send to or receive from a rank, -1: any. It may have ended already. Keeps ``owner`` until then."""

    def finish(self, operation: Operation, seconds: float, /) -> _Failure | None:
        """Wait until an operation of this thread is done. It fails after ``seconds``."""

    def wait(self, operation: Operation, seconds: float, /) -> bool:
        """Advance an operation until it is done. Return False after ``seconds``."""

    def set_reason(self, text: str, /) -> None:
        """Set the reason why this rank closes the group or ends, for the errors of other ranks. At most 255 bytes."""

    def set_place(self, sequence: int, text: str, /) -> None:
        """Set the line from which this rank has called an operation that ranks disagree about. At most 247 bytes."""

    def places(self, sequence: int, /) -> list[bytes]:
        """Return the lines of all ranks in UTF-8, empty where a rank has not set it for this operation."""

    def close(self) -> None:
        """End the group for this rank. Operations in progress fail."""

class Engine:
    """The progress thread of asynchronous operations."""

    def __init__(self, host: Host) -> None: ...
    def submit_async(self, group: ShmGroup, operation: Operation, then: Callable[[], object], /) -> None:
        """Let the thread move a submitted operation. ``then`` is called in another one when it is done."""

    def take_back(self, operation: Operation, /) -> bool:
        """Do not call ``then`` of an operation. False if it was called, or will be."""

    def stop(self) -> None:
        """End the thread. Operations in progress stay as they are."""

class Block:
    """A payload in its sender's arena, with the buffer protocol. It is released with the last reference."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

class Mailbox:
    """Sends frames to other processes of this host and receives them. One thread at a time has the turn to read."""

    def __init__(self, host: Host, oversubscribed: bool, share: int = ...) -> None:
        """``oversubscribed``: see `set_oversubscribed`. ``share``: limit of bytes that one receiver has not read."""

    def connect(self, token: str, /) -> int:
        """Return the link to the process with this token; -1 if it can't be reached, -2 if it does not answer yet."""

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
    ) -> bool: ...
    def multicast(
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
        """Send one frame to several receivers, each (link, seq, rank, epoch). The payload is copied once."""

    def drop(self, link: int, /) -> None: ...
    def acquire_turn(self) -> bool:
        """Take the turn to read, from the standby thread if that has it. Return False if another reader has it."""

    def release_turn(self) -> None: ...
    def receive(self, seconds: float | None, standby: bool = False) -> list[Any]:
        """Return events. Requires the turn. Empty after ``seconds``, after `wake`, or after a signal.

        Frames are (link, kind, target, ref, seq, rank, epoch, prefix, body, buffers). A new link is
        (link, -1, token, pid). A closed one is (link, -2, how its process ended, whether without failure).
        """

    def acquire_turn_as_standby(self) -> bool:
        """Wait until no other thread reads, and take the turn. Return False once closed."""

    def is_turn_wanted(self) -> bool: ...
    def unread(self, link: int, /) -> int: ...
    def wake(self) -> None: ...
    def close(self) -> None:
        """End `acquire_turn_as_standby`; later calls return at once."""

    def set_oversubscribed(self, oversubscribed: bool, /) -> None:
        """Set whether there are more processes than processors, so that waiting threads must not spin."""

    def kept_back(self) -> int:
        """Return the bytes of frames in the backlog: frames that wait for space in a ring."""

_Ticket = tuple[int, int, int]  # slot, epoch, key
_Segments = Sequence[tuple[int, int, int]]  # offset in the registration, local address, bytes

class CancelScope:
    """Deadline and cancellation of a transfer. ``seconds``: until the deadline."""

    def __init__(self, seconds: float | None = None) -> None: ...
    def cancel(self) -> None: ...
    def outcome(self) -> int:
        """Return the Outcome that ends the transfer now: late or cancelled; 0 if it may continue."""

class View:
    """The memory of an object with the buffer protocol; keeps the object alive."""

    def __init__(self, owner: object) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def readonly(self) -> bool: ...
    @property
    def contiguous(self) -> bool: ...

class Memory:
    """Registered memory of this process, and access to that of other processes of the host."""

    def __init__(self, host: Host, kernel: bool = True, ipc: bool = True, threads: int = 1) -> None:
        """``threads``: number of threads that share one large copy."""

    def add(self, address: int, nbytes: int, writable: bool) -> _Ticket: ...
    def drop(self, ticket: _Ticket, seconds: float) -> int: ...
    def user_of(self, ticket: _Ticket) -> int: ...
    def check(self, ticket: _Ticket, offset: int, nbytes: int, access: int) -> int:
        """Return a Refusal, 0 for none."""

    def count(self) -> int: ...
    def move(
        self,
        token: str,
        ticket: _Ticket,
        write: bool,
        segments: _Segments,
        scope: CancelScope,
    ) -> tuple[int, int, int, int, str]: ...
    def at_once(self, token: str, ticket: _Ticket, write: bool, offset: int, local: int, nbytes: int) -> bool:
        """Copy without a thread. Return False if that is impossible or failed; then `move` gives the reason."""

    def change(
        self,
        token: str,
        ticket: _Ticket,
        access: int,
        offset: int,
        operand: int,
        expected: int,
        scope: CancelScope,
    ) -> tuple[int, int, int, int, str]: ...
    def move_local(self, ticket: _Ticket, write: bool, segments: _Segments) -> tuple[int, int, int, int, str]: ...
    def change_local(
        self, ticket: _Ticket, access: int, offset: int, operand: int, expected: int
    ) -> tuple[int, int, int, int, str]: ...
    def copy_method(self, token: str, ticket: _Ticket) -> int:
        """Return a CopyMethod; -1 for a process that is not connected yet."""

    def why_not_mapped(self, token: str, ticket: _Ticket) -> str:
        """Return why GPU memory is not mapped here, as text; empty if no reason is known."""

    def add_external_mapping(self, token: str, ticket: _Ticket, address: int) -> bool:
        """Use GPU memory that the caller has mapped, until `take_unused_mappings` returns it.

        Return False if its owner is not connected.
        """

    def take_unused_mappings(self) -> list[tuple[str, int, int]]:
        """Return token, slot and epoch of external mappings that are not used any more, each once."""

    def sweep(self) -> None:
        """Unmap other processes' GPU memory that was dropped, or whose process has ended."""

    def mapped(self) -> int:
        """Return the number of other processes' GPU allocations that are mapped here or were refused by the driver."""

class GpuFailure(RuntimeError): ...

def gpu_open(libraries: Sequence[str]) -> None:
    """Open the first driver library that works. Raises GpuFailure if none does. Later calls do nothing."""

def gpu_library() -> str: ...
def gpu_device_of(address: int) -> int:
    """Return the number of the GPU with this memory; -1 for none, and for all memory before `gpu_open`."""

def gpu_allocation_of(address: int) -> tuple[int, int]:
    """Return address and bytes of the allocation that contains the address. Raises GpuFailure."""

def gpu_wait_for_stream(device: int, stream: int) -> None: ...
def gpu_dma_buf(address: int, nbytes: int) -> int:
    """Return a new descriptor of the dma-buf of this range of whole pages. Raises GpuFailure."""

class PinnedMemory:
    """Pinned host memory, for direct copies by GPUs. It has the buffer protocol."""

    def __init__(self, device: int, nbytes: int) -> None:
        """For copies by any GPU. ``device``: the GPU whose context allocates it. Raises GpuFailure."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class GpuCopies:
    """Copies between GPU memory and host memory on two streams. Each stream keeps the order of its copies."""

    streams: int

    def __init__(self, device: int) -> None:
        """Raises GpuFailure, as all methods do."""

    def begin(self, stream: int, to_gpu: bool, host: int, parts: _Segments) -> None:
        """Start to copy all parts, whose local addresses are the GPU's, to or from ``host``, one after the other."""

    def finish(self, stream: int) -> None: ...

class Copies:
    """A reusable list of copies between this process and others of its host."""

    def __init__(self, memory: Memory, copies: Sequence[tuple[str, _Ticket, bool, int, int, int]]) -> None:
        """Each copy: token, ticket, whether it writes, offset, local address, bytes."""

    def run(self) -> bool:
        """Run all copies. Return False if that failed; then `Memory.move` gives the reason."""

class MemoryIdentity:
    """Identity of this process towards others that access its memory, and the secret that proves it."""

    def __init__(self, token: str, secret: bytes, certificate: bytes = b"", key: bytes = b"", ca: bytes = b"") -> None:
        """``token``: 32 hexadecimal digits. Certificate, key and CA as DER, or none for no TLS.

        Raises ValueError, and RuntimeError if there is no OpenSSL.
        """

    @property
    def encrypted(self) -> bool: ...

class Cancel:
    """Cancels waiting transfers. It stays set."""

    def set(self) -> None: ...
    def is_set(self) -> bool: ...

class TransferResult:
    @property
    def outcome(self) -> str:
        """done, refused, unreachable (no request was sent), lost (it may have run), timed_out or cancelled."""

    @property
    def refusal(self) -> str:
        """If refused: dropped, wrong_key, out_of_range, read_only or misaligned."""

    @property
    def text(self) -> str: ...
    @property
    def value(self) -> int:
        """The old value of an atomic operation."""

class MemoryServer:
    """Serves the memory of a table to other hosts, on native threads."""

    def __init__(self, memory: Memory, identity: MemoryIdentity, most: int = 1024) -> None:
        """``most``: limit of authenticated connections."""

    def listen(self, address: str, port: int = 0) -> int:
        """Listen at a numeric address, IPv4 or IPv6. Return the port. Raises OSError or ValueError."""

    def add_staging(self, key: int, memory: PinnedMemory, slot_bytes: int) -> None: ...
    def remove_staging(self, key: int) -> None: ...
    def connections(self) -> int: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...

class SmallRequest:
    """A small transfer in flight, whose result one caller fetches."""

    def fetch(self, seconds: float | None) -> tuple[int, int, int, int, str] | None:
        """Wait for the result, which is returned once.

        Return None after ``seconds``, after a signal, or if another thread waits. With None wait for that thread, too.
        """

    @property
    def is_over(self) -> bool: ...

class StagingConnection:
    """A connection for one thread's requests to copy to and from a peer's staging memory."""

    def send_request(
        self, write: bool, ticket: _Ticket, ranges: _Segments, buffer: int, slot: int, sequence: int
    ) -> tuple[int, int, int, int, str]:
        """Request a copy: from the slot to the ranges to write, else back. Return the result of sending."""

    def receive_reply(self) -> tuple[int, int, int, int, str]: ...
    def close(self) -> None:
        """Return the connection to the pool, or close it if replies are missing."""

class MemoryClient:
    """Reads and writes the memory of one process of another host. Calls wait with the GIL released."""

    def __init__(self, address: str, port: int, identity: MemoryIdentity, owner_token: str, streams: int = 4) -> None:
        """``owner_token``: the expected token of the process at that address."""

    def read(
        self, ticket: _Ticket, segments: _Segments, seconds: float | None = None, cancel: Cancel | None = None
    ) -> TransferResult:
        """Read into local memory, which must stay valid until this returns."""

    def write(
        self, ticket: _Ticket, segments: _Segments, seconds: float | None = None, cancel: Cancel | None = None
    ) -> TransferResult: ...
    def fetch_add(
        self, ticket: _Ticket, offset: int, operand: int, seconds: float | None = None, cancel: Cancel | None = None
    ) -> TransferResult:
        """Add to 8 aligned bytes, modulo 2**64. The result's value is the old one."""

    def compare_and_swap(
        self,
        ticket: _Ticket,
        offset: int,
        expected: int,
        wanted: int,
        seconds: float | None = None,
        cancel: Cancel | None = None,
    ) -> TransferResult:
        """Store ``wanted`` if the old value is ``expected``. The result's value is the old one."""

    def move(
        self, ticket: _Ticket, write: bool, segments: _Segments, scope: CancelScope, /
    ) -> tuple[int, int, int, int, str]: ...
    def change(
        self, ticket: _Ticket, access: int, offset: int, operand: int, expected: int, scope: CancelScope, /
    ) -> tuple[int, int, int, int, str]: ...
    def begin(
        self,
        ticket: _Ticket,
        access: int,
        segments: _Segments,
        operand: int,
        expected: int,
        scope: CancelScope,
        /,
    ) -> SmallRequest | None:
        """Start a small transfer without waiting. Return None, and send nothing, if no connection is idle."""

    def open_staging_connection(
        self, scope: CancelScope, /
    ) -> tuple[StagingConnection | None, tuple[int, int, int, int, str]]:
        """Wait for a connection. On failure return None and the result that says why."""

    def close(self) -> None: ...
    def abandon(self) -> None: ...

class VerbsCompletionQueue:
    """A completion queue of a Python package for libibverbs, used without the package's code. Raises OSError."""

    @staticmethod
    def find(owner: object, fd: int, entries: int) -> VerbsCompletionQueue | None:
        """Find the queue of a package's object. Return None if it is not certain."""

    def arm(self) -> None: ...
    def poll(self, most: int) -> list[Any]:
        """Return completions as tuples like `Completion` of _verbs/providers/provider.py, at most 64."""

    def forget(self) -> None: ...

class VerbsQueuePair:
    """A queue pair of such a package. Raises OSError."""

    @staticmethod
    def find(owner: object, number: int, queue: VerbsCompletionQueue) -> VerbsQueuePair | None: ...
    def post(self, works: Sequence[tuple[int, ...]]) -> None:
        """Post work requests in one call: tuples like `Work` of _verbs/providers/provider.py."""

    def forget(self) -> None: ...

# csrc/telemetry/: monarch_backend/_telemetry/ has the meaning of the numbers.

recording_layout: dict[str, int]

def record_event(
    kind: int, status: int, name: int, detail: int, start_ns: int, reference: int, value: float, trace: int, /
) -> None:
    """Append an event to the ring. Without effect while nothing is recorded."""

def begin_activity(
    cell: int, state: int, detail: int, reference: int, waiting: int, value: int, trace: int, since_ns: int = ..., /
) -> None:
    """Show in a cell what goes on. It began at ``since_ns``, by default now. Cell 0 has no effect."""

def note_queue(cell: int, waiting: int, /) -> None:
    """Show in a cell how many messages wait behind the one that it shows. Any thread may call it."""

def note_arrival(cell: int, waiting: int, name: int, detail: int, reference: int, value: int, trace: int, /) -> None:
    """Show in a cell how many messages wait, and append the event of the last one. Any thread may call it."""

def count_ended(cell: int, /) -> None:
    """Count one more activity of a cell as ended, on the thread that changes the cell."""

def end_activity(cell: int, status: int, /) -> None:
    """Append the event of what the cell shows, and make the cell idle."""

def use_recording(descriptor: int, slot: int, label: str) -> None:
    """Record what this process does into a slot of a recording area. Raises OSError."""

def set_recording_identity(identity: int) -> None: ...

dump_marks: tuple[str, str]
"""Lines before and after a dump of stacks."""

def ignore_unhandled(signal: int) -> bool:
    """Ignore a signal that has no handler. Return False if the program has one."""

def wrap_dump_handler(signal: int, descriptor: int) -> None:
    """Let the present handler of the signal, which writes stacks to this descriptor, run with the GIL only."""

def set_request_handler(handler: Callable[[int, int], object]) -> None:
    """Call this with the sender's pid when the stack signal is sent with a value."""

def pause_recording() -> None:
    """Record nothing until resume_recording."""

def resume_recording() -> None: ...
def is_recording() -> bool: ...
def intern_name(name: str) -> int:
    """Return the number of a name in the slot; 0 without room or without a slot."""

def record_text(text: str) -> int:
    """Return the number of a text that later texts overwrite, in place of a name's; 0 without a slot."""

def take_cell(kind: int, name: str, rank: int, trace: int = 0) -> int:
    """Return the address of a cell, 0 if there is none."""

def cell_number(cell: int) -> int: ...
def release_cell(cell: int) -> None: ...
def thread_number() -> int:
    """Return the number of this thread in events."""

def monotonic_ns() -> int:
    """Return the time of events, in nanoseconds."""
