#!/usr/bin/env python3
"""`squeue --job NUMBER --json` of Slurm 22.05 with the fields of newer releases, as torchmonarch 0.7.0 reads them."""

from __future__ import annotations

import json
import subprocess
import sys

SQUEUE = "/usr/bin/squeue"


def main() -> None:
    words = sys.argv[1:]
    if "--json" not in words:
        sys.exit(subprocess.run([SQUEUE, *words], check=False).returncode)
    number = int(words[words.index("--job") + 1])
    found = json.loads(subprocess.run([SQUEUE, "--json"], capture_output=True, text=True, check=True).stdout)
    jobs = [job for job in found["jobs"] if job["job_id"] == number]
    for job in jobs:
        nodes = job.get("nodes") or ""
        names = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=False)
        job["job_state"] = [job["job_state"]]
        allocation = [{"name": name} for name in names.stdout.split()]
        job["job_resources"] = {"nodes": {"count": len(allocation), "allocation": allocation}}
    print(json.dumps({"jobs": jobs}))


if __name__ == "__main__":
    main()
