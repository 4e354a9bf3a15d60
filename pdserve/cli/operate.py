"""`pdserve topology`, `top`, `drain`, `undrain`, `scale`, `restart`, `roll`, `role`, `lora` and `sessions`: a running
cluster as its operator sees and changes it."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pdserve.bounded_file import MAX_SETTINGS_BYTES, read_text
from pdserve.cli import Command, table
from pdserve.client.results import ChangeStep, Topology, Worker
from pdserve.client.sync import Client
from pdserve.client.target_flags import add_target_flags, async_client, connect
from pdserve.core.errors import NotFound
from pdserve.core.installation import versions_text
from pdserve.core.json_text import to_json
from pdserve.core.live import FIRST_REVISION
from pdserve.core.results import ConversationView, SessionPage, SessionView
from pdserve.core.types import Role
from pdserve.model_source import TOY_MODELS
from pdserve.progress import require_terminal

# --- topology -------------------------------------------------------------------------------------------------


def _add_topology_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_target_flags(parser)


def _topology(args: argparse.Namespace) -> int:
    with connect(args) as client:
        topology = client.topology()
    print(to_json(topology) if args.json else render(topology))
    return 0


def render(topology: Topology) -> str:
    """Formats a table. Pure."""
    head = ("WORKER", "ROLE", "STATE", "RUNNING", "WAITING", "FREE BLOCKS", "CACHED", "ENDPOINT")
    rows = [head, *map(_row, topology.workers)]
    if any(one.revision for one in topology.workers):
        revisions = ["REVISION", *(one.revision or FIRST_REVISION for one in topology.workers)]
        rows = [(*row, revision) for row, revision in zip(rows, revisions, strict=True)]
    lines = table(rows)
    several = f" in {topology.num_answered} of {topology.num_routers} routers" if topology.num_routers > 1 else ""
    summary = (
        f"{topology.router_id}: {topology.running_requests} running, {topology.queued_requests} queued{several}, "
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


TOPOLOGY: Final = Command("show the workers of a cluster", _add_topology_flags, _topology)

# --- live view in a terminal ----------------------------------------------------------------------------------


def _top(args: argparse.Namespace) -> int:
    from pdserve.top.app import RouterSource, TopApp

    require_terminal("`pdserve topology --json` is for programs")

    async def watch() -> int:
        async with async_client(args) as client:
            await client.topology()  # raises at once where there is no router, or it rejects the token
            return await TopApp(RouterSource(client, args.target)).run_async() or 0

    return asyncio.run(watch())


TOP: Final = Command("watch workers, requests and KV transfers in the terminal", add_target_flags, _top)

# --- draining -------------------------------------------------------------------------------------------------

#: Of draining the last worker of a role.
CONSEQUENCES: Final = {
    "decode": "requests wait for 5 s and then fail,",
    "prefill": "decode workers also compute the prompts",
}


def _add_worker_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", metavar="WORKER", help="name of the worker, as in `pdserve topology`")
    add_target_flags(parser)


def _drain(args: argparse.Namespace) -> int:
    with connect(args) as client:
        client.drain(args.worker)
        workers = client.topology().workers
    print(f"{args.worker} gets no new requests; `pdserve undrain {args.worker}` undoes this")
    role = next((one.role for one in workers if one.worker_id == args.worker), None)
    is_last = not any(one.role == role and one.is_connected and not one.is_draining for one in workers)
    if role == "decode" and not is_last:
        print("its running answers move to other workers, or finish where that takes no longer")
    if is_last and role in CONSEQUENCES:
        print(f"{args.worker} was the last {role} worker: {CONSEQUENCES[role]} until it is undrained")
    return 0


def _undrain(args: argparse.Namespace) -> int:
    with connect(args) as client:
        client.undrain(args.worker)
    print(f"{args.worker} gets new requests again")
    return 0


DRAIN: Final = Command(
    "send no new requests to a worker, until undrain or its next start; running answers move, or finish",
    _add_worker_flags,
    _drain,
)
UNDRAIN: Final = Command("send new requests to a drained worker again", _add_worker_flags, _undrain)

# --- changes of workers ---------------------------------------------------------------------------------------
# The launcher makes them. A command prints the steps, and returns when the cluster is ready.


def _print_step(step: ChangeStep) -> None:
    print(f"{step.worker_id:<8} {step.text}" if step.worker_id else step.text, flush=True)


def _changed(args: argparse.Namespace, change: Callable[[Client], None]) -> int:
    with connect(args) as client:
        try:
            change(client)
        except KeyboardInterrupt:
            print("the launcher goes on with the change; its lines and `pdserve topology` show it", file=sys.stderr)
            raise
    return 0


def _add_scale_flags(parser: argparse.ArgumentParser) -> None:
    for role in Role:
        parser.add_argument(
            f"--{role}", type=int, metavar="N", help=f"number of {role} workers; as many as there are if absent"
        )
    add_target_flags(parser)


def _scale(args: argparse.Namespace) -> int:
    return _changed(args, lambda client: client.scale(prefill=args.prefill, decode=args.decode, on_step=_print_step))


def _add_surge_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--surge",
        type=int,
        choices=(0, 1),
        default=1,
        help="workers that are started in addition before one of their role is drained (1)",
    )


def _add_restart_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", nargs="+", metavar="WORKER", help="name of the worker, as in `pdserve topology`")
    _add_surge_flag(parser)
    add_target_flags(parser)


def _restart(args: argparse.Namespace) -> int:
    return _changed(args, lambda client: client.roll(args.worker, surge=args.surge, on_step=_print_step))


def _add_roll_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--settings",
        metavar="FILE",
        help="TOML file with new values in the tables worker, prefill_worker and decode_worker; others stay the same",
    )
    parser.add_argument(
        "--model", metavar="DIR", help="folder on the launcher's host with other weights, for the same tokenizer"
    )
    parser.add_argument(
        "--undo", action="store_true", help="return to the settings and the weights before the last roll-out"
    )
    _add_surge_flag(parser)
    add_target_flags(parser)


def _roll(args: argparse.Namespace) -> int:
    settings = read_text(args.settings, MAX_SETTINGS_BYTES, "settings") if args.settings else ""
    model = args.model or ""
    if model and model not in TOY_MODELS:
        model = str(Path(model).expanduser().absolute())

    def roll(client: Client) -> None:
        client.roll(surge=args.surge, settings=settings, model=model, undo=args.undo, on_step=_print_step)

    return _changed(args, roll)


def _add_role_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", metavar="WORKER", help="name of the worker, as in `pdserve topology`")
    parser.add_argument("role", choices=[str(one) for one in Role], help="its new role")
    add_target_flags(parser)


def _role(args: argparse.Namespace) -> int:
    return _changed(args, lambda client: client.set_role(args.worker, Role(args.role), on_step=_print_step))


SCALE: Final = Command(
    "change the number of workers of a running cluster; those that cost least are drained and end",
    _add_scale_flags,
    _scale,
)
RESTART: Final = Command(
    "replace workers by new processes, one after another, each drained before", _add_restart_flags, _restart
)
ROLL: Final = Command(
    "replace all workers, one after another, also with new settings or weights; stops if a new one fails",
    _add_roll_flags,
    _roll,
)
ROLE: Final = Command("drain a worker, which then takes the other role", _add_role_flags, _role)

# --- LoRA adapters --------------------------------------------------------------------------------------------


def _add_lora_flags(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="print the names that requests may choose as their model")
    load = actions.add_parser("load", help="load an adapter on all workers, or replace the one of this name")
    unload = actions.add_parser("unload", help="offer the adapter to no new request")
    for one in (load, unload):
        one.add_argument("name", metavar="NAME", help="the model of requests that choose the adapter")
    load.add_argument("folder", metavar="FOLDER", help="on the workers, below one of their lora_folders")
    for one in (listing, load, unload):
        add_target_flags(one)


def _lora(args: argparse.Namespace) -> int:
    with connect(args) as client:
        if args.action == "load":
            print(f"all workers serve {args.name}, fingerprint {client.load_adapter(args.name, args.folder)}")
        elif args.action == "unload":
            client.unload_adapter(args.name)
            print(f"{args.name} gets no new requests")
        else:
            print("\n".join(client.model().adapters) or "no adapters")
    return 0


LORA: Final = Command("list, load and unload LoRA adapters", _add_lora_flags, _lora)

# --- sessions -------------------------------------------------------------------------------------------------


def _add_sessions_flags(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="show the last used sessions, and where their prefixes are cached")
    listing.add_argument("--limit", type=int, default=0, metavar="N", help="number of sessions, at most 100 (20)")
    listing.add_argument(
        "--after", type=int, default=0, metavar="CURSOR", help="the sessions after a page that ended with CURSOR"
    )
    listing.add_argument("--json", action="store_true", help="print one JSON object")
    end = actions.add_parser("end", help="say that no request of a session follows: its cached prefixes leave first")
    end.add_argument("session", metavar="ID", help="its id, as in `pdserve sessions list`")
    for one in (listing, end):
        add_target_flags(one)


def _sessions(args: argparse.Namespace) -> int:
    with connect(args) as client:
        if args.action == "list":
            page = client.sessions(args.limit, args.after)
            print(to_json(page) if args.json else render_sessions(page, time.time()))
        elif client.end_session(args.session):
            print(f"session {args.session} has ended: its cached prefixes leave first")
        else:
            raise NotFound("session", args.session)
    return 0


def render_sessions(page: SessionPage, now_s: float) -> str:
    """Formats a table with a row for each conversation. Pure. `now_s`: since 1970."""
    head = ("SESSION", "TENANT", "ROUTER", "TURNS", "PROMPT", "USED", "NEXT TURN", "CACHED TOKENS")
    rows = [_conversation(session, one, now_s) for session in page.sessions for one in session.conversations[::-1]]
    lines = table([head, *rows]) if rows else ["no sessions"]
    if page.has_more:
        lines.append(f"more with --after {page.sessions[-1].cursor}")
    if page.is_partial:
        lines.append("another router has not answered or is busy: its sessions are not shown")
    return "\n".join(lines)


def _conversation(session: SessionView, one: ConversationView, now_s: float) -> tuple[str, ...]:
    due = "-" if one.until_s is None else f"within {max(one.until_s - now_s, 0.0):.0f} s"
    cached = ", ".join(f"{held.worker_id} {held.tokens}" for held in one.cached)
    return (
        session.session_id,
        session.tenant or "-",
        session.router_id or "-",
        str(one.turns),
        str(one.prompt_tokens),
        f"{max(now_s - one.used_at_s, 0.0):.0f} s ago",
        "running" if one.running else "over" if one.is_over else due,
        cached or ("nowhere" if one.is_cached_known else "not known"),
    )


SESSIONS: Final = Command("list sessions and what is cached for them, and end one", _add_sessions_flags, _sessions)

COMMANDS: Final = {
    "topology": TOPOLOGY,
    "top": TOP,
    "drain": DRAIN,
    "undrain": UNDRAIN,
    "scale": SCALE,
    "restart": RESTART,
    "roll": ROLL,
    "role": ROLE,
    "lora": LORA,
    "sessions": SESSIONS,
}
