"""`pdserve drain`: stops new work on a worker, until `pdserve undrain`."""

from __future__ import annotations

import argparse
from typing import Final

from pdserve.client.target_flags import add_target_flags, connect

HELP = "send no new requests to a worker, until undrain or its next start; running requests finish"
#: Of draining the last worker of a role.
CONSEQUENCES: Final = {
    "decode": "requests wait for 5 s and then fail,",
    "prefill": "decode workers also compute the prompts",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", metavar="WORKER", help="name of the worker, as in `pdserve topology`")
    add_target_flags(parser)


def run(args: argparse.Namespace) -> int:
    with connect(args) as client:
        client.drain(args.worker)
        workers = client.topology().workers
    print(f"{args.worker} gets no new requests; `pdserve undrain {args.worker}` undoes this")
    role = next((one.role for one in workers if one.worker_id == args.worker), None)
    is_last = not any(one.role == role and one.is_connected and not one.is_draining for one in workers)
    if is_last and role in CONSEQUENCES:
        print(f"{args.worker} was the last {role} worker: {CONSEQUENCES[role]} until it is undrained")
    return 0
