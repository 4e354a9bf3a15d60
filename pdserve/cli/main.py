"""The command `pdserve`: finds the sub-command, runs it, turns what went wrong into one line and an exit status.

Status 1: it failed. 2: it was asked in a wrong way. 130: interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Final

import pdserve
from pdserve.cli import chat, doctor, explain, generate, plan, replay, simulate, topology, up
from pdserve.core.errors import PdserveError

COMMANDS: Final = {
    "up": up,
    "generate": generate,
    "chat": chat,
    "topology": topology,
    "explain": explain,
    "replay": replay,
    "simulate": simulate,
    "plan": plan,
    "doctor": doctor,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="pdserve", description="Serve a large language model with separate prefill and decode workers."
    )
    parser.add_argument("--version", action="version", version=f"pdserve {pdserve.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        module.add_flags(commands.add_parser(name, help=module.HELP, description=module.HELP, allow_abbrev=False))
    args = parser.parse_args(argv)
    try:
        status: int = COMMANDS[args.command].run(args)
        return status
    except PdserveError as error:
        print(f"pdserve {args.command}: error: {one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has left; the interpreter must not complain while it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
