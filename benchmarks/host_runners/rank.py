"""Rank under torchrun or `monarch-backend run`: repeats all_reduce until it raises, and prints the time and the error.

`rank.py BACKEND`
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

EVERY = 0.05


def main() -> None:
    dist.init_process_group(sys.argv[1])
    dist.all_reduce(torch.ones(1))
    print(json.dumps(os.getpid()), flush=True)
    try:
        while True:
            dist.all_reduce(torch.ones(1))
            time.sleep(EVERY)
    except Exception as error:
        print(json.dumps([time.time(), str(error)]), flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
