"""`monarch-backend k8s`: objects of a KubernetesJob as YAML, logs and shells of its pods, missing permissions."""

from __future__ import annotations

import argparse
import secrets
import sys
from typing import TYPE_CHECKING, Any

from monarch_backend.cli.arguments import fail

if TYPE_CHECKING:
    from monarch_backend._job.kubernetes.job import KubernetesJob


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    commands = parser.add_subparsers(dest="what", required=True, metavar="WHAT")

    manifest = commands.add_parser("manifest", help="print the objects of a job as YAML, without asking a cluster")
    manifest.add_argument("--name", default="job", help="name of the job (default: %(default)s)")
    manifest.add_argument(
        "--mesh", action="append", required=True, metavar="NAME=PODS", help="a mesh; may be given several times"
    )
    manifest.add_argument("--image", required=True, help="image of the pods, which has this package")
    manifest.add_argument(
        "--resource", action="append", default=[], metavar="NAME=AMOUNT", help="of each pod, such as nvidia.com/gpu=8"
    )
    manifest.add_argument(
        "--controller",
        default="statefulset",
        metavar="KIND",
        help="what starts the pods: statefulset, jobset or job (default: %(default)s)",
    )
    manifest.add_argument("--namespace", help="namespace of the objects; by default none is written")
    manifest.add_argument(
        "--secret-file", metavar="FILE", help="the job's secret, which the YAML then has, too; by default a new one"
    )

    logs = commands.add_parser("logs", help="print what a job's pods have printed")
    logs.add_argument("job", help="name of the job, or its file")
    logs.add_argument("--host", metavar="MESH[INDEX]", help="only this host, such as trainers[0]")
    logs.add_argument("--lines", type=int, default=100, help="last lines of each pod (default: %(default)s)")
    logs.add_argument("--previous", action="store_true", help="from before the last restart of the container")

    shell = commands.add_parser("shell", help="run a shell or a command in a host's container")
    shell.add_argument("-i", "--stdin", action="store_true", help="pass standard input to the command; a shell gets it")
    shell.add_argument("-t", "--tty", action="store_true", help="give the command a terminal, and standard input")
    shell.add_argument("job", help="name of the job, or its file")
    shell.add_argument("host", help="MESH[INDEX], the number of the host in the job, or the name of its pod")
    shell.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="the command, whose exit code is returned; by default an interactive shell",
    )

    doctor = commands.add_parser("doctor", help="check the kubeconfig, the API server and the permissions")
    doctor.add_argument("--namespace", help="by default that of the context")
    doctor.add_argument("--kubeconfig", metavar="FILE", help="by default that of kubectl")
    doctor.add_argument("--context", help="by default the current one")
    doctor.add_argument("--in-cluster", action="store_true", help="as the service account of this pod")


def run(args: argparse.Namespace) -> int:
    """Run one of the commands.

    Return 0; 1, with the reason, if it fails or if `doctor` finds that a permission for the default controller is
    missing. `shell` returns the exit code of its command.
    """
    from monarch_backend._job.errors import JobError

    try:
        return {"manifest": _manifest, "logs": _logs, "shell": _shell, "doctor": _doctor}[args.what](args)
    except (JobError, OSError, ValueError, ImportError) as error:
        return fail(f"k8s {args.what}", error)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ValueError(f"{text!r} is not NAME=VALUE")
    return name, value


def _manifest(args: argparse.Namespace) -> int:
    from pathlib import Path

    from monarch_backend._job.kubernetes.job import KubernetesJob
    from monarch_backend._transport.network.auth import new_secret, read_secret

    try:
        import yaml
    except ImportError as error:
        raise ImportError(f"{error}: install the extra, pip install 'monarch_backend[kubernetes]'") from None
    job = KubernetesJob(args.namespace, name=args.name, controller=args.controller)
    for text in args.mesh:
        mesh, pods = _pair(text)
        if not pods.isdecimal():
            raise ValueError(f"{text!r}: {pods!r} is not a number of pods")
        job.add_mesh(mesh, int(pods), image=args.image, resources=dict(map(_pair, args.resource)))
    secret = new_secret() if args.secret_file is None else read_secret(Path(args.secret_file))
    job_id = secrets.token_hex(8)
    made = job.manifests(job_id, secret)
    for each in made:
        if args.namespace:
            each["metadata"]["namespace"] = args.namespace
    _print_attachment(job, job_id, args.secret_file)
    yaml.safe_dump_all(made, sys.stdout, sort_keys=False, explicit_start=True)
    return 0


