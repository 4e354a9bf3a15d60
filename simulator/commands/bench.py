"""`pdserve bench`: loads a running server with synthetic requests or a trace, and reports its latency and throughput.

Over gRPC it loads a router, over HTTP any server of OpenAI's API. `--compare` gives a second server the same requests
in alternating turns.
"""

from __future__ import annotations

import argparse

from pdserve.client.target_flags import add_target_flags
from pdserve.config_flags import read_as
from pdserve.plot_flag import add_plot_flag
from simulator.commands.flags import COMPARE_TOKEN_ENV, add_ends_flag
from simulator.commands.simulate import FORMAT_NAMES

HELP = "measure the latency and throughput of a running server"
ENDPOINTS = ("completions", "chat")


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_target_flags(parser)
    where = parser.add_argument_group("servers")
    where.add_argument(
        "--url", metavar="URL", help="load OpenAI's HTTP API at URL, such as http://127.0.0.1:8000, instead of a router"
    )
    where.add_argument("--name", metavar="NAME", help="name of the server in the report (pdserve)")
    where.add_argument(
        "--compare",
        metavar="URL",
        help="also load this server in alternating turns, and report the ratios: a URL, or HOST:PORT of a router",
    )
    where.add_argument("--compare-name", metavar="NAME", default="other", help="name of that server (other)")
    where.add_argument("--model", default="", help="name of the model; the one that the server names when absent")
    where.add_argument(
        "--endpoint",
        choices=ENDPOINTS,
        default=ENDPOINTS[0],
        help="over HTTP: completions with token ids, or chat with words (completions)",
    )
    load = parser.add_argument_group("load")
    loop = load.add_mutually_exclusive_group()
    loop.add_argument(
        "--rate",
        type=read_as(_numbers, "a number, or several such as 1,2,4"),
        metavar="R[,..]",
        help="open loop: Poisson arrivals per second; several are a sweep",
    )
    loop.add_argument(
        "--concurrency",
        type=read_as(_counts, "a whole number, or several such as 1,2,4"),
        metavar="N[,..]",
        help="closed loop: N callers, each with one request at a time; several are a sweep (4, without a trace)",
    )
    load.add_argument("--requests", type=int, metavar="N", help="requests of each turn (100, or the whole trace)")
    load.add_argument(
        "--duration", type=float, metavar="S", help="no request begins later than this in a turn, in seconds"
    )
    load.add_argument(
        "--input-tokens",
        type=read_as(_range, "a whole number, or two such as 32:128"),
        metavar="A:B",
        help="prompt lengths, evenly spread (128:512)",
    )
    load.add_argument(
        "--output-tokens",
        type=read_as(_range, "a whole number, or two such as 32:128"),
        metavar="A:B",
        help="answer lengths, evenly spread (32:128)",
    )
    load.add_argument("--prefix-tokens", type=int, default=0, metavar="N", help="tokens that prompts share (0)")
    load.add_argument("--prefixes", type=int, default=8, metavar="N", help="number of different shared prefixes (8)")
    load.add_argument(
        "--trace",
        "--replay",
        metavar="FILE",
        help=f"replay the lengths and arrival times of a trace, and sessions turn by turn: {FORMAT_NAMES}",
    )
    load.add_argument(
        "--workload",
        choices=["agents"],
        help="sessions of coding agents, as in `simulate`; --rate counts their turns, --concurrency the sessions",
    )
    add_ends_flag(load)
    load.add_argument("--sessions", type=int, metavar="N", help="number of sessions of --workload in each turn (8)")
    load.add_argument("--speed", type=float, default=1.0, metavar="X", help="divide arrival times and pauses by X (1)")
    load.add_argument(
        "--length-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="multiply the lengths of the trace by X (1)",
    )
    load.add_argument("--jitter", action="store_true", help="spread arrival times that the trace rounded")
    load.add_argument("--temperature", type=float, default=1.0, metavar="X", help="sampling temperature (1)")
    load.add_argument(
        "--stop-at-eos", action="store_true", help="answers may be shorter, where the model ends them by itself"
    )
    load.add_argument(
        "--token-ids",
        type=read_as(_range, "a whole number, or two such as 32:128"),
        metavar="A:B",
        help="prompts consist of token ids from A up to, not including, B (32:127)",
    )
    load.add_argument("--seed", type=int, default=0, metavar="N", help="seed of arrivals, lengths and texts (0)")
    load.add_argument(
        "--warmup", type=int, default=8, metavar="N", help="requests to each server that are not counted (8)"
    )
    load.add_argument("--turns", type=int, metavar="N", help="turns of each server at each load (1; 4 with --compare)")
    goal = parser.add_argument_group("targets, for goodput; sent along with each request")
    goal.add_argument("--slo-ttft", "--ttft", type=float, metavar="S", help="TTFT target in seconds")
    goal.add_argument("--slo-tpot", "--tpot", type=float, metavar="S", help="TPOT target in seconds")
    goal.add_argument("--slo-task", "--slo-task-s", type=float, metavar="S", help="deadline of a session in seconds")
    shown = parser.add_argument_group("output")
    shown.add_argument("--json", action="store_true", help="print one JSON object, with the field names of vLLM")
    shown.add_argument("--rows", metavar="FILE", help="write one JSON line per request to FILE")
    add_plot_flag(shown, "--html")
    parser.epilog = f"{parser.epilog or ''} {COMPARE_TOKEN_ENV} has the token of the --compare server.".strip()


def run(args: argparse.Namespace) -> int:
    from simulator.commands import bench_run

    return bench_run.run(args)


def _numbers(text: str) -> list[float]:
    return [float(one) for one in text.split(",")]


def _counts(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def _range(text: str) -> tuple[int, int]:
    """A:B, or A for A:A."""
    low, _, high = text.partition(":")
    return int(low), int(high or low)
