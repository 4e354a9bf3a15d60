"""What generate and chat share: sampling flags, and lines that follow an answer.

A flag that is not given is not sent, so the server's default applies.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Container
from dataclasses import fields
from typing import Any, Final

from pdserve.bounded_file import MAX_SETTINGS_BYTES, read_text
from pdserve.client.request import SAMPLING_SCALARS, Scalar
from pdserve.client.results import Completion
from pdserve.config_flags import read_as
from pdserve.core.errors import ConfigError
from pdserve.core.results import Phases
from pdserve.core.types import Sampling, Slo

_PRINTED: Final = ("logprobs", "prompt_logprobs")  # flags of the command that prints them
_LISTS: Final = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")
_METAVARS: Final = {int: "N", float: "X"}
_DEFAULTS: Final = {one.name: one.default for one in fields(Sampling)}
SHAPES: Final = ("json_schema", "json_object", "regex", "choice", "grammar")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for scalar in _scalars():
        flag = scalar.name.replace("_", "-")
        if scalar.kind is not bool:
            group.add_argument(f"--{flag}", type=scalar.kind, metavar=_METAVARS[scalar.kind], help=scalar.text)
        elif _DEFAULTS[scalar.name]:
            group.add_argument(
                f"--no-{flag}", dest=scalar.name, action="store_const", const=False, help=f"do not {scalar.text}"
            )
        else:
            group.add_argument(f"--{flag}", action="store_const", const=True, help=scalar.text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="stop string; repeatable")
    group.add_argument(
        "--stop-token-ids", type=read_as(_ids, "token ids, such as 1,2,3"), metavar="ID,...", help="stop tokens"
    )
    group.add_argument(
        "--logit-bias",
        action="append",
        type=read_as(_bias, "a token id and a number, such as 42=-1.5"),
        metavar="ID=X",
        help="add X (-100 to 100) to a token's logit; repeatable",
    )
    group.add_argument(
        "--allowed-token-ids",
        type=read_as(_ids, "token ids, such as 1,2,3"),
        metavar="ID,...",
        help="sample only these tokens",
    )
    group.add_argument(
        "--bad-words", action="append", metavar="TEXT", help="text that the output must not contain; repeatable"
    )
    shape = group.add_mutually_exclusive_group()
    shape.add_argument(
        "--json-schema", type=_schema, metavar="JSON", help="JSON schema that the output must match; or @FILE"
    )
    shape.add_argument("--json-object", action="store_const", const=True, help="the output must be a JSON object")
    shape.add_argument("--regex", metavar="REGEX", help="regular expression that the whole output must match")
    shape.add_argument(
        "--choice", action="append", metavar="TEXT", help="the output must be one of the given texts; repeatable"
    )
    shape.add_argument("--grammar", type=_grammar, metavar="LARK", help="grammar that the output must match; or @FILE")
    group.add_argument("--slo-ttft", type=float, metavar="SECONDS", help="TTFT target of the request")
    group.add_argument("--slo-tpot", type=float, metavar="SECONDS", help="TPOT target of the request")
    group.add_argument(
        "--slo-itl",
        type=float,
        metavar="SECONDS",
        help="longest time between two tokens because of other prompts (4 times the TPOT target)",
    )


def _scalars() -> list[Scalar]:
    return [scalar for scalar in SAMPLING_SCALARS if scalar.name not in _PRINTED]


def _text(value: str) -> str:
    """The text itself, or the contents of the file after an @."""
    if not value.startswith("@"):
        return value
    try:
        return read_text(value[1:], MAX_SETTINGS_BYTES, "file")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def _schema(value: str) -> str:
    text = _text(value)
    try:
        json.loads(text)
    except RecursionError:
        pass  # the server says what is wrong with it
    except ValueError as error:
        what = value[1:] if value.startswith("@") else repr(value[:40])
        raise argparse.ArgumentTypeError(f"{what} is not JSON ({error}){_meant(value)}") from None
    return text


def _grammar(value: str) -> str:
    if ":" not in value and (meant := _meant(value)):  # each rule of a grammar has a colon
        raise argparse.ArgumentTypeError(f"{value[:40]!r} is not a grammar{meant}")
    return _text(value)


def _meant(value: str) -> str:
    """What to write instead of this value if it should name a file."""
    if value.startswith("@"):
        return ""
    return f"; @{value} is that file" if os.path.isfile(value) else "; @NAME is a file"


def _ids(value: str) -> list[int]:
    return [int(one) for one in value.split(",")]


def _bias(value: str) -> tuple[int, float]:
    token_id, _, bias = value.partition("=")
    return int(token_id), float(bias)


def options(args: argparse.Namespace) -> dict[str, Any]:
    names = [*(scalar.name for scalar in _scalars()), *_LISTS, *SHAPES]
    found = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.logit_bias is not None:
        found["logit_bias"] = dict(args.logit_bias)
    slo = {"ttft_s": args.slo_ttft, "tpot_s": args.slo_tpot, "itl_s": args.slo_itl}
    given = {name: value for name, value in slo.items() if value is not None}
    if given:
        found["slo"] = Slo(**given)
    return found


# --- lines after an answer ------------------------------------------------------------------------------------
# Its timings, and a warning if it was truncated.


def stats_line(done: Completion, slo: Slo | None) -> str:
    """`slo`: the targets that the request named, if it did. The server's own are not known here."""
    usage, times = done.usage, done.timings
    rate = f"{1 / times.tpot_s:.1f} tokens/s" if times.tpot_s > 0 else "one token"
    cached = f" ({usage.cached_prompt_tokens} cached)" if usage.cached_prompt_tokens else ""
    where = " → ".join(worker for worker in (times.prefill_worker, times.decode_worker) if worker)
    parts = [
        f"{usage.prompt_tokens} prompt tokens{cached}",
        f"{usage.completion_tokens} new",
        f"first after {milliseconds(times.ttft_s)}",
        rate,
        f"{times.path or 'unplaced'} {where}".strip(),
        f"ended by {done.finish_reason}",
    ]
    if slo is not None:
        compared = (("TTFT", slo.ttft_s, times.ttft_s), ("TPOT", slo.tpot_s, times.tpot_s))
        parts += [
            f"missed the {name} target of {milliseconds(target_s)}"
            for name, target_s, took_s in compared
            if took_s > target_s
        ]
    if times.attempts > 1:
        parts.append(f"{times.attempts} attempts")
    parts.append(f"id {done.request_id}")
    return " · ".join(parts)


def versions_line(router: str, own: str) -> str:
    """The versions of the router and, if it is another one, of this command."""
    return f"router: version {router or 'unknown'}" + ("" if router == own else f", this command: version {own}")


def phases_line(phases: Phases) -> str:
    """The total time, and the phases that add up to it."""
    spent = [f"{name} {milliseconds(took_s)}" for name, took_s in phases.shown()]
    return f"{milliseconds(phases.total_s)} = {' + '.join(spent) or 'nothing'}"


def truncation_warnings(finish_reasons: Container[str], options: Container[str]) -> list[str]:
    """A warning if `max_tokens` truncated a structured answer, which then does not match its schema or grammar.

    `finish_reasons` are those of all answers; `options` are the names of the sampling options that were given.
    """
    if "length" not in finish_reasons:
        return []
    return [f"max_tokens ended the answer before its {name} was complete" for name in SHAPES if name in options]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"
