"""`pdserve generate`: one prompt, streamed to the terminal or printed as one JSON object.

Several answers (-n, --best-of, --beams) are printed at the end, each under a line with its number. Logprobs follow the
answers, one token in a line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from pdserve.build import FULL_VERSION
from pdserve.cli.sampling import (
    add_sampling_flags,
    options,
    phases_line,
    stats_line,
    truncation_warnings,
    versions_line,
)
from pdserve.client.beam import EarlyStopping
from pdserve.client.request import MAX_TOKENS_PER_CALL
from pdserve.client.results import Completion, Token, TokenLogprob
from pdserve.client.sync import Client, Stream
from pdserve.client.target_flags import add_target_flags, connect
from pdserve.core.errors import InvalidRequest, PdserveError
from pdserve.core.json_text import to_json

HELP = "generate a completion of one prompt"
_NUMBERS: Final = {
    "n": "number of completions, 1 to 16; more than 1 needs a temperature",
    "best_of": "sample N completions and print the -n with the highest mean logprob",
    "logprobs": "print the logprob of each output token and of the N most likely tokens; at most 64",
    "prompt_logprobs": "the same for the prompt's tokens; at most 20",
    "beams": "beam search with N beams, with --max-tokens and --ignore-eos",
}
_STOPPING: Final[dict[str, EarlyStopping]] = {"no": False, "yes": True, "never": "never"}


def add_flags(parser: argparse.ArgumentParser) -> None:
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


def run(args: argparse.Namespace) -> int:
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
