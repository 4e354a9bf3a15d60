"""Sampling flags that generate and chat share. A flag that is not given is not sent: the server's default holds."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

_FLAGS: Final = (
    ("--max-tokens", int, "N", "most tokens of the answer"),
    ("--min-tokens", int, "N", "tokens before the answer may end"),
    ("--temperature", float, "T", "0 is greedy"),
    ("--top-k", int, "K", "keep the K most likely tokens; 0 keeps all"),
    ("--top-p", float, "P", "keep the most likely tokens up to this mass"),
    ("--min-p", float, "P", "keep tokens at least so likely, relative to the likeliest"),
    ("--repetition-penalty", float, "X", "over prompt and answer; 1 is none"),
    ("--presence-penalty", float, "X", "over the answer; 0 is none"),
    ("--frequency-penalty", float, "X", "over the answer; 0 is none"),
    ("--seed", int, "N", "same seed, same text"),
)

_LISTS: Final = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")
SHAPES: Final = ("json_schema", "json_object", "regex", "choice", "grammar")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for flag, kind, metavar, text in _FLAGS:
        group.add_argument(flag, type=kind, metavar=metavar, help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="ends the answer; may be given again")
    group.add_argument("--stop-token-ids", type=_ids, metavar="ID,...", help="tokens that end the answer")
    group.add_argument(
        "--logit-bias", action="append", type=_bias, metavar="ID=X", help="added to a token's logit, -100 to 100; again"
    )
    group.add_argument("--allowed-token-ids", type=_ids, metavar="ID,...", help="no other token is drawn")
    group.add_argument("--bad-words", action="append", metavar="TEXT", help="never written; may be given again")
    group.add_argument("--ignore-eos", action="store_const", const=True, help="go on past the end of sequence")
    shape = group.add_mutually_exclusive_group()
    shape.add_argument("--json-schema", type=_text, metavar="JSON", help="the answer is a document of it; or @FILE")
    shape.add_argument("--json-object", action="store_const", const=True, help="the answer is any JSON object")
    shape.add_argument("--regex", metavar="REGEX", help="the whole answer matches it")
    shape.add_argument("--choice", action="append", metavar="TEXT", help="the answer is one of them; give it again")
    shape.add_argument("--grammar", type=_text, metavar="LARK", help="the answer follows it; or @FILE")
    group.add_argument("--slo-ttft", type=float, metavar="SECONDS", help="promised time to the first token")
    group.add_argument("--slo-tpot", type=float, metavar="SECONDS", help="promised time per token after it")


def _text(value: str) -> str:
    """The text itself, or of the file behind an @."""
    if not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {value[1:]}: {error}") from None


def _ids(value: str) -> list[int]:
    return [int(one) for one in value.split(",")]


def _bias(value: str) -> tuple[int, float]:
    token_id, _, bias = value.partition("=")
    return int(token_id), float(bias)


def options(args: argparse.Namespace) -> dict[str, Any]:
    from pdserve.core.types import Slo

    names = [flag[2:].replace("-", "_") for flag, *_ in _FLAGS] + [*_LISTS, "ignore_eos", *SHAPES]
    found = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.logit_bias is not None:
        found["logit_bias"] = dict(args.logit_bias)
    slo = {"ttft_s": args.slo_ttft, "tpot_s": args.slo_tpot}
    given = {name: value for name, value in slo.items() if value is not None}
    if given:
        found["slo"] = Slo(**given)
    return found
