"""A storm of transfers and faults between real processes: no byte may be wrong, and no block may be lost.

    python -m benchmarks.fault_storm --transfers 5000 --transport tcp shm --seed 1

Several prefill and decode processes move blocks whose every byte is known. They have the engine's pools and the
workers' block allocators (worker.py, roles.py). The seed decides which fault a transfer meets (cases.py). This process
plays the router (storm.py) and restarts every process that was killed. The exit status is 1 if anything was wrong.
`--tiers 100000` has storms of their own, on the tiers of the KV cache (tiers.py, store.py; device.py for pools on
devices) and on pulls (pulls.py).

Transports between GPUs run over stand-ins for CUDA and NCCL (tests/support/fake_device.py, fake_nccl.py), or over the
real libraries with --gpu.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from benchmarks.fault_storm import device, pulls, store, tiers
from benchmarks.fault_storm.report import LATEST_S, Result, misses, print_result, table
from benchmarks.fault_storm.storm import ROLES, Storm
from tests.support.fake_ends import DEVICE_TRANSPORTS
from tests.support.netns import Network, why_not

TIERS: Final[dict[str, Callable[[int, int], int]]] = {
    "disk": tiers.report,
    "pulls": pulls.report,
    "store": partial(tiers.report, run=store.storm, tiers="shared store, and disk after some restarts"),
    "device": partial(tiers.report, run=device.storm, tiers="disk, then store, of a device (a stand-in)"),
}


def progress(result: Result) -> None:
    rate = result.transfers / max(result.seconds, 1e-9)
    print(
        f"\r{result.transport}: {result.transfers} transfers, {rate:.0f}/s, {result.kills} kills, "
        f"{len(result.wrong)} wrong   ",
        end="",
        file=sys.stderr,
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.fault_storm", description=__doc__.splitlines()[0])
    parser.add_argument("--transfers", type=int, default=5000, help="on each transport")
    parser.add_argument("--transport", nargs="+", help="shm and tcp, or with --gpu cuda_ipc, nccl and tcp_staged")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shape", default="small", help="of the blocks: small, bundled (the bundled model's), int8")
    parser.add_argument(
        "--ranks",
        type=lambda text: tuple(map(int, text.split(","))),
        default=(0, 0, 0, 0),
        metavar="P0,P1,D0,D1",
        help="tensor-parallel ranks of each worker, every one with a pool of its own, such as 2,1,2,4",
    )
    parser.add_argument(
        "--in-layers", action="store_true", help="p0 and d1 have a pool with a run of bytes for each layer of a block"
    )
    parser.add_argument("--gpu", action="store_true", help="those of GPUs on a GPU; else over stand-ins")
    parser.add_argument("--cut-network", action="store_true", help="tcp between network namespaces that are cut off")
    parser.add_argument(
        "--tiers", type=int, metavar="N", help="only the tiers below the pool, and pulls: N blocks each"
    )
    parser.add_argument("--only", nargs="+", choices=TIERS, help="of --tiers")
    parser.add_argument("--latest", type=float, default=LATEST_S, help="seconds after a deadline to free memory in")
    args = parser.parse_args()
    if args.tiers is not None:
        return max(TIERS[name](args.tiers, args.seed) for name in args.only or TIERS)
    if args.gpu and not torch.cuda.is_available():
        parser.error("no CUDA device")
    results = []
    plain = list(DEVICE_TRANSPORTS) if args.gpu else ["shm", "tcp"]
    for transport in ["tcp"] if args.cut_network else args.transport or plain:
        with contextlib.ExitStack() as stack:
            network = None
            if args.cut_network:
                if missing := why_not():
                    parser.error(missing)
                network = stack.enter_context(Network(tuple(ROLES)))
            storm = Storm(
                transport,
                args.seed,
                shape=args.shape,
                network=network,
                is_on_gpu=args.gpu,
                ranks=args.ranks,
                is_in_layers=args.in_layers,
                on_progress=progress,
            )
            results.append(storm.run(args.transfers))
        print(file=sys.stderr)
        if transport in DEVICE_TRANSPORTS and not args.gpu:
            print("Over stand-ins for CUDA and NCCL:")
        print_result(results[-1])
    if len(results) > 1:
        print("All transports:\n", *table(results), sep="\n")
    missed = misses(results, args.latest)
    for line in missed:
        print(f"MISSED: {line}", file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
