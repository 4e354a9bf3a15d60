"""Sampling flags that generate and chat share. A flag that is not given is not sent: the server's default holds."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

_FLAGS: Final = (
    ("--max-tokens", int, "N", "maximum number of generated tokens"),
    ("--min-tokens", int, "N", "minimum number of generated tokens"),
    ("--temperature", float, "T", "sampling temperature; 0 is greedy"),
    ("--top-k", int, "K", "sample from the K most likely tokens; 0 means all"),
    ("--top-p", float, "P", "sample from the most likely tokens with total probability P"),
    ("--min-p", float, "P", "sample from tokens with at least P times the largest probability"),
    ("--repetition-penalty", float, "X", "repetition penalty over prompt and output; 1 means none"),
    ("--presence-penalty", float, "X", "presence penalty over the output; 0 means none"),
    ("--frequency-penalty", float, "X", "frequency penalty over the output; 0 means none"),
    ("--seed", int, "N", "seed of the sampling"),
)

_LISTS: Final = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")
SHAPES: Final = ("json_schema", "json_object", "regex", "choice", "grammar")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for flag, kind, metavar, text in _FLAGS:
        group.add_argument(flag, type=kind, metavar=metavar, help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="stop string; repeatable")
    group.add_argument("--stop-token-ids", type=_ids, metavar="ID,...", help="stop tokens")
    group.add_argument(
        "--logit-bias",
        action="append",
        type=_bias,
        metavar="ID=X",
        help="add X (-100 to 100) to a token's logit; repeatable",
    )
    group.add_argument("--allowed-token-ids", type=_ids, metavar="ID,...", help="sample only these tokens")
    group.add_argument(
        "--bad-words", action="append", metavar="TEXT", help="text that the output must not contain; repeatable"
    )
    group.add_argument("--ignore-eos", action="store_const", const=True, help="continue after an end-of-sequence token")
    shape = group.add_mutually_exclusive_group()
    shape.add_argument(
        "--json-schema", type=_text, metavar="JSON", help="JSON schema that the output must match; or @FILE"
    )
    shape.add_argument("--json-object", action="store_const", const=True, help="the output must be a JSON object")
    shape.add_argument("--regex", metavar="REGEX", help="regular expression that the whole output must match")
    shape.add_argument(
        "--choice", action="append", metavar="TEXT", help="the output must be one of the given texts; repeatable"
    )
    shape.add_argument("--grammar", type=_text, metavar="LARK", help="grammar that the output must match; or @FILE")
    group.add_argument("--slo-ttft", type=float, metavar="SECONDS", help="TTFT target of the request")
    group.add_argument("--slo-tpot", type=float, metavar="SECONDS", help="TPOT target of the request")


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
