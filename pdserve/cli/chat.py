"""`pdserve chat`: a conversation in the terminal or through a pipe, with a line of timings after each reply."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from typing import Any, Final

from pdserve.cli.sampling import add_sampling_flags, options, stats_line
from pdserve.client.request import Prompt
from pdserve.client.sync import Client
from pdserve.client.target_flags import add_target_flags, connect
from pdserve.core.errors import PdserveError

HELP = "chat with the model"
_COMMAND_HELP: Final = "/reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops a reply"
_COMMAND: Final = re.compile(r"/[a-z]+")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="system message of every conversation")
    add_sampling_flags(parser)
    add_target_flags(parser)


def run(args: argparse.Namespace) -> int:
    chosen = options(args)
    is_terminal = sys.stdin.isatty()
    status = 0
    with connect(args) as client:
        model = client.model()
        conversation = Conversation(args.system, has_template=model.has_chat_template)
        kind = "chat" if model.has_chat_template else "no chat template: it continues what you write"
        print(f"{model.name} ({kind}); {_COMMAND_HELP}", file=sys.stderr)
        for line in _lines("› " if is_terminal else ""):
            if line in ("/quit", "/exit"):
                break
            if line == "/reset":
                conversation.reset()
            elif _COMMAND.fullmatch(line):
                print(f"  no such command; {_COMMAND_HELP}", file=sys.stderr)
            elif line:
                status = _reply(client, conversation, line, chosen)
                if status and not is_terminal:  # nobody sees the error, and later lines may depend on this one
                    return status
    return 0


class Conversation:
    """The conversation so far. A model without a chat template receives only the text of the last line."""

    def __init__(self, system: str | None, *, has_template: bool) -> None:
        self._system = system
        self._has_template = has_template
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def prompt(self, line: str) -> Prompt:
        return [*self.messages, {"role": "user", "content": line}] if self._has_template else line

    def add(self, line: str, reply: str) -> None:
        self.messages += [{"role": "user", "content": line}, {"role": "assistant", "content": reply}]


def _reply(client: Client, conversation: Conversation, line: str, chosen: dict[str, Any]) -> int:
    text, slo = "", chosen.get("slo")
    try:
        with client.stream(conversation.prompt(line), **chosen) as stream:  # type: ignore[arg-type]
            for piece in stream:
                text += piece.text
                print(piece.text, end="", flush=True)
        print()
        print(f"  {stats_line(stream.completion, slo)}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\n  stopped", file=sys.stderr)
    except PdserveError as error:
        print(file=sys.stdout if text else sys.stderr)
        print(f"pdserve chat: error: {error}", file=sys.stderr)
        return 1
    conversation.add(line, text)
    return 0


def _lines(prompt: str) -> Iterator[str]:
    while True:
        try:
            yield input(prompt).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return
