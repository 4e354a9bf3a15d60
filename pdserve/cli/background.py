"""`pdserve up --detach` starts a launcher in the background, `pdserve adopt` replaces it, and `pdserve down` ends its
cluster."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from pdserve.cli import Command
from pdserve.core.errors import ConfigError, Unavailable
from pdserve.core.installation import check_platform

if TYPE_CHECKING:
    from pdserve.launch.detached.link import DetachedCluster

_BACKGROUND_ENV: Final = "PDSERVE_IN_BACKGROUND"  # of the launcher itself


def is_in_background() -> bool:
    """Whether this process is the launcher. Asked once: what it starts must not take itself for one."""
    return os.environ.pop(_BACKGROUND_ENV, "") == "1"


def start_in_background(argv: Sequence[str]) -> int:
    """Runs `pdserve ARGV` again, in the background, and returns its exit status if it ends before the cluster is
    ready. Until then it writes to this command's stderr."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pdserve", *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**os.environ, _BACKGROUND_ENV: "1"},
        start_new_session=True,
        text=True,
    )
    assert process.stdout is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: process.send_signal(signal.SIGTERM))
    ready, log = process.stdout.readline(), process.stdout.readline().rstrip("\n")
    if not log:
        return process.wait() or 1
    for number in (signal.SIGINT, signal.SIGTERM):  # these now end this command, and not the cluster
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.write(ready)
    sys.stdout.flush()
    text = (
        f"the launcher (pid {process.pid}) runs in the background, and writes to {log}; `pdserve down` ends the cluster"
    )
    print(text, file=sys.stderr)
    process.returncode = 0  # it goes on
    return 0


# --- running clusters -----------------------------------------------------------------------------------------


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--port",
        type=int,
        metavar="PORT",
        help="gRPC port of the cluster (the only one that was started with --detach)",
    )


def _find(port: int | None) -> DetachedCluster:
    """The cluster of this user with that port; None: the only one. Raises ConfigError and Unavailable."""
    check_platform(sys.platform)
    from pdserve.launch.detached.link import look, sockets

    async def look_at_all() -> list[DetachedCluster]:
        found = []
        for path in sockets():
            with contextlib.suppress(Unavailable):  # its keeper was killed
                found.append(await look(path))
        return found

    found = asyncio.run(look_at_all())
    chosen = [one for one in found if port in (None, port_of(one.state))]
    listed = ", ".join(str(port_of(one.state) or "one that is still starting") for one in found) or "none"
    if port is not None and len(chosen) != 1:
        raise ConfigError("port", port, f"the port of a cluster that was started with `up --detach`: {listed}")
    if not chosen:
        raise Unavailable("no cluster of this user runs in the background; `pdserve up --detach` starts one")
    if len(chosen) > 1:
        raise ConfigError("port", "nothing", f"--port with that of one of the clusters: {listed}")
    return chosen[0]


def port_of(state: Any) -> int | None:
    """The router's; None while the cluster is starting. Pure."""
    try:
        return int(state["cluster"]["spec"].get("port", 50051))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _adopt(args: argparse.Namespace) -> int:
    if not is_in_background():
        _find(args.port)  # an error is told at once
        return start_in_background(args.argv)
    from pdserve.launch.serve import take_over

    return asyncio.run(take_over(_find(args.port).socket))


def _down(args: argparse.Namespace) -> int:
    from pdserve.launch.detached.link import down

    found = _find(args.port)
    print("draining; running requests may finish", file=sys.stderr)
    asyncio.run(down(found.socket))
    print("the cluster has ended")
    return 0


ADOPT: Final = Command(
    "replace the launcher of a cluster that runs in the background, or start one if it has ended; requests go on",
    _add_flags,
    _adopt,
)
DOWN: Final = Command("drain and end a cluster that runs in the background", _add_flags, _down)

COMMANDS: Final = {"adopt": ADOPT, "down": DOWN}
