"""`pdserve up`: starts a cluster on this host or on Ray and keeps it until SIGINT or SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from pdserve.config import DEVICES, DTYPES, KV_DTYPES, LOADS, TRANSPORTS
from pdserve.core.errors import ConfigError

HELP = "start a cluster"
SETTINGS = "`python -m router --help` and `python -m decode_worker --help` list what the tables may set, with defaults."


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"{SETTINGS} A token in PDSERVE_TOKEN is asked of every caller."
    keep = argparse.SUPPRESS  # a flag that is not given leaves the file's value
    add = parser.add_argument
    add("--model", default=keep, metavar="DIR", help="a Hugging Face checkpoint, or toy; the bundled model when absent")
    add("--prefill", type=int, default=keep, metavar="N", help="prefill workers (1)")
    add("--decode", type=int, default=keep, metavar="M", help="decode workers (1)")
    add("--host", default=keep, help="address that the router listens on (127.0.0.1)")
    add("--port", type=int, default=keep, help="gRPC port of the router; 0 picks a free one (50051)")
    add("--redis", default=keep, metavar="URL", help="a Redis server; one is started here when absent")
    add("--ray", nargs="?", const="", default=keep, metavar="ADDRESS", help="make the workers Ray actors")
    add("--transport", choices=TRANSPORTS, default=keep, help="how KV travels (auto)")
    add("--device", choices=DEVICES, default=keep, help="where the model runs (auto)")
    add("--load", choices=LOADS, default=keep, help="dummy makes weights up, to measure speed without any (auto)")
    add("--dtype", choices=DTYPES, default=keep, help="of weights and activations (auto)")
    add("--kv-dtype", choices=KV_DTYPES, default=keep, help="of stored keys and values (auto)")
    add("--otlp", default=keep, metavar="HOST:PORT", help="OpenTelemetry collector that traces go to")
    add("--record", default=keep, metavar="FILE", help="record what the router hears and decides; without prompts")
    add("--log-dir", default=keep, metavar="DIR", help="write each process's log there instead of to stderr")
    add("--inject-faults", default=keep, metavar="PLAN", help="for tests: break KV transfers, as in seed=7,share=0.1")
    add(
        "--config",
        metavar="FILE",
        help="TOML with the same names, and tables [worker], [prefill_worker], [decode_worker], [router]",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one line of that file, such as router.max_queue=4; may be given again",
    )


def run(args: argparse.Namespace) -> int:
    from pdserve.launch import settings
    from pdserve.launch.serve import serve

    flags = {name: value for name, value in vars(args).items() if name not in ("command", "config", "set")}
    try:
        asked = settings.read(flags, Path(args.config) if args.config else None, args.set)
    except ConfigError as error:
        print(f"pdserve up: error: {error}", file=sys.stderr)
        return 2
    return asyncio.run(serve(asked))
