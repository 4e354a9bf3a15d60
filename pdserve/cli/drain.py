"""`pdserve drain`: stops new work on a worker, until `pdserve undrain`."""

from __future__ import annotations

import argparse

from pdserve.cli.target import add_target_flags, connect

HELP = "send no new requests to a worker, until undrain or its next start; running requests finish"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", metavar="WORKER", help="name of the worker, as in `pdserve topology`")
    add_target_flags(parser)


def run(args: argparse.Namespace) -> int:
    with connect(args) as client:
        client.drain(args.worker)
    print(f"{args.worker} gets no new requests; `pdserve undrain {args.worker}` undoes this")
    return 0
