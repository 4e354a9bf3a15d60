"""`pdserve generate`, one prompt, and `pdserve chat`, a conversation: their sampling flags, answers and timings.

Several answers of `generate` (-n, --best-of, --beams) are printed at the end, each under a line with its number.
Logprobs follow the answers, one token in a line.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from pdserve.bounded_file import MAX_SETTINGS_BYTES, read_text
from pdserve.build import FULL_VERSION
from pdserve.cli import Command
from pdserve.client.beam import EarlyStopping
from pdserve.client.options import SAMPLING_SCALARS, Scalar
from pdserve.client.request import MAX_TOKENS_PER_CALL, Prompt
from pdserve.client.results import Completion, Token, TokenLogprob
from pdserve.client.sync import Client, Stream
from pdserve.client.target_flags import add_target_flags, connect
from pdserve.config_flags import read_as
from pdserve.core.errors import ConfigError, InvalidRequest, PdserveError
from pdserve.core.json_text import to_json
from pdserve.core.results import Phases
from pdserve.core.types import Sampling, Slo

# --- sampling flags -------------------------------------------------------------------------------------------
# A flag that is not given is not sent, so the server's default applies.

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
    parser.add_argument(
        "--model", metavar="NAME", help="a name of the served model, or one of `pdserve lora list` (the model)"
    )
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
    names = [*(scalar.name for scalar in _scalars()), *_LISTS, *SHAPES, "model"]
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

LEAST_RATE_TOKENS: Final = 5
LEAST_RATE_S: Final = 0.01  # between the first and the last token


def stats_line(done: Completion, slo: Slo | None) -> str:
    """`slo`: the targets that the request named, if it did. The server's own are not known here."""
    usage, times, rate = done.usage, done.timings, measured_rate(done)
    cached = f" ({usage.cached_prompt_tokens} cached)" if usage.cached_prompt_tokens else ""
    where = " → ".join(worker for worker in (times.prefill_worker, times.decode_worker) if worker)
    parts = [
        f"{usage.prompt_tokens} prompt tokens{cached}",
        f"{usage.completion_tokens} new",
        f"first after {milliseconds(times.ttft_s)}",
        *([] if rate is None else [f"{rate:.1f} tokens/s"]),
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
    if times.migrations:
        parts.append("moved once" if times.migrations == 1 else f"moved {times.migrations} times")
    parts.append(f"id {done.request_id}")
    return " · ".join(parts)


def measured_rate(done: Completion) -> float | None:
    """Tokens per second after the first token; None where too few tokens or too little time would make it noise.
    The timings are those of the first answer."""
    num_tokens, tpot_s = len(done.token_ids) or done.usage.completion_tokens, done.timings.tpot_s
    is_measured = num_tokens >= LEAST_RATE_TOKENS and tpot_s * (num_tokens - 1) >= LEAST_RATE_S
    return 1 / tpot_s if is_measured else None


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


# --- pdserve generate -----------------------------------------------------------------------------------------

_NUMBERS: Final = {
    "n": "number of completions, 1 to 16; more than 1 needs a temperature",
    "best_of": "sample N completions and print the -n with the highest mean logprob",
    "logprobs": "print the logprob of each output token and of the N most likely tokens; at most 64",
    "prompt_logprobs": "the same for the prompt's tokens; at most 20",
    "beams": "beam search with N beams, with --max-tokens and --ignore-eos",
}
_STOPPING: Final[dict[str, EarlyStopping]] = {"no": False, "yes": True, "never": "never"}


def _add_generate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt, or - to read it from stdin")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object with text, token ids, usage and timings"
    )
    parser.add_argument(
        "--stats", action="store_true", help="print timings and versions on stderr after the completion"
    )
    parser.add_argument("--truncate-prompt-tokens", type=int, metavar="N", help="keep only the last N prompt tokens")
    add_sampling_flags(parser)
    many = parser.add_argument_group("several completions, and logprobs")
    for name, text in _NUMBERS.items():
        flags = [f"--{name.replace('_', '-')}"] if len(name) > 1 else [f"-{name}"]
        many.add_argument(*flags, dest=name, type=int, metavar="N", help=text)
    many.add_argument(
        "--length-penalty",
        type=float,
        metavar="X",
        default=1.0,
        help="length penalty of beam search; above 0 favours long beams (1)",
    )
    many.add_argument(
        "--early-stopping",
        choices=list(_STOPPING),
        default="no",
        help="end beam search as soon as --beams beams have finished (no)",
    )
    add_target_flags(parser)


