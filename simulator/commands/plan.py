"""`pdserve plan`: how many of K workers should only read prompts, or whether to disaggregate at all.

By simulation of a trace on each split; equal arguments give equal answers, however many processes share the work.
"""

from __future__ import annotations

import argparse
import os
from typing import Final

from simulator.commands import defaults
from simulator.commands.simulate import FORMAT_NAMES, POLICY_NAMES

HELP = "find the best split of workers into prefill and decode ones"
DEFAULT_REQUESTS: Final = 2000


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", metavar="FILE", required=True, help=FORMAT_NAMES)
    parser.add_argument(
        "--requests", type=int, default=DEFAULT_REQUESTS, metavar="N", help=f"only its first N ({DEFAULT_REQUESTS})"
    )
    parser.add_argument(
        "--profile", default=defaults.PROFILE, metavar="NAME", help=f"of a worker, or a file ({defaults.PROFILE})"
    )
    parser.add_argument("--link", default="", metavar="NAME", help="between workers; one of the profile's (its first)")
    parser.add_argument("--workers", type=int, required=True, metavar="K", help="to be split")
    parser.add_argument("--slo-ttft", type=float, required=True, metavar="S", help="promised time to first token")
    parser.add_argument("--slo-tpot", type=float, required=True, metavar="S", help="promised time per token")
    parser.add_argument("--policy", default="goodput", metavar="NAME", help=f"one of {POLICY_NAMES} (goodput)")
    parser.add_argument("--rate", type=float, metavar="R", help="also: how many workers hold R requests/s")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs at each rate, pooled (1)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the first of them (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (all cores)")
    parser.add_argument("--json", action="store_true", help="print one object")


def run(args: argparse.Namespace) -> int:
    """Status 1: no split meets the targets at any rate. Status 3: the requests are too few for a verdict."""
    from simulator.commands.planning import carry_out

    return carry_out(args)
