"""`pdserve plan`: how to divide workers or GPUs between prefill and decode, or whether to disaggregate at all.

It simulates the same requests on each division. Equal arguments give equal answers for any number of processes.
"""

from __future__ import annotations

import argparse
import os
from typing import Final

from pdserve.config_flags import read_as
from pdserve.plot_flag import add_plot_flag
from simulator.commands import flags
from simulator.commands.simulate import FORMAT_NAMES, POLICY_NAMES, WORKLOAD_NAMES

HELP = "find the best numbers of prefill and decode workers"
DEFAULT_GPUS: Final = 2
MAX_LENGTH: Final = 100_000  # median tokens of --lengths


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", metavar="FILE", help=f"trace: {FORMAT_NAMES} (a built-in workload)")
    parser.add_argument("--workload", metavar="NAME", help=f"built-in workload: {WORKLOAD_NAMES} (chat)")
    parser.add_argument(
        "--lengths",
        type=read_as(_lengths, f"two whole numbers, such as 512,128, each up to {MAX_LENGTH}"),
        metavar="P,A",
        help="workload with prompts and answers of these median lengths in tokens, log-normal, instead of --workload",
    )
    parser.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help=f"use only the first N requests ({flags.DEFAULT_REQUESTS} of a trace; of a workload as many as a verdict "
        "needs)",
    )
    parser.add_argument(
        "--profile",
        default=flags.PROFILE,
        metavar="NAME",
        help=f"profile of the workers: a name or a file ({flags.PROFILE})",
    )
    parser.add_argument(
        "--link", default="", metavar="NAME", help="link between workers, one of the profile (its first)"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--workers", type=int, metavar="K", help="total number of workers, all of one profile")
    size.add_argument(
        "--gpus",
        type=int,
        default=DEFAULT_GPUS,
        metavar="G",
        help=f"total number of GPUs: compare the tensor-parallel degrees of the profile as well ({DEFAULT_GPUS})",
    )
    parser.add_argument(
        "--degrees",
        type=read_as(_degrees, "a whole number up to 64, or several such as 1,2,4"),
        metavar="N,..",
        help="tensor-parallel degrees to compare, also derived ones (those whose costs the profile lists)",
    )
    parser.add_argument(
        "--slo-ttft",
        type=float,
        default=flags.SLO_TTFT_S,
        metavar="S",
        help=f"TTFT target in seconds ({flags.SLO_TTFT_S:g})",
    )
    parser.add_argument(
        "--slo-tpot",
        type=float,
        default=flags.SLO_TPOT_S,
        metavar="S",
        help=f"TPOT target in seconds ({flags.SLO_TPOT_S:g})",
    )
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
    add_plot_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Status 1: no split meets the targets at any rate. Status 3: the requests are too few for a verdict."""
    from simulator.commands import gpu_planning, planning

    return gpu_planning.run(args) if args.workers is None else planning.run(args)


def _lengths(text: str) -> tuple[int, ...]:
    return _counts(text, 2, 2, MAX_LENGTH)


def _degrees(text: str) -> tuple[int, ...]:
    return _counts(text, 1, 8, 64)


def _counts(text: str, least: int, most: int, limit: int) -> tuple[int, ...]:
    found = tuple(int(one) for one in text.split(","))
    if not least <= len(found) <= most or not all(1 <= one <= limit for one in found):
        raise ValueError(text)
    return found
