"""`pdserve plan` as a user runs it."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import re
import signal
from pathlib import Path

import pytest

from pdserve.cli.main import main
from pdserve.core.errors import ConfigError
from pdserve.progress import ProgressLine
from tests.support.slow import slow_except

SLO = ["--slo-ttft", "1", "--slo-tpot", "0.05"]


def written(folder: Path, count: int) -> str:
    """`count` requests, about one second apart. A worker prefills a few such prompts per second."""
    path = folder / "small.csv"
    rows = [f"2023-11-16 18:{n // 60:02d}:{n % 60:02d}.{n * 37 % 1000:03d},4000,4" for n in range(count)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return written(tmp_path, 40)


@pytest.fixture
def long_trace(tmp_path: Path) -> str:
    return written(tmp_path, 500)


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_json_is_one_object_and_does_not_depend_on_the_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    """40 requests are too few for a verdict, but enough for a comparison."""
    answers, is_enough = [], count == 500
    trace = written(tmp_path, count)
    for jobs in ("1", "2"):
        flags = ["--trace", trace, "--workers", "2", *SLO, "--jobs", jobs, "--json"]
        assert main(["plan", *flags]) == (0 if is_enough else 3)
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1]
    assert [one["prefill"] for one in answers[0]["curve"]] == [0, 1]
    assert answers[0]["is_long_enough"] is is_enough
    assert answers[0]["is_attainable"] is (True if is_enough else None)
    assert answers[0]["curve"][0]["goodput_rps"] > 0.0


def test_the_table_shows_limits_and_worker_counts(long_trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--trace", long_trace, "--workers", "1", *SLO, "--jobs", "1", "--rate", "2"]
    assert main(["plan", *flags]) == 0
    seen = capsys.readouterr()
    lines = seen.out.splitlines()
    assert lines[0].endswith("policy goodput, 1 workers, 500 requests of small.csv")
    assert lines[4].split()[0] == "0:1"
    assert "do not disaggregate: 0:1 sustains" in seen.out
    assert lines[-1] == "2 requests/s: 1 workers, 0:1"
    assert "error" not in seen.err


def test_a_trace_that_is_too_short_gets_no_verdict(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--trace", trace, "--workers", "2", *SLO, "--jobs", "1", "--rate", "2"]
    assert main(["plan", *flags]) == 3
    text = capsys.readouterr().out
    assert "no verdict: 40 requests last" in text
    assert "disaggregate:" not in text
    assert "2 requests/s:" not in text
    assert main(["plan", *flags, "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert not found["is_long_enough"]
    assert found["shortage"]["needed_requests"] > 385
    assert [found[name] for name in ("verdict", "disaggregate", "best", "advice", "is_attainable")] == [None] * 5


def test_unattainable_targets_exit_with_status_1(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--trace", trace, "--workers", "1", "--slo-ttft", "0.001", "--slo-tpot", "0.05", "--jobs", "1"]
    assert main(["plan", *flags]) == 1
    assert "not attainable: 0% meet both targets at" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--workers", "0"], "workers: got 0, expected 1 to"),
        (["--slo-ttft", "0"], "slo.ttft_s"),
        (["--slo-tpot", "-1"], "slo.tpot_s"),
        (["--policy", "best"], "policy: got best, expected one of colocated, dynamo, goodput"),
        (["--profile", "tpu"], "profile: got tpu, expected a file, or one of"),
        (["--link", "string"], "link: got string, expected one of"),
        (["--trace", "nowhere.csv"], "a file that can be read"),
        (["--requests", "1"], "1 requests within 0 s"),
        (["--rate", "0"], "rate: got 0.0"),
        (["--jobs", "0"], "jobs: got 0"),
        (["--seeds", "0"], "seeds: got 0"),
    ],
)
def test_invalid_arguments_are_one_line(
    trace: str, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    assert main(["plan", "--trace", trace, "--workers", "2", *SLO, "--jobs", "1", *flags]) == 1
    seen = capsys.readouterr()
    assert seen.out == ""
    assert said in seen.err
    assert seen.err.count("\n") == 1


def test_gpus_are_divided_between_every_pair_of_degrees(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--trace", trace, "--gpus", "2", "--degrees", "1,2", *SLO, "--jobs", "1"]
    assert main(["plan", *flags]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("policy goodput, 2 GPUs, 40 requests of small.csv")
    assert lines[4].startswith("2 x tp1  ")
    assert lines[5].startswith("1 x tp2*  ")
    assert lines[6].startswith("1 x tp1 prefill + 1 x tp1 decode  ")
    assert "* derived from another degree, not measured: cost and KV capacity of tp2" in lines
    assert lines[-2].startswith("no verdict: 40 requests last")
    assert main(["plan", *flags, "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["derived"] == {"tp2": "cost and KV capacity"}
    assert [one["is_derived"] for one in found["layouts"]] == [False, True, False]
    assert [found[name] for name in ("verdict", "ratio", "best_colocated", "disaggregate")] == [None] * 4


def test_gpus_that_never_meet_the_targets_exit_with_status_1(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--trace", trace, "--gpus", "2", "--slo-ttft", "0.001", "--jobs", "1"]
    assert main(["plan", *flags]) == 1
    assert "not attainable: 0% meet both targets at" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gpus", "0"], "gpus: got 0, expected 1 to 256"),
        (["--gpus", "1", "--profile", "a100-80g.opt-13b.fp16:tp2"], "gpus: got 1, expected a multiple of a degree"),
        (["--degrees", "1,3"], "degrees: got 3, expected a divisor of the model's 8 KV heads"),
        (["--degrees", "2", "--profile", "xeon-2-cores.llama-125m.float32"], "degrees: got 2, expected one of 1"),
        (["--degrees", "1,2,4,8,16,32,64"], "degrees: got 1,2,4,8,16,32,64, expected at most 6"),
        (["--degrees", "1", "--workers", "2"], "degrees: got 1, expected --gpus beside it"),
        (["--rate", "2"], "rate: got 2.0, expected no --gpus beside it"),
        (["--workload", "chat"], "workload: got chat, expected no --trace beside it"),
        (["--requests", "0"], "requests: got 0, expected 1 to"),
    ],
)
def test_invalid_gpu_arguments_are_one_line(
    trace: str, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    assert main(["plan", "--trace", trace, "--jobs", "1", *flags]) == 1
    seen = capsys.readouterr()
    assert seen.out == ""
    assert said in seen.err
    assert seen.err.count("\n") == 1


def test_requests_that_no_worker_can_hold_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--lengths", "100000,10", "--gpus", "1", "--profile", "a100-80g.opt-13b.fp16:tp1", "--requests", "50"]
    assert main(["plan", *flags]) == 1
    assert "KV memory for 66112 tokens per worker at its largest (tp1), expected at least" in capsys.readouterr().err


@pytest.mark.parametrize("flag", [["--lengths", "0,1"], ["--lengths", "5"], ["--degrees", "x"], ["--degrees", "0"]])
def test_lists_of_wrong_numbers_are_refused(flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", *flag])
    assert flag[0] in capsys.readouterr().err


WORKERS, GPUS = ["--workers", "2"], ["--gpus", "2"]


@pytest.mark.parametrize(
    ("layouts", "number"),
    slow_except(
        [(layouts, number) for layouts in (WORKERS, GPUS) for number in (signal.SIGINT, signal.SIGTERM)],
        (WORKERS, signal.SIGINT),
        (GPUS, signal.SIGTERM),
    ),
)
def test_an_interrupt_prints_the_finished_layouts(
    trace: str,
    layouts: list[str],
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("a shell has started this process in the background, where SIGINT is ignored")
    _signal_when(number, r"[1-9]\d* of", monkeypatch)  # on a busy machine, two layouts may be finished at once
    flags = ["plan", "--trace", trace, *layouts, *SLO, "--jobs", "1"]
    assert main(flags) == 130
    head, _, _, *rows = capsys.readouterr().out.splitlines()
    assert head == f"interrupted after {len(rows)} of 2 layouts; no verdict"
    assert rows[0].startswith(("0:2  ", "2 x tp1  "))
    assert main([*flags, "--json"]) == 130
    shown = json.loads(capsys.readouterr().out)
    assert (shown["is_interrupted"], shown["num_layouts"]) == (True, 2)
    assert shown["finished"][0]["layout"] in ("0:2", "2 x tp1")
    assert shown["finished"][0]["goodput_rps"] > 0.0
    assert multiprocessing.active_children() == []


def test_an_interrupt_before_the_first_layout_prints_nothing(
    trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    _signal_when(signal.SIGTERM, "0 of|$", monkeypatch)
    assert main(["plan", "--trace", trace, "--workers", "2", *SLO, "--jobs", "1"]) == 130
    assert capsys.readouterr().out == ""
    assert multiprocessing.active_children() == []
    assert signal.getsignal(signal.SIGTERM) is before


def _signal_when(number: signal.Signals, pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends `number` to this process when the detail of the bar matches `pattern`."""

    def update(self: ProgressLine, done: float, detail: str = "") -> None:
        if re.match(pattern, detail):
            signal.raise_signal(number)

    monkeypatch.setattr(ProgressLine, "update", update)


def test_an_error_in_another_process_is_passed_on() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("link", "x", "y")))  # noqa: S301
    assert (type(error), str(error), error.field) == (ConfigError, "link: got x, expected y", "link")
