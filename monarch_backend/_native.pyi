def boot_id() -> str:
    """Identity of the running kernel; empty where it has none."""

def ipc_namespace() -> str:
    """Identity of this process's IPC namespace; empty where there are none."""

def kernel_features() -> dict[str, bool]:
    """Abilities of the kernel, each tried: memfd_create, pidfd_open, process_vm_readv, futex."""

def cpu_features() -> list[str]:
    """Vector extensions of this processor that the core can use, named as in /proc/cpuinfo."""
