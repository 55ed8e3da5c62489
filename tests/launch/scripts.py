"""The scripts that the tests launch, as text."""

# What a program can see of how it was started. It does not import torch: torchrun's rank would take seconds.
PROBE = '''
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
    "locale": locale.setlocale(locale.LC_ALL), "trace": str(sys.gettrace()), "hook": str(sys.excepthook is sys.__excepthook__),
    "switch": sys.getswitchinterval(),
}
rank = os.environ["RANK"]
with open(f"report-{rank}.json", "w") as file:
    json.dump(report, file)
print("out of rank", rank)
print("error of rank", rank, file=sys.stderr)
'''
