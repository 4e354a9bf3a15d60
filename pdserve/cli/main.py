"""The command `pdserve`: finds and runs the sub-command, and turns an error into one line and an exit status.

Status 1: it failed. 2: wrong usage. 130: interrupted.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from pdserve.build import FULL_VERSION
from pdserve.cli import Command
from pdserve.config_flags import Parser
from pdserve.core.errors import NONE_YET, NotFound, NoWorkers, PdserveError, Unauthenticated
from pdserve.core.installation import missing
from pdserve.tls.reasons import UNKNOWN_CA

NAMES: Final = (
    *("up", "serve", "generate", "chat", "topology", "top", "drain", "undrain", "scale", "restart", "roll", "role"),
    *("lora", "sessions", "explain", "replay", "play", "simulate", "plan", "keys", "bench", "adopt", "down", "rank"),
    "doctor",
)


class CommandModule(Protocol):
    """A module that holds one command."""

    HELP: str

    def add_flags(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def load(name: str) -> Command:
    """Imports the module of one command, because importing those of all would take 0.2 CPU seconds."""
    module: CommandModule
    match name:
        case "generate" | "chat":
            from pdserve.cli import generate

            return generate.COMMANDS[name]
        case "adopt" | "down":
            from pdserve.cli import background

            return background.COMMANDS[name]
        case "up" | "serve":
            from pdserve.cli import up

            module = up
        case "explain":
            from pdserve.cli import explain

            module = explain
        case "replay":
            from router.recording import replay_command

            module = replay_command
        case "play":
            from router.recording import play

            module = play
        case "simulate":
            from simulator.commands import simulate

            module = simulate
        case "plan":
            from simulator.commands import plan

            module = plan
        case "keys":
            from pdserve.cli import keys

            module = keys
        case "bench":
            from simulator.commands import bench

            module = bench
        case "rank":
            from pdserve.cli import rank

            module = rank
        case "doctor":
            from pdserve.cli import doctor

            module = doctor
        case _:  # a name that is missing above raises KeyError here
            from pdserve.cli import operate

            return operate.COMMANDS[name]
    help_text = "the same as `up --http 8000`, as vLLM's command" if name == "serve" else module.HELP
    return Command(help_text, module.add_flags, module.run)


def make_parsers(names: Iterable[str] = NAMES) -> tuple[Parser, dict[str, Parser], dict[str, Command]]:
    """The parser of `pdserve` with these commands, and the parser and the code of each."""
    parser = Parser(
        prog="pdserve", description="Serve a large language model with separate prefill and decode workers."
    )
    parser.add_argument("--version", action="version", version=f"pdserve {FULL_VERSION}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    loaded = {name: load(name) for name in names}
    parser_of = {
        name: subparsers.add_parser(name, help=command.help, description=command.help, allow_abbrev=False)
        for name, command in loaded.items()
    }
    for name, command in loaded.items():
        command.add_flags(parser_of[name])
    return parser, parser_of, loaded


def main(argv: Sequence[str] | None = None) -> int:
    _tolerate_any_text()
    # gRPC's messages about failed handshakes would repeat our error. It reads this when it is imported, by a command.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    words = sys.argv[1:] if argv is None else list(argv)
    parser, parser_of, loaded = make_parsers(words[:1] if words and words[0] in NAMES else NAMES)
    args, unknown = parser.parse_known_args(words)
    args.argv = words
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    if unknown:  # parse_args would point to the help of `pdserve`, which does not list them
        parser_of[args.command].reject(unknown)
    try:
        return loaded[args.command].run(args)
    except PdserveError as error:
        print(f"pdserve {args.command}: error: {one_line(error)}{hint(error)}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:  # an extra that is not installed
        if (absent := missing(error)) is None:
            raise
        print(f"pdserve {args.command}: error: {one_line(absent)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _discard_stdout()  # the program that reads the output, such as `head`, has ended
        return 1
    except OSError as error:  # not caused by a flag, such as a full disk or exhausted descriptors
        _discard_stdout()
        print(f"pdserve {args.command}: error: {one_line(error)}", file=sys.stderr)
        return 1


def hint(error: PdserveError) -> str:
    """A hint that the error itself does not contain."""
    if error.message.startswith("no server answers at"):
        return "; is `pdserve up` running there?"
    if error.message.endswith(UNKNOWN_CA):
        return (
            "; name its CA with --tls-ca FILE, or omit --tls: the CA of a cluster that you have started on this host "
            "with `up --tls auto` is then found by itself"
        )
    if isinstance(error, NoWorkers):
        if "drained" in error.states:
            return "; `pdserve undrain WORKER` lets a drained one serve again"
        is_starting = error.states == NONE_YET
        return (
            "; is the cluster still starting? Wait for `pdserve ready`" if is_starting else "; see `pdserve topology`"
        )
    if isinstance(error, NotFound) and error.kind == "recent request":
        return (
            "; a router knows its last 1,024 requests, by the id that `pdserve generate --stats` or --json, the header "
            "x-request-id of an answer and `pdserve top` show"
        )
    return " (PDSERVE_TOKEN holds the cluster's token, or a tenant's key)" if isinstance(error, Unauthenticated) else ""


def _tolerate_any_text() -> None:
    """Reading and printing never raise UnicodeError.

    Invalid bytes of stdin become surrogates, which the check of the prompt rejects. A character that the terminal
    cannot show is printed as `?`.
    """
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _discard_stdout() -> None:
    """Discards output that is still buffered, because the interpreter would otherwise fail to write it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