def _print_attachment(job: KubernetesJob, job_id: str, secret_file: str | None) -> None:
    """Print comments of YAML on how a program attaches to the pods, whose labels have a random id."""
    from monarch_backend._job.kubernetes.manifests import JOB_LABEL, MESH_LABEL

    if secret_file is None:
        print("# Programs need the job's secret in a file, as given by --secret-file. This one is in the Secret below.")
    print(f"# job = KubernetesJob(name={job.name!r}, secret_file={secret_file or 'job.secret'!r})")
    for mesh, pods in job._sizes().items():
        print(f"# job.attach_mesh({mesh!r}, {pods}, {f'{JOB_LABEL}={job_id},{MESH_LABEL}={mesh}'!r})")


def _job(text: str) -> KubernetesJob:
    from monarch_backend._job.base import Job
    from monarch_backend._job.kubernetes.job import KubernetesJob

    job = Job.load(text)
    if not isinstance(job, KubernetesJob):
        raise ValueError(f"{text} is a {type(job).__name__}, which has no pods")
    return job


def _logs(args: argparse.Namespace) -> int:
    job, printed = _job(args.job), False
    for status in job.status():
        host = f"{status.mesh}[{status.index}]"
        if args.host in (None, host):
            printed = True
            text = job.log(status.mesh, status.index, args.lines, previous=args.previous)
            for line in text.splitlines():
                print(f"{host}: {line}")
    if not printed:
        raise ValueError(f"the job has no host {args.host}")
    return 0


SHELL = ("/bin/sh", "-c", "command -v bash >/dev/null && exec bash; exec sh")


def _shell(args: argparse.Namespace) -> int:
    job = _job(args.job)
    mesh, index = _host(job, args.host)
    command = args.words[1:] if args.words[:1] == ["--"] else args.words
    stdin = sys.stdin.fileno() if args.stdin or args.tty or not command else None
    is_tty = args.tty or (not command and sys.stdin.isatty())
    sys.stdout.flush()
    return job.execute(mesh, index, command or SHELL, stdin=stdin, is_tty=is_tty)


def _host(job: KubernetesJob, text: str) -> tuple[str, int]:
    """Return mesh and index of a host that is given as MESH[INDEX], as its number in the job, or by its pod."""
    hosts = job.status()
    for number, each in enumerate(hosts):
        _, _, pod = each.log.partition("pod ")
        if text in (f"{each.mesh}[{each.index}]", str(number), pod.partition(" ")[0]):
            return each.mesh, each.index
    names = ", ".join(f"{each.mesh}[{each.index}]" for each in hosts)
    raise ValueError(f"the job has no host {text}; it has {names}")


def _doctor(args: argparse.Namespace) -> int:
    from monarch_backend._job.kubernetes.api import Api
    from monarch_backend._job.kubernetes.permissions import NEEDED, OPTIONAL, OTHER_CONTROLLERS

    api = Api(args.namespace, args.kubeconfig, args.context, args.in_cluster, retry=0.0)
    rows: list[tuple[str, Any]] = [("API server", api.server), ("namespace", api.namespace)]
    rows.append(("version", api.request("GET", "/version").get("gitVersion", "?")))
    missing = []
    for verb, resource, use in (*NEEDED, *OTHER_CONTROLLERS, *OPTIONAL):
        allowed = api.may(verb, resource)
        if not allowed and (verb, resource, use) in NEEDED:
            missing.append(f"{verb} {resource}")
        rows.append((f"{verb} {resource}", "yes" if allowed else f"no: {use}"))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:{width}}  {value}")
    if missing:
        raise ValueError(
            f"the user lacks {len(missing)} permissions in namespace {api.namespace}: deploy/k8s/role.yaml has them all"
        )
    return 0
