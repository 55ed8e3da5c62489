"""Calls between hosts with torch.distributed.rpc: `rpc.py RANK ADDRESS PORT`. Rank 0 calls rank 1."""

import json
import os
import sys
import time
import warnings

import torch
import torch.distributed.rpc as rpc

warnings.filterwarnings("ignore")


def take(value: object) -> None:
    del value


def main() -> None:
    rank, address, port = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=port)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2)
    if rank == 0:
        rpc.rpc_sync("w1", take, (None,))
        print("0", flush=True)
        for line in sys.stdin:
            _, count, size = json.loads(line)
            value, times = torch.zeros(size, dtype=torch.uint8) if size else None, []
            for _ in range(count):
                begun = time.perf_counter()
                rpc.rpc_sync("w1", take, (value,))
                times.append(time.perf_counter() - begun)
            print(json.dumps(times), flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    main()
