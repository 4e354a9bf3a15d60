"""`pdserve generate`: one prompt, streamed to the terminal or printed as one JSON object."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from pdserve.cli.sampling import add_sampling_flags, options
from pdserve.cli.stats import stats_line
from pdserve.cli.target import add_target_flags, connect

HELP = "answer one prompt"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="the text, or - to read it from stdin")
    parser.add_argument("--json", action="store_true", help="print one object with text, token ids, usage and timings")
    parser.add_argument("--stats", action="store_true", help="print a line of times on stderr after the answer")
    parser.add_argument("--truncate-prompt-tokens", type=int, metavar="N", help="keep only the last N prompt tokens")
    add_sampling_flags(parser)
    add_target_flags(parser)


def run(args: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    chosen = options(args)
    if args.truncate_prompt_tokens is not None:
        chosen["truncate_prompt_tokens"] = args.truncate_prompt_tokens
    with connect(args) as client, client.stream(prompt, **chosen) as stream:
        for piece in stream:
            if not args.json:
                print(piece.text, end="", flush=True)
        done = stream.completion
    if args.json:
        print(json.dumps(dataclasses.asdict(done)))
    else:
        print()
    if args.stats:
        print(stats_line(done), file=sys.stderr)
    return 0
