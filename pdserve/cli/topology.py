"""`pdserve topology`: the workers that a router knows, and their state."""

from __future__ import annotations

import argparse

from pdserve.client.results import Topology, Worker
from pdserve.client.target_flags import add_target_flags, connect
from pdserve.core.installation import versions_text
from pdserve.core.json_text import to_json

HELP = "show the workers of a cluster"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_target_flags(parser)


def run(args: argparse.Namespace) -> int:
    with connect(args) as client:
        topology = client.topology()
    print(to_json(topology) if args.json else render(topology))
    return 0


def render(topology: Topology) -> str:
    """Formats a table. Pure."""
    head = ("WORKER", "ROLE", "STATE", "RUNNING", "WAITING", "FREE BLOCKS", "CACHED", "ENDPOINT")
    rows = [head, *(_row(worker) for worker in topology.workers)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    summary = (
        f"{topology.router_id}: {topology.running_requests} running, {topology.queued_requests} queued, "
        f"up {topology.uptime_s:.0f} s"
    )
    links = [
        f"KV {worker.worker_id} -> {link.decode_worker}: {link.transport} ({link.reason})"
        for worker in topology.workers
        for link in worker.kv_links
    ]
    versions = versions_text(topology.version, [(one.worker_id, one.version) for one in topology.workers])
    return "\n".join([*lines, *links, ", ".join(filter(None, (summary, versions)))])


def _row(worker: Worker) -> tuple[str, ...]:
    return (
        worker.worker_id,
        worker.role or "?",
        _state(worker),
        str(worker.running),
        str(worker.waiting),
        str(worker.free_blocks),
        str(worker.evictable_blocks),
        worker.endpoint,
    )


def _state(worker: Worker) -> str:
    """drained: by an operator, until `pdserve undrain`. draining: the worker is about to end."""
    if not worker.is_connected:
        return "away"
    return "drained" if worker.is_drained else "draining" if worker.is_draining else "connected"