def _generate(args: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    chosen = options(args)
    names = ("truncate_prompt_tokens", "n", "best_of", "logprobs", "prompt_logprobs")
    chosen |= {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.beams is not None:
        return _search(args, prompt, chosen)
    is_streamed = not args.json and (args.n or 1) == 1
    with connect(args) as client, client.stream(prompt, **chosen) as stream:
        done = _follow(stream, is_shown=is_streamed)
        versions = versions_line(client.model().version, FULL_VERSION) if args.stats else ""
        tokens = {} if args.json else _tokens(client, _scores(done))
    if args.json:
        print(to_json(done))
    elif not is_streamed:
        _print([(str(choice.index), choice.text) for choice in done.choices])
    if tokens:
        print(*logprob_lines(done, tokens), sep="\n")
    if args.stats:
        print(
            stats_line(done, chosen.get("slo")), phases_line(done.timings.phases), versions, sep="\n", file=sys.stderr
        )
    for note in truncation_warnings([choice.finish_reason for choice in done.choices], chosen):
        print(f"pdserve generate: note: {note}", file=sys.stderr)
    return 0


def _scores(done: Completion) -> list[TokenLogprob]:
    of_choices = [score for choice in done.choices for score in choice.logprobs]
    return [score for score in done.prompt_logprobs if score is not None] + of_choices


def _tokens(client: Client, scores: Iterable[TokenLogprob]) -> dict[int, Token]:
    """The tokens of all scores and of their alternatives, by their ids."""
    ids = list(dict.fromkeys(one for score in scores for one in (score.token_id, *(each for each, _ in score.top))))
    parts = [ids[start : start + MAX_TOKENS_PER_CALL] for start in range(0, len(ids), MAX_TOKENS_PER_CALL)]
    return {token_id: token for part in parts for token_id, token in zip(part, client.tokens(part), strict=True)}


def logprob_lines(done: Completion, tokens: Mapping[int, Token]) -> list[str]:
    """A table for the prompt and for each answer. The first token of a prompt has no logprob, so it has no line."""

    def text(token_id: int) -> str:
        return repr(tokens[token_id].token_bytes.decode("utf-8", "backslashreplace"))

    def line(score: TokenLogprob) -> str:
        rank = f"rank {score.rank}  " if score.rank is not None else ""
        top = ", ".join(f"{text(token_id)} {logprob:.4f}" for token_id, logprob in score.top)
        return f"{score.token_id:>7} {score.logprob:>9.4f}  {text(score.token_id):<16} {rank}{top}".rstrip()

    tables: list[tuple[str, Iterable[TokenLogprob | None]]] = [("the prompt", done.prompt_logprobs)]
    for choice in done.choices:
        tables.append((f"[{choice.index}]" if len(done.choices) > 1 else "the answer", choice.logprobs))
    lines: list[str] = []
    for title, scores in tables:
        if scores:
            lines.append(f"logprobs of {title}: token id, logprob, text, most likely tokens")
            lines += [line(score) for score in scores if score is not None]
    return lines


def _follow(stream: Stream, *, is_shown: bool) -> Completion:
    """The result at the end of the stream. Ends the terminal's line before an error."""
    last = ""
    try:
        for piece in stream:
            if is_shown:
                print(piece.text, end="", flush=True)
                last = piece.text or last
    except (PdserveError, KeyboardInterrupt):
        if last and not last.endswith("\n"):
            print(flush=True)
        raise
    if is_shown:
        print()
    return stream.completion


def _search(args: argparse.Namespace, prompt: str, chosen: dict[str, Any]) -> int:
    strange = sorted(chosen.keys() - {"max_tokens", "ignore_eos"})
    if strange:
        raise InvalidRequest(strange[0], "a value for it", "none beside --beams, which draw nothing")
    with connect(args) as client:
        beams = client.beam_search(
            prompt,
            width=args.beams,
            length_penalty=args.length_penalty,
            early_stopping=_STOPPING[args.early_stopping],
            **chosen,
        )
    if args.json:
        print(to_json(beams))
    else:
        _print([(f"{index}: score {beam.score:.4f}", beam.text) for index, beam in enumerate(beams)])
    return 0


def _print(answers: Sequence[tuple[str, str]]) -> None:
    for title, text in answers:
        print(f"[{title}]\n{text}")


GENERATE: Final = Command("generate a completion of one prompt", _add_generate_flags, _generate)

# --- pdserve chat ---------------------------------------------------------------------------------------------
# A conversation in the terminal or through a pipe, with a line of timings after each reply.

_COMMAND_HELP: Final = "/reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops a reply"
_COMMAND: Final = re.compile(r"/[a-z]+")


def _add_chat_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="system message of every conversation")
    add_sampling_flags(parser)
    add_target_flags(parser)


def _chat(args: argparse.Namespace) -> int:
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


CHAT: Final = Command("chat with the model", _add_chat_flags, _chat)

COMMANDS: Final = {"generate": GENERATE, "chat": CHAT}
