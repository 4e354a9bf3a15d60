"""Divides the errors of a router's predictions into parts: `python -m benchmarks.prediction RECORDING [RECORDING ...]`.

    python -m benchmarks.goodput --only "goodput 1" --rates 6 --seconds 90 --settle 60 --record FOLDER
    python -m benchmarks.prediction FOLDER/*.jsonl

Reads recordings of `benchmarks.goodput --record` or `pdserve up --record FILE`. Each row replaces one or more parts of
the prediction by their true values and keeps the others. The part whose true value removes most of the error is the
one to improve. The error is the median of |predicted - actual| / actual, and the bias that of (predicted - actual) /
actual, over requests that arrived at least `--settle` seconds after the first. For several recordings, the table gives
lowest .. highest. Times are those that the router measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from benchmarks.prediction_parts import Account, Parts, RecordedAnswer, account
from pdserve.core.errors import ConfigError

NONE: Final = "none"


class ErrorRow(NamedTuple):
    name: str
    predicted_s: Callable[[RecordedAnswer], float]


def _ttft(*true_parts: str) -> Callable[[RecordedAnswer], float]:
    """From arrival, with the truth in place of these of Parts."""

    def predicted_s(one: RecordedAnswer) -> float:
        assert one.parts is not None, "a remote request"
        assert one.predicted.parts is not None, "a remote request"
        actual, predicted = one.parts._asdict(), one.predicted.parts._asdict()
        exact_s: float = sum(actual[part] - predicted[part] for part in true_parts)
        return one.waited_s + one.predicted.ttft_s + exact_s

    return predicted_s


def _tpot(
    first_gap_s: Callable[[RecordedAnswer], float], rest_s: Callable[[RecordedAnswer], float]
) -> Callable[[RecordedAnswer], float]:
    """`rest_s`: from the second token to the last."""
    return lambda one: (first_gap_s(one) + rest_s(one)) / (one.tokens - 1)


def _first_predicted_s(one: RecordedAnswer) -> float:
    return one.predicted.first_gap_s


def _first_true_s(one: RecordedAnswer) -> float:
    return one.first_gap_s


def _rest_predicted_s(one: RecordedAnswer) -> float:
    return one.predicted.step_s * (one.tokens - 2)


TTFT_ROWS: Final = (
    ErrorRow("as predicted", _ttft()),
    ErrorRow("true grant (message and the step that runs)", _ttft("grant_s")),
    ErrorRow("true queue", _ttft("queue_s")),
    ErrorRow("true prefill", _ttft("prefill_s")),
    ErrorRow("true reply", _ttft("reply_s")),
    ErrorRow("true grant and prefill", _ttft("grant_s", "prefill_s")),
    ErrorRow("all four", _ttft(*Parts._fields)),
)
TPOT_ROWS: Final = (
    ErrorRow("as predicted", lambda one: one.predicted.tpot_s),
    ErrorRow("true length of the answer", _tpot(_first_predicted_s, _rest_predicted_s)),
    ErrorRow("true length and first gap", _tpot(_first_true_s, _rest_predicted_s)),
    ErrorRow("true length and decode rows of each step", _tpot(_first_predicted_s, lambda one: one.rows_s)),
    ErrorRow("and true steps that read prompts beside them", _tpot(_first_predicted_s, lambda one: one.mixed_s)),
    ErrorRow("and true first gap: what is left is the machine", _tpot(_first_true_s, lambda one: one.mixed_s)),
)


def ttft_errors(answers: Sequence[RecordedAnswer]) -> list[float]:
    """Median |predicted - actual| / actual of each of TTFT_ROWS; empty where no request was remote."""
    remote = [one for one in answers if one.parts is not None]
    return [median(abs(row.predicted_s(one) / one.ttft_s - 1.0) for one in remote) for row in TTFT_ROWS if remote]


def tpot_errors(answers: Sequence[RecordedAnswer]) -> list[float]:
    """The same of each of TPOT_ROWS, over all requests."""
    return [median(abs(row.predicted_s(one) / one.tpot_s - 1.0) for one in answers) for row in TPOT_ROWS if answers]


def report(accounts: Sequence[Account]) -> str:
    """Markdown. `accounts` is not empty, and none of them is."""
    each = [one.answers for one in accounts]
    remote = [[one for one in answers if one.parts is not None] for answers in each]
    ttft, tpot = [ttft_errors(answers) for answers in each], [tpot_errors(answers) for answers in each]
    ttft_ms = _span([1e3 * median(one.ttft_s for one in answers) for answers in remote if answers], "{:.0f} ms")
    tpot_ms = _span([1e3 * median(one.tpot_s for one in answers) for answers in each], "{:.1f} ms")
    lines = [
        f"Of {len(each)} recorded runs {sum(map(len, each)):,} requests, {sum(map(len, remote)):,} of them remote; "
        f"{sum(one.left_out for one in accounts):,} more had no whole answer from one placement.",
        "",
        f"| TTFT of remote requests ({ttft_ms}) | error | TPOT of all ({tpot_ms}) | error |",
        "|---|---|---|---|",
    ]
    for index, (left, right) in enumerate(zip_longest(TTFT_ROWS, TPOT_ROWS)):
        texts = [f"{left.name} | {_percent([one[index] for one in ttft if one])}"]
        texts.append("|" if right is None else f"{right.name} | {_percent([one[index] for one in tpot])}")
        lines.append(f"| {' | '.join(texts)} |")
    lines += ["", "| TPOT of answers | share | ms | bias | error |", "|---|---|---|---|---|"]
    for name, meets_prompt in (("that met a prompt being read", True), ("that met none", False)):
        lines.append(f"| {name} | {' | '.join(_population(each, meets_prompt))} |")
    if any(one.uses_recorded_placement for one in accounts):
        otherwise = sum(one.otherwise for one in accounts)
        lines += [
            "",
            f"Recorded by other rules: placed as it was then; {otherwise:,} steps came out otherwise even so.",
        ]
    return "\n".join(lines)


def _population(each: Sequence[Sequence[RecordedAnswer]], meets_prompt: bool) -> list[str]:
    """Share, TPOT, bias and error of the answers that did or did not meet a prompt."""
    mine = [[one for one in answers if one.meets_prompt is meets_prompt] for answers in each]
    off = [[one.predicted.tpot_s / one.tpot_s - 1.0 for one in answers] for answers in mine if answers]
    return [
        _percent([len(some) / len(answers) for some, answers in zip(mine, each, strict=True)], "{:.0f} %"),
        _span([1e3 * median(one.tpot_s for one in answers) for answers in mine if answers], "{:.1f}"),
        _percent([median(one) for one in off], "{:+.1f} %"),
        _percent([median(map(abs, one)) for one in off]),
    ]


def _percent(shares: Sequence[float], form: str = "{:.1f} %") -> str:
    return _span([100.0 * one for one in shares], form)


def _span(values: Sequence[float], form: str) -> str:
    """The value, or lowest .. highest, with one unit."""
    if not values:
        return NONE
    least, most = form.format(min(values)), form.format(max(values))
    return least if least == most else f"{least.split()[0]} .. {most}"


def read(path: str, settle_s: float) -> Account:
    """Raises ConfigError where `path` cannot be read, TraceError where it is no recording, with the line."""
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as file:
            return account(list(enumerate(file, start=1)), path, settle_s)
    except OSError as error:
        raise ConfigError("recording", path, f"a file that can be read ({error.strerror})") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="+", metavar="RECORDING")
    parser.add_argument("--settle", type=float, default=60.0, metavar="SECONDS", help="until predictions count")
    flags = parser.parse_args()
    try:
        print(report([read(path, flags.settle) for path in flags.recordings]))
    except ConfigError as error:
        sys.exit(f"prediction: {error}")


if __name__ == "__main__":
    main()
