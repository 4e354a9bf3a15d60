"""`pdserve plan`: how many of K workers should only prefill, or whether to disaggregate at all.

It simulates a trace on each split. Equal arguments give equal answers for any number of processes.
"""

from __future__ import annotations

import argparse
import os
from typing import Final

from simulator.commands import defaults
from simulator.commands.simulate import FORMAT_NAMES, POLICY_NAMES

HELP = "find the best numbers of prefill and decode workers"
DEFAULT_REQUESTS: Final = 2000


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", metavar="FILE", required=True, help=f"trace: {FORMAT_NAMES}")
    parser.add_argument(
        "--requests",
        type=int,
        default=DEFAULT_REQUESTS,
        metavar="N",
        help=f"use only the first N requests ({DEFAULT_REQUESTS})",
    )
    parser.add_argument(
        "--profile",
        default=defaults.PROFILE,
        metavar="NAME",
        help=f"profile of the workers: a name or a file ({defaults.PROFILE})",
    )
    parser.add_argument(
        "--link", default="", metavar="NAME", help="link between workers, one of the profile (its first)"
    )
    parser.add_argument("--workers", type=int, required=True, metavar="K", help="total number of workers")
    parser.add_argument("--slo-ttft", type=float, required=True, metavar="S", help="TTFT target in seconds")
    parser.add_argument("--slo-tpot", type=float, required=True, metavar="S", help="TPOT target in seconds")
    parser.add_argument("--policy", default="goodput", metavar="NAME", help=f"policy: {POLICY_NAMES} (goodput)")
    parser.add_argument(
        "--rate", type=float, metavar="R", help="also compute how many workers serve R requests per second"
    )
    parser.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="number of runs at each rate, whose results are pooled (1)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the first run (0)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="number of processes (all cores)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Status 1: no split meets the targets at any rate. Status 3: the requests are too few for a verdict."""
    from simulator.commands.planning import carry_out

    return carry_out(args)
