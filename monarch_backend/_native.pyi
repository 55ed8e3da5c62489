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

def keep_for_ever(instance: object, /) -> None:
    """Never free this object, also not while the interpreter ends."""
