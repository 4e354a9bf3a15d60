"""`pdserve simulate`: simulates a cluster with a trace, using the router's and the workers' own decision code.

Without a trace it runs a built-in workload. Without arguments it compares three policies, one of them also without
prefill workers, at rising rates. A recording
has its own cluster. Each combination of policy and rate is one run. Equal arguments give equal output.
"""

from __future__ import annotations

import argparse
from typing import Final

from pdserve.config import POLICIES
from pdserve.config_flags import read_as
from pdserve.plot_flag import add_plot_flag
from simulator.commands import flags
from simulator.commands.flags import add_ends_flag, add_fault_flags

HELP = "simulate a cluster on a trace"
POLICY_NAMES: Final = ", ".join(POLICIES)
# Listed here, because importing the rules, workloads and formats would slow down every command. A test compares them.
RULE_NAMES: Final = (
    "path-choice, tandem, least-slack, ageing, fairness, priority, rejection, "
    "shortest, deadline-drop, transfer-price, prefix-value"
)
WORKLOAD_NAMES: Final = "chat, long-tail, bursts, agents, short"
FORMAT_NAMES: Final = "sessions JSONL, Claude Code JSONL, Mooncake JSONL, Azure CSV, pdserve recording"


_OR_DEMO: Final = ", or those of the demonstration"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Without --trace, --workload, --policy, --rates and --rate-scale, a demonstration runs at four rates of the "
        "built-in workload: goodput with and without prefill workers, round-robin and colocated."
    )
    what = parser.add_argument_group("workload")
    what.add_argument("--trace", metavar="FILE", help=f"trace: {FORMAT_NAMES} (a built-in workload)")
    what.add_argument("--workload", metavar="NAME", help=f"built-in workload: {WORKLOAD_NAMES} (chat)")
    what.add_argument("--duration", type=float, metavar="S", help="duration of the built-in workload in seconds (100)")
    add_ends_flag(what)
    what.add_argument("--limit", type=int, metavar="N", help="use only the first N requests")
    what.add_argument(
        "--jitter",
        type=int,
        metavar="SEED",
        help="spread arrival times that the trace rounded, such as the 3 s of Mooncake",
    )
    rate = what.add_mutually_exclusive_group()
    rate.add_argument("--rate-scale", type=float, metavar="X", help=f"multiply the arrival rate by X (1{_OR_DEMO})")
    rate.add_argument(
        "--rates",
        type=read_as(_floats, "a number, or several such as 1,2,4"),
        metavar="X,Y,..",
        help="simulate each of several rate scales",
    )
    where = parser.add_argument_group("cluster")
    where.add_argument("--profile", metavar="NAME", help=f"profile of the workers: a name or a file ({flags.PROFILE})")
    where.add_argument("--prefill", type=int, metavar="N", help=f"number of prefill workers ({flags.WORKERS})")
    where.add_argument("--decode", type=int, metavar="M", help=f"number of decode workers ({flags.WORKERS})")
    where.add_argument("--link", metavar="NAME", help="link between workers, one of the profile (its first)")
    where.add_argument(
        "--host-gib",
        type=float,
        metavar="X",
        help="host memory of each worker for KV that has left its pool, in GiB (0)",
    )
    where.add_argument(
        "--host-gb-per-s", type=float, metavar="X", help="speed of copies to that memory and back, in GB/s (25)"
    )
    where.add_argument(
        "--disk-gib", type=float, metavar="X", help="disk of each worker for KV that has left memory, in GiB (0)"
    )
    where.add_argument("--disk-gb-per-s", type=float, metavar="X", help="speed of reads from that disk, in GB/s (3)")
    where.add_argument(
        "--no-kv-pull",
        action="store_true",
        help="do not let workers pull cached KV from each other, as with worker.kv_pull=false",
    )
    where.add_argument(
        "--routers",
        type=int,
        default=1,
        metavar="K",
        help="number of routers; each learns of the others' placements with a delay (1)",
    )
    add_fault_flags(where)
    how = parser.add_argument_group("scheduling and targets")
    how.add_argument("--policy", metavar="NAME[,..]", help=f"one or more policies: {POLICY_NAMES} (goodput{_OR_DEMO})")
    how.add_argument("--rules-off", default="", metavar="A,B", help=f"rules of goodput to turn off: {RULE_NAMES}")
    how.add_argument("--slo-ttft", type=float, metavar="S", help=f"TTFT target in seconds ({flags.SLO_TTFT_S:g})")
    how.add_argument("--slo-tpot", type=float, metavar="S", help=f"TPOT target in seconds ({flags.SLO_TPOT_S:g})")
    how.add_argument(
        "--noise", type=float, default=0.0, metavar="X", help="relative standard deviation of step times (0)"
    )
    how.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (0)")
    shown = parser.add_argument_group("output")
    shown.add_argument("--json", action="store_true", help="print one JSON object")
    shown.add_argument(
        "--rows", metavar="FILE", help="write one row per request to FILE: CSV if FILE ends in .csv, else JSON lines"
    )
    shown.add_argument("--record", metavar="FILE", help="record the router of a single run, for `pdserve play`")
    add_plot_flag(shown, "--html")


def run(args: argparse.Namespace) -> int:
    from simulator.commands import simulation

    simulation.run(args)
    return 0


def _floats(text: str) -> list[float]:
    return sorted({float(one) for one in text.split(",")})
