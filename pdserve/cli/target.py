"""Flags of every command that calls a running cluster, and the client made from them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from pdserve.client.connect import Tls
from pdserve.client.sync import Client
from pdserve.config import TOKEN_ENV, from_env
from pdserve.core.errors import ConfigError

DEFAULT_TARGET = "127.0.0.1:50051"


def add_target_flags(parser: argparse.ArgumentParser, *, are_several: bool = False) -> None:
    """`are_several`: the command splits a list of routers itself."""
    parser.add_argument(
        "--target",
        default=os.environ.get("PDSERVE_TARGET", DEFAULT_TARGET),
        metavar="HOST:PORT[,...]" if are_several else "HOST:PORT",
        help=f"address of the router{'s' if are_several else ''}, also in PDSERVE_TARGET ({DEFAULT_TARGET})",
    )
    parser.epilog = (
        "The token of the cluster is read from PDSERVE_TOKEN, or from the file that PDSERVE_TOKEN_FILE names."
    )
    parser.add_argument("--tls", action="store_true", help="use TLS with the system's root certificates")
    parser.add_argument("--root-certs", metavar="FILE", help="use TLS with the root certificates in FILE (PEM)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="timeout of one request (600)")


def connect(args: argparse.Namespace) -> Client:
    """The token comes from the environment or a file, because other users can read a command line."""
    roots = None
    if args.root_certs:
        try:
            roots = Path(args.root_certs).read_bytes()
        except OSError as error:
            raise ConfigError("root-certs", args.root_certs, f"a file that can be read ({error.strerror})") from None
    tls = Tls(root_certs=roots) if args.tls or roots is not None else None
    return Client(args.target, token=from_env(TOKEN_ENV) or None, tls=tls, timeout_s=args.timeout)
