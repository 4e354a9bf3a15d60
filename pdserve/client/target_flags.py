"""Flags of every command that calls a running cluster, and the client made from them."""

from __future__ import annotations

import argparse
import os
import ssl
from typing import Final
from urllib.parse import urlsplit

from pdserve.client.aio import AsyncClient
from pdserve.client.connect import Tls, is_loopback
from pdserve.client.sync import Client
from pdserve.config import TOKEN_ENV, from_env
from pdserve.core.access.hosts import is_loopback_host
from pdserve.core.errors import ConfigError
from pdserve.tls.certificates import local_ca

DEFAULT_TARGET = "127.0.0.1:50051"
CA_ENV: Final = "PDSERVE_TLS_CA"
CERT_ENV: Final = "PDSERVE_TLS_CERT"
KEY_ENV: Final = "PDSERVE_TLS_KEY"
NAME_ENV: Final = "PDSERVE_TLS_SERVER_NAME"


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
    add = parser.add_argument
    add(
        "--tls", action="store_true", help="use TLS, with the root certificates that gRPC brings unless --tls-ca is set"
    )
    add(
        "--tls-ca",
        metavar="FILE",
        help=f"use TLS, and accept certificates from the CA in FILE (PEM), also in {CA_ENV}; found by itself for a "
        "cluster that this user has started on this host with --tls auto",
    )
    add("--tls-cert", metavar="FILE", help=f"certificate to present (PEM), also in {CERT_ENV}")
    add("--tls-key", metavar="FILE", help=f"its private key (PEM), also in {KEY_ENV}")
    add("--tls-server-name", metavar="NAME", help=f"name in the router's certificate, also in {NAME_ENV} (its host)")
    add("--insecure", action="store_true", help="send the token in plain text to another host")
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="timeout of one request (600)")


def connect(args: argparse.Namespace) -> Client:
    """The token comes from the environment or a file, because other users can read a command line."""
    token = from_env(TOKEN_ENV) or None
    return Client(args.target, token=token, tls=tls_of(args), insecure=args.insecure, timeout_s=args.timeout)


def async_client(args: argparse.Namespace) -> AsyncClient:
    """As `connect`, for the event loop that first uses it."""
    token = from_env(TOKEN_ENV) or None
    return AsyncClient(args.target, token=token, tls=tls_of(args), insecure=args.insecure, timeout_s=args.timeout)


def tls_of(args: argparse.Namespace) -> Tls | None:
    """None for plain text. Raises ConfigError if a file cannot be read."""
    ca, cert = args.tls_ca or os.environ.get(CA_ENV), args.tls_cert or os.environ.get(CERT_ENV)
    key, name = args.tls_key or os.environ.get(KEY_ENV), args.tls_server_name or os.environ.get(NAME_ENV, "")
    if not ca and not args.tls and is_loopback(args.target.split(",")[0]):
        ca = local_ca(args.target.split(",")[0].rpartition(":")[2])
    if not (ca or cert or args.tls):
        return None
    return Tls.from_files(ca=ca or None, cert=cert or None, key=key or None, server_name=name)


def ssl_context(args: argparse.Namespace, url: str) -> ssl.SSLContext | None:
    """For https with the same flags; None for http. Raises ConfigError if a file cannot be used."""
    parts = urlsplit(url)
    if parts.scheme != "https":
        return None
    ca, cert = args.tls_ca or os.environ.get(CA_ENV), args.tls_cert or os.environ.get(CERT_ENV)
    key = args.tls_key or os.environ.get(KEY_ENV)
    if not ca and not args.tls and is_loopback_host(parts.hostname or ""):
        ca = local_ca(str(parts.port or 443))
    try:
        context = ssl.create_default_context(cafile=ca or None)
        if cert:
            context.load_cert_chain(cert, key or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError("tls-ca, tls-cert and tls-key", f"{ca or ''} {cert or ''}", f"PEM files ({error})") from None
    return context
