"""Source text of the scripts that the tests launch."""

# Reports what a program can see of how it was started. It does not import torch: torchrun's rank would take seconds.
PROBE = """
import gc, json, locale, multiprocessing, os, resource, signal, sys, threading
handlers = {name: str(signal.getsignal(getattr(signal, name)))
            for name in ("SIGINT", "SIGTERM", "SIGCHLD", "SIGPIPE", "SIGHUP", "SIGUSR1")}
streams = {name: [stream.encoding, stream.errors, stream.newlines, stream.line_buffering, stream.write_through,
                  stream.mode, stream.fileno(), type(stream.buffer).__name__]
           for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr))}
report = {
    "environment": dict(os.environ),
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "cwd": os.getcwd(), "executable": sys.executable,
    "main": [__name__, __file__, str(__spec__), __package__, __cached__, type(__loader__).__name__, __doc__],
    "is main": sys.modules["__main__"].__dict__ is globals(),
    "builtins": str(__builtins__),
    "handlers": handlers, "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "streams": streams, "stdin": [sys.stdin.encoding, sys.stdin.read()],
    "session": os.getsid(0) == os.getpid() == os.getpgrp(),
    "process": multiprocessing.current_process().name, "daemon": multiprocessing.current_process().daemon,
    "threads": [thread.name for thread in threading.enumerate()],
    "tasks": len(os.listdir("/proc/self/task")),
    "descriptors": sorted(int(n) for n in os.listdir("/proc/self/fd"))[:-1],
    "files": resource.getrlimit(resource.RLIMIT_NOFILE), "core": resource.getrlimit(resource.RLIMIT_CORE),
    "cpus": sorted(os.sched_getaffinity(0)), "nice": os.nice(0), "umask": os.umask(0o22),
    "gc": [gc.isenabled(), *gc.get_threshold()], "recursion": sys.getrecursionlimit(),
    "locale": locale.setlocale(locale.LC_ALL), "trace": str(sys.gettrace()),
    "hook": str(sys.excepthook is sys.__excepthook__),
    "switch": sys.getswitchinterval(),
}
rank = os.environ["RANK"]
with open(f"report-{rank}.json", "w") as file:
    json.dump(report, file)
# At once: who follows a file says of each part of a line whose it is.
sys.stdout.write(f"out of rank {rank}\\n")
sys.stderr.write(f"error of rank {rank}\\n")
"""

# Rank 1 ends in the given way. Rank 0 reports the signal that it then receives. "ready" is a file.
FAILING = """
import os, signal, subprocess, sys, time
way = sys.argv[1]
if os.environ["RANK"] == "0":
    def end(number, frame):
        print("rank 0 was told", signal.Signals(number).name, flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, end)
    open("ready", "w").close()
    while True:
        signal.pause()
while not os.path.exists("ready"):
    time.sleep(0.01)
def fail():
    raise ValueError("it is broken")
if way == "raise":
    fail()
if way == "exit":
    sys.exit(3)
if way == "words":
    sys.exit("some words")
if way == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if way == "interrupt":
    raise KeyboardInterrupt
"""

# Rank 1 fails while rank 0 is stopped by SIGSTOP. It does not import torch.
STOPPED = """
import os, signal, time
if os.environ["RANK"] == "0":
    with open("pid.tmp", "w") as file:
        file.write(str(os.getpid()))
    os.rename("pid.tmp", "pid")
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)
def state():
    with open("pid") as file, open(f"/proc/{file.read()}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]
while not os.path.exists("pid") or state() != "T":
    time.sleep(0.01)
raise SystemExit(3)
"""

# Writes a file when it runs, and reports each signal that it receives. With "stubborn" it continues after a signal.
WAITING = """
import os, signal, subprocess, sys
def end(number, frame):
    os.write(1, f"told {signal.Signals(number).name}\\n".encode())  # in one piece
    if "stubborn" not in sys.argv:
        sys.exit(0)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, end)
silent = {"stdin": -3, "stdout": -3, "stderr": -3}  # DEVNULL: a pipe would keep its reader
child = subprocess.Popen(["sleep", "1000"], start_new_session=True, **silent)
with open("pids-" + os.environ["RANK"] + ".tmp", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(file.name, file.name[:-4])
while True:
    signal.pause()
"""

# Rank 0 sends SIGINT to the launcher, the parent of its fork server, as early as it can. Each rank reports its own
# SIGINT.
HASTY = """
import os, signal
def end(number, frame):
    os.write(1, f"rank {os.environ['RANK']} was told {signal.Signals(number).name}\\n".encode())
    os._exit(0)
signal.signal(signal.SIGINT, end)
if os.environ["RANK"] == "0":
    with open(f"/proc/{os.getppid()}/stat") as file:
        os.kill(int(file.read().rpartition(")")[2].split()[1]), signal.SIGINT)
while True:
    signal.pause()
"""

# Fails in every attempt, and leaves torch's error file.
RECORDED = """
import os
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
    raise ValueError("broken, attempt " + os.environ["TORCHELASTIC_RESTART_COUNT"])

if __name__ == "__main__":
    main()
"""

SUM = """
import json, os
import torch, torch.distributed as dist
dist.init_process_group("cpu:monarch" if "MONARCH" in os.environ else "gloo")
x = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(x)
with open(f"report-{dist.get_rank()}.json", "w") as file:
    json.dump([x.item(), torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS"), os.environ["GROUP_RANK"]], file)
dist.destroy_process_group()
"""
