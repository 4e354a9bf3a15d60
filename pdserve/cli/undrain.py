"""`pdserve undrain`: allows new work on a drained worker again."""

from __future__ import annotations

import argparse

from pdserve.client.target_flags import add_target_flags, connect

HELP = "send new requests to a drained worker again"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", metavar="WORKER", help="name of the worker, as in `pdserve topology`")
    add_target_flags(parser)


def run(args: argparse.Namespace) -> int:
    with connect(args) as client:
        client.undrain(args.worker)
    print(f"{args.worker} gets new requests again")
    return 0
