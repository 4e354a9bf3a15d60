"""The commands as a user runs them, against a real cluster on the toy engine."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from examples.demo import timeline
from pdserve import Client
from pdserve.build import FULL_VERSION
from pdserve.cli import doctor
from pdserve.cli.generate import logprob_lines, stats_line, truncation_warnings, versions_line
from pdserve.cli.main import hint, main, make_parsers
from pdserve.cli.operate import render, render_sessions
from pdserve.client import results
from pdserve.client.results import Choice, Completion
from pdserve.config import GatewayConfig, RouterConfig, WorkerConfig
from pdserve.config_flags import parse_flags
from pdserve.core.errors import NONE_YET, NoWorkers, Unauthenticated, Unavailable
from pdserve.core.results import CachedPrefix, ConversationView, SessionPage, SessionView, Timings, Usage
from pdserve.core.types import FinishReason
from pdserve.engine.memory import host
from pdserve.launch.settings import Asked, SettingsSource
from pdserve.launch.spec import served_names
from pdserve.v1 import cluster_pb2, worker_pb2
from pdserve.wire.status import from_code

PROMPT = "a prompt that is longer than what a decode worker reads itself"


def test_generate_prints_only_the_answer(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", PROMPT, "--target", target, "--max-tokens", "8", "--temperature", "0"]) == 0
    seen = capsys.readouterr()
    assert len(seen.out.rstrip("\n")) > 0
    assert seen.err == ""


def test_generate_json_prints_one_object_with_usage_and_timings(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--target", target, "--max-tokens", "8", "--seed", "3", "--json"]
    assert main(["generate", PROMPT, *flags]) == 0
    done = json.loads(capsys.readouterr().out)
    assert len(done["token_ids"]) == done["usage"]["completion_tokens"] == 8
    assert done["usage"]["prompt_tokens"] == len(PROMPT)
    assert done["timings"]["path"] in ("remote", "local")
    assert done["timings"]["decode_worker"] == "decode-0"
    assert done["finish_reason"] == "length"


def test_the_same_seed_gives_the_same_text(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for _ in range(2):
        main(["generate", PROMPT, "--target", target, "--max-tokens", "12", "--seed", "5", "--json"])
        texts.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert texts[0] == texts[1]


def test_a_prompt_may_come_from_a_pipe(
    target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped prompt"))
    assert main(["generate", "-", "--target", target, "--max-tokens", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["usage"]["prompt_tokens"] == len("piped prompt")


def test_stats_are_lines_on_stderr(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", PROMPT, "--target", target, "--max-tokens", "4", "--stats"])
    line, phases, versions = capsys.readouterr().err.splitlines()
    assert "prompt tokens" in line
    assert "ended by length" in line
    assert main(["explain", line.rpartition(" · id ")[2], "--target", target]) == 0
    assert "decode" in phases
    assert versions == f"router: version {FULL_VERSION}"


@pytest.mark.parametrize(
    ("num_tokens", "tpot_s", "rate"),
    [
        (1, 0.0, None),
        (2, 0.05, None),  # too few tokens
        (4, 1.0, None),
        (5, 0.05, "20.0 tokens/s"),
        (64, 0.0001, None),  # too little time
        (64, 0.0, None),
        (65, 0.0025, "400.0 tokens/s"),
    ],
)
def test_stats_show_a_rate_only_where_it_was_measured(num_tokens: int, tpot_s: float, rate: str | None) -> None:
    done = an_answer([num_tokens], tpot_s)
    rates = [part for part in stats_line(done, None).split(" · ") if "tokens/s" in part or part == "one token"]
    assert rates == ([] if rate is None else [rate])
    assert ("then" in timeline(done)) == (rate is not None), "that of the demo"


def test_the_rate_of_several_answers_is_that_of_the_first() -> None:
    assert "tokens/s" not in stats_line(an_answer([2, 60, 60], 0.05), None)
    assert " · 20.0 tokens/s · " in stats_line(an_answer([60, 2], 0.05), None)


def an_answer(sizes: Sequence[int], tpot_s: float) -> Completion:
    """Answers of so many tokens; the timings are those of the first one."""
    choices = tuple(
        Choice(index=index, text="", token_ids=(7,) * size, finish_reason=FinishReason.LENGTH)
        for index, size in enumerate(sizes)
    )
    first = choices[0]
    return Completion(
        request_id="r",
        text="",
        token_ids=first.token_ids,
        finish_reason=first.finish_reason,
        usage=Usage(prompt_tokens=3, completion_tokens=sum(sizes), cached_prompt_tokens=0),
        timings=Timings(ttft_s=0.01, tpot_s=tpot_s, total_s=0.01 + tpot_s * (sizes[0] - 1)),
        choices=choices,
    )


def test_stats_name_each_missed_target(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--target", target, "--max-tokens", "4", "--stats"]
    main(["generate", PROMPT, *flags, "--slo-ttft", "0.0001", "--slo-tpot", "60"])
    assert " · missed the TTFT target of 0.1 ms · " in (seen := capsys.readouterr().err)
    assert "TPOT target" not in seen
    for slo in ([], ["--slo-ttft", "60", "--slo-tpot", "60"]):
        main(["generate", PROMPT, *flags, *slo])
        assert "missed" not in capsys.readouterr().err


def test_chat_names_each_missed_target(
    target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert main(["chat", "--target", target, "--max-tokens", "4", "--slo-ttft", "60", "--slo-tpot", "0.0001"]) == 0
    assert " · missed the TPOT target of 0.1 ms · " in capsys.readouterr().err


def test_an_invalid_value_is_one_line_with_the_field(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", PROMPT, "--target", target, "--top-p", "1.5"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("pdserve generate: error: ")
    assert "top_p" in line


def test_several_answers_are_printed_under_their_numbers(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--target", target, "--max-tokens", "8", "--seed", "3"]
    assert main(["generate", PROMPT, *flags, "-n", "2", "--best-of", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line in ("[0]", "[1]", "[2]")] == ["[0]", "[1]"]
    assert main(["generate", PROMPT, *flags, "-n", "2", "--prompt-logprobs", "1", "--logprobs", "0", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert [len(choice["logprobs"]) for choice in done["choices"]] == [8, 8]
    assert len(done["prompt_logprobs"]) == len(PROMPT)


def test_logprobs_are_printed_after_the_answer(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--target", target, "--max-tokens", "3", "--temperature", "0", "--logprobs", "2"]
    assert main(["generate", "def", *flags, "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)["logprobs"]
    assert main(["generate", "def", *flags, "--prompt-logprobs", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    of_prompt, of_answer = (
        next(n for n, line in enumerate(lines) if f"logprobs of the {one}:" in line) for one in ("prompt", "answer")
    )
    assert len(lines[of_prompt + 1 : of_answer]) == len("def") - 1
    assert "rank" in lines[of_prompt + 1]
    shown = lines[of_answer + 1 :]
    assert [line.split()[:2] for line in shown] == [
        [str(score["token_id"]), f"{score['logprob']:.4f}"] for score in scores
    ]
    for line, score in zip(shown, scores, strict=True):
        assert [f"{logprob:.4f}" for _, logprob in score["top"]] == re.findall(r" (-?[0-9.]+)(?:,|$)", line)


def test_logprobs_of_several_answers_have_their_numbers(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--target", target, "--max-tokens", "2", "--seed", "3", "-n", "2", "--logprobs", "0"]
    assert main(["generate", PROMPT, *flags]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("logprobs of")]
    assert [line.split(":")[0] for line in lines] == ["logprobs of [0]", "logprobs of [1]"]


def test_a_token_that_is_no_text_is_escaped() -> None:
    score = results.TokenLogprob(token_id=7, logprob=-0.5, top=((8, -0.25),))
    choice = results.Choice(index=0, text="", token_ids=(7,), finish_reason=FinishReason.LENGTH, logprobs=(score,))
    done = results.Completion(
        request_id="a",
        text="",
        token_ids=(7,),
        finish_reason=FinishReason.LENGTH,
        usage=Usage(prompt_tokens=1, completion_tokens=1, cached_prompt_tokens=0),
        timings=Timings(ttft_s=0.0, tpot_s=0.0, total_s=0.0),
        choices=(choice,),
    )
    written = {7: b"\xff\x1b[2J", 8: b"a\n"}
    tokens = {one: results.Token(token_bytes=text, is_special=False) for one, text in written.items()}
    [_, line] = logprob_lines(done, tokens)
    assert line.split() == ["7", "-0.5000", r"'\\xff\x1b[2J'", r"'a\n'", "-0.2500"]


def test_beams_are_printed_with_their_scores(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", PROMPT, "--target", target, "--max-tokens", "4", "--beams", "2"]) == 0
    assert capsys.readouterr().out.startswith("[0: score 0.0000]\n")
    assert main(["generate", PROMPT, "--target", target, "--max-tokens", "4", "--beams", "2", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)[0]["token_ids"]) == 4
    assert main(["generate", PROMPT, "--target", target, "--beams", "2", "--seed", "3"]) == 1
    assert "seed" in capsys.readouterr().err


def test_bans_and_biases_reach_the_server(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value in (("--logit-bias", "257=1"), ("--allowed-token-ids", "1,257"), ("--stop-token-ids", "257")):
        assert main(["generate", PROMPT, "--target", target, flag, value]) == 1
        line = capsys.readouterr().err
        assert flag[2:].replace("-", "_") in line
        assert "below 257" in line
    assert main(["generate", PROMPT, "--target", target, "--bad-words", "x" * 300]) == 1
    assert "bad_words" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", [["--logit-bias", "5"], ["--logit-bias", "a=1"], ["--stop-token-ids", "1,x"], ["--beams", "two"]]
)
def test_a_flag_that_cannot_be_read_is_a_usage_error(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate", PROMPT, *flags])
    assert caught.value.code == 2


def test_an_unreachable_router_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--target", "127.0.0.1:1", "--timeout", "1"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("pdserve topology: error: no server answers at 127.0.0.1:1 (")
    assert line.endswith("is `pdserve up` running there?")


@pytest.mark.parametrize("reason", ["self-signed certificate", "unable to get local issuer certificate"])
def test_an_unknown_ca_names_what_to_do_about_it(reason: str) -> None:
    text = f"failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:50051: {reason}"
    words = hint(from_code(grpc.StatusCode.UNAVAILABLE, text))
    assert words.startswith("; name its CA with --tls-ca FILE, or omit --tls: ")


def test_a_missing_token_names_its_variable() -> None:
    assert hint(Unauthenticated("no bearer token in the authorization metadata")) == (
        " (PDSERVE_TOKEN holds the cluster's token, or a tenant's key)"
    )
    assert hint(Unavailable("draining")) == ""


@pytest.mark.parametrize(
    ("states", "words"),
    [
        (NONE_YET, "none has connected yet; is the cluster still starting? Wait for `pdserve ready`"),
        ("1 away, 2 drained", "1 away, 2 drained; `pdserve undrain WORKER` lets a drained one serve again"),
        ("2 away", "2 away; see `pdserve topology`"),
    ],
)
def test_a_hint_fits_the_state_of_the_workers(states: str, words: str) -> None:
    error = NoWorkers("decode", states=states)
    assert f"{error}{hint(error)}" == f"no decode worker is available: {words}"
    assert hint(NoWorkers("decode")) == "; see `pdserve topology`", "of an older router"


@pytest.mark.parametrize("argv", [["generate"], ["nonsense"], ["up", "--transport", "pigeon"], ["bench", "now"]])
def test_a_wrong_command_line_is_a_usage_error_of_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "--help)" in line


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["bench", "--rate", "x"], "argument --rate: got 'x', expected a number, or several such as 1,2,4"),
        (["bench", "--concurrency", "1,x"], "got '1,x', expected a whole number, or several such as 1,2,4"),
        (["bench", "--input-tokens", "a:b"], "got 'a:b', expected a whole number, or two such as 32:128"),
        (["bench", "--seed", "x"], "argument --seed: got 'x', expected a whole number"),
        (["simulate", "--rates", "x"], "got 'x', expected a number, or several such as 1,2,4"),
        (["plan", "--lengths", "1"], "got '1', expected two whole numbers, such as 512,128, each up to"),
        (["generate", "x", "--stop-token-ids", "a"], "got 'a', expected token ids, such as 1,2,3"),
        (["generate", "x", "--logit-bias", "a"], "got 'a', expected a token id and a number, such as 42=-1.5"),
        (["generate", "x", "--temperature", "a"], "argument --temperature: got 'a', expected a number"),
        (["topology", "--model", "m"], "--model; a cluster serves one model, chosen with `pdserve up MODEL`"),
    ],
)
def test_a_wrong_value_names_what_is_allowed(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(argv)
    [line] = capsys.readouterr().err.splitlines()
    assert words in line
    assert "invalid" not in line


@pytest.mark.parametrize("word", ["--bogus", "--zzz", "--foo", "--xyzzy"])
@pytest.mark.parametrize("command", ["up", "generate", "bench", "plan", "simulate"])
def test_a_distant_flag_gets_no_suggestion(command: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, word])
    assert "did you mean" not in capsys.readouterr().err


def test_an_unknown_flag_points_to_the_help_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["up", "--modle", "x"])
    assert capsys.readouterr().err == (
        "pdserve up: error: unrecognized arguments: --modle; did you mean --model? (see pdserve up --help)\n"
    )


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["generte", "x"], "generate"),
        (["upp"], "up"),
        (["up", "--prefil", "2"], "--prefill"),
        (["up", "--kv_dtype=int8"], "--kv-dtype"),
        (["up", "-model", "toy"], "--model"),
        (["up", "--transport", "shmm"], "shm"),
        (["generate", "x", "--max_tokens", "3"], "--max-tokens"),
        (["bench", "--ulr", "http://x"], "--url"),
        (["plan", "--worker=3"], "--workers"),
    ],
)
def test_a_mistyped_word_gets_a_suggestion(argv: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"did you mean {meant}?" in line


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--quantization", "int8"], "--dtype, such as int8)"),
        (["--tensor-parallel-size", "2"], "--set worker.tensor_parallel=N"),
        (["-tp", "2"], "--set worker.tensor_parallel=N"),
        (["--max_model_len=2048"], "--set worker.max_context_tokens=N"),
        (["--api-key", "x"], "the token in PDSERVE_TOKEN"),
        (["--kv-blocks", "64"], "--set worker.kv_blocks=VALUE"),
        (["--max-new-tokens", "64"], "--set router.max_new_tokens=VALUE"),
    ],
)
@pytest.mark.parametrize("command", ["up", "serve"])
def test_a_flag_of_another_server_or_a_setting_is_translated(
    command: str, words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, *words])
    assert f"{words[0]} (here: {meant}" in capsys.readouterr().err


def test_translated_flags_exist() -> None:
    """Each names a flag of `up`, or a setting; and none translates a flag that `up` has."""
    parser = make_parsers(["up"])[1]["up"]
    settings = {f"worker.{one.name}" for one in fields(WorkerConfig)} | {
        f"router.{one.name}" for one in fields(RouterConfig)
    }
    for name, meant in parser.elsewhere.items():
        named = re.findall(r"--set ([a-z]+\.[a-z0-9_]+)=", meant)
        assert set(named) <= settings, name
        if not named:
            assert set(re.findall(r"--[a-z-]+", meant)) <= set(parser._option_string_actions), name


@pytest.mark.parametrize("kind", [WorkerConfig, RouterConfig, GatewayConfig])
def test_a_mistyped_flag_of_a_process_gets_a_suggestion_before_missing_flags(
    kind: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_flags(kind, ["--drain_s", "3"], "python -m program")
    assert "unrecognized arguments: --drain_s; did you mean --drain-s?" in capsys.readouterr().err


def test_a_long_or_strange_word_gets_no_suggestion_and_is_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["up", "--" + "prefill" * 100_000], ["x" * 1_000_000], ["up", *["--prefil"] * 10_000]):
        with pytest.raises(SystemExit):
            main(argv)
        assert len(capsys.readouterr().err) < 2500
    with pytest.raises(SystemExit):
        main(["up", "--qqqqzzzz"])
    assert "did you mean" not in capsys.readouterr().err


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "start a cluster" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["top"], ["play", "run.jsonl", "--terminal"]])
def test_a_full_screen_needs_a_terminal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 1
    assert "stdout: got no terminal" in capsys.readouterr().err


def test_a_full_disk_gives_no_traceback(target: str) -> None:
    command = f"{sys.executable} -m pdserve generate hi --target {target} --max-tokens 4 > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("pdserve generate: error: ")
    assert "No space left on device" in line


def test_invalid_utf8_is_an_error_of_the_prompt(target: str) -> None:
    command = f"printf 'a\\xff' | {sys.executable} -m pdserve generate - --target {target}"
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("pdserve generate: error: prompt: ")


def test_an_error_during_an_answer_starts_a_new_line(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--target", target, "--max-tokens", "4000", "--ignore-eos", "--seed", "1", "--timeout", "1"]
    assert main(["generate", PROMPT, *flags]) == 1
    seen = capsys.readouterr()
    assert len(seen.out) > 1, "the answer had not begun"
    assert seen.out.endswith("\n")
    assert "the deadline passed" in seen.err


def test_chat_does_not_send_an_unknown_command(
    target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("/help\n/quit\n"))
    assert main(["chat", "--target", target, "--max-tokens", "4"]) == 0
    seen = capsys.readouterr()
    assert seen.out == ""
    assert "no such command; /reset forgets" in seen.err


def test_an_incomplete_document_is_reported() -> None:
    asked = {"json_schema": "{}", "max_tokens": 1}
    assert truncation_warnings(["stop", "length"], asked) == [
        "max_tokens ended the answer before its json_schema was complete"
    ]
    assert truncation_warnings(["stop", "stop"], asked) == []
    assert truncation_warnings(["length"], {"max_tokens": 1}) == []


def test_chat_reads_a_pipe_and_prints_times(
    target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\n/reset\nagain\n/quit\nnever read\n"))
    assert main(["chat", "--target", target, "--max-tokens", "4"]) == 0
    seen = capsys.readouterr()
    assert seen.err.count("ended by length") == 2


def test_an_error_ends_chat_on_a_pipe(
    target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("bad\udcff\nnever sent\n"))
    assert main(["chat", "--target", target, "--max-tokens", "4"]) == 1
    seen = capsys.readouterr()
    assert seen.err.count("pdserve chat: error: ") == 1
    assert "ended by" not in seen.err


def test_topology_lists_the_workers(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--target", target]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [
        ["decode-0", "decode", "connected"],
        ["prefill-0", "prefill", "connected"],
    ]
    assert lines[-1].endswith(f", version {FULL_VERSION}")
    with Client(target) as client:
        topology = client.topology()
        assert [topology.version, client.model().version] == [FULL_VERSION] * 2
    assert {one.version for one in topology.workers} == {FULL_VERSION}


def test_stats_name_another_version_of_the_command() -> None:
    assert versions_line("0.1.0+a", "0.1.0+b") == "router: version 0.1.0+a, this command: version 0.1.0+b"
    assert versions_line("", "0.1.0+b") == "router: version unknown, this command: version 0.1.0+b"


def test_a_worker_can_be_drained_and_undrained(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    def state_of_worker() -> str:
        capsys.readouterr()
        assert main(["topology", "--target", target]) == 0
        [line] = [one for one in capsys.readouterr().out.splitlines() if one.startswith("prefill-0 ")]
        return line.split()[2]

    assert main(["drain", "prefill-0", "--target", target]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "prefill-0 gets no new requests; `pdserve undrain prefill-0` undoes this"
    assert (
        second == "prefill-0 was the last prefill worker: decode workers also compute the prompts until it is undrained"
    )
    try:
        assert state_of_worker() == "drained"
    finally:
        assert main(["undrain", "prefill-0", "--target", target]) == 0
    assert capsys.readouterr().out == "prefill-0 gets new requests again\n"
    ends_s = time.monotonic() + 60.0
    while state_of_worker() != "connected":
        assert time.monotonic() < ends_s
        time.sleep(0.05)


def test_draining_an_unknown_worker_names_it(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("drain", "undrain"):
        assert main([command, "p7", "--target", target]) == 1
        assert capsys.readouterr().err == f"pdserve {command}: error: no worker named 'p7'\n"


def test_sessions_are_listed_and_ended(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Client(target) as client:
        client.generate("a prompt of some blocks " * 8, max_tokens=2, session_id="by command")
    capsys.readouterr()
    assert main(["sessions", "list", "--limit", "1", "--target", target]) == 0
    head, row, *_ = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "SESSION"
    assert re.match(r"by command +- +router\S* +1 +192 +\d+ s ago +- +\S", row), row
    assert main(["sessions", "end", "by command", "--target", target]) == 0
    assert capsys.readouterr().out == "session by command has ended: its cached prefixes leave first\n"
    assert main(["sessions", "list", "--json", "--target", target]) == 0
    found = {one["session_id"]: one for one in json.loads(capsys.readouterr().out)["sessions"]}
    assert found["by command"]["conversations"][0]["is_over"]
    assert main(["sessions", "end", "unknown", "--target", target]) == 1
    assert capsys.readouterr().err == "pdserve sessions: error: no session named 'unknown'\n"


def test_the_table_of_sessions_says_where_prefixes_are_and_until_when() -> None:
    facts: dict[str, Any] = {"prompt_tokens": 100, "growth_tokens": 0.0, "used_at_s": 60.0, "is_cached_known": True}
    cached = (CachedPrefix(worker_id="d0", tokens=96), CachedPrefix(worker_id="d1", tokens=64))
    conversations = (
        ConversationView(turns=1, running=0, until_s=None, is_over=True, **facts),
        ConversationView(turns=2, running=0, until_s=130.0, is_over=False, cached=cached, **facts),
        ConversationView(turns=3, running=1, until_s=None, is_over=False, **{**facts, "is_cached_known": False}),
    )
    session = SessionView(
        session_id="s",
        tenant="acme",
        is_named=True,
        turns=6,
        began_at_s=0.0,
        used_at_s=60.0,
        conversations=conversations,
        cursor=7,
        router_id="router-1",
    )
    page = SessionPage(sessions=(session,), has_more=True, is_partial=True)
    assert render_sessions(page, 100.0).splitlines() == [
        "SESSION  TENANT  ROUTER    TURNS  PROMPT  USED      NEXT TURN    CACHED TOKENS",
        "s        acme    router-1  3      100     40 s ago  running      not known",
        "s        acme    router-1  2      100     40 s ago  within 30 s  d0 96, d1 64",
        "s        acme    router-1  1      100     40 s ago  over         nowhere",
        "more with --after 7",
        "another router has not answered or is busy: its sessions are not shown",
    ]
    assert render_sessions(SessionPage(sessions=(), has_more=False), 0.0) == "no sessions"


def test_topology_shows_transports_and_reasons() -> None:
    told = cluster_pb2.GetTopologyResponse(
        workers=[
            cluster_pb2.WorkerView(
                worker_id="p0",
                kv_links=[worker_pb2.KvLink(decode_worker="d1", transport="tcp", reason="shm needs one host")],
            )
        ]
    )
    assert "KV p0 -> d1: tcp (shm needs one host)" in render(results.topology(told)).splitlines()


def test_topology_json_is_one_object(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--target", target, "--json"]) == 0
    assert {worker["worker_id"] for worker in json.loads(capsys.readouterr().out)["workers"]} == {
        "prefill-0",
        "decode-0",
    }


KV_PATHS = ("shm", "tcp", "choice")


def test_doctor_passes_on_this_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[1] for line in lines[:-1]} >= {"python", "torch", "redis", "port", "shm", "ray", "tokenizer"}
    assert lines[-1] == "this host can run a cluster"
    assert not any("nixl" in line for line in lines), "there is no GPU"
    shm, tcp, choice = (next(line for line in lines if line[6:].startswith(f"kv {name} ")) for name in KV_PATHS)
    for line in (shm, tcp):
        assert re.match(r"ok    kv \w+ +\d+\.\d\d ms for 256 KiB, \d+\.\d\d GB/s$", line), line
    assert re.match(r"ok    kv choice +shm: the sender's first choice$", choice), choice


def test_doctor_names_the_cluster_that_has_a_port(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    port = target.rpartition(":")[2]
    with socket.create_server(("127.0.0.1", 0)) as other:
        http = str(other.getsockname()[1])
        main(["doctor", "--skip-pairs", "--model", "toy", "--port", port, "--http", http])
    found = {
        line.split()[1]: line for line in capsys.readouterr().out.splitlines() if line.split()[1] in ("port", "http")
    }
    assert f"{port} is in use: another pdserve cluster serves there (`pdserve topology`); choose" in found["port"]
    assert f"{http} is in use: another program listens there; choose another one with --http" in found["http"]


def test_doctor_checks_gpu_requirements(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    facts = SimpleNamespace(name="NVIDIA H200", total_memory=141 * 2**30)
    stands_in = {"is_available": lambda: True, "device_count": lambda: 1, "get_device_properties": lambda index: facts}
    for name, call in stands_in.items():
        monkeypatch.setattr(torch.cuda, name, call)
    monkeypatch.setitem(sys.modules, "cupy", None)
    main(["doctor", "--skip-pairs"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "NVIDIA H200, 141 GiB" in line]
    [compiler], [cupy] = ([line for line in lines if line[6:].startswith(name)] for name in ("compiler", "cupy"))
    assert compiler.startswith("ok")
    assert cupy.startswith("warn")
    assert "run pip install -c constraints.txt '.[cuda13]'" in cupy
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    assert main(["doctor", "--skip-pairs"]) == 1
    assert "FAIL  compiler" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(None, "ok    host"), (3 * 2**30, "ok    host"), (2**30, "warn  host")],
)
def test_doctor_counts_memory_that_can_be_freed(
    limit: int | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MemFree is small on a host that has read files; a container may have less than its host."""
    (tmp_path / "meminfo").write_text("MemFree: 102400 kB\nMemAvailable: 8388608 kB\n")
    (tmp_path / "memory.max").write_text("max" if limit is None else str(limit))
    (tmp_path / "memory.current").write_text("0")
    monkeypatch.setattr(doctor, "free_bytes", lambda: host.free_bytes(tmp_path, tmp_path))
    [found] = doctor._memory()
    available = 8.0 if limit is None else limit / 2**30
    assert doctor.line(found).startswith(expected)
    assert f"{available:.1f} GiB available" in found.text


@pytest.mark.parametrize("module", ["pdserve.gateway", "router", "prefill_worker", "decode_worker"])
def test_help_names_the_program(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"usage: python -m {module} ")


def test_doctor_fails_on_an_unusable_model_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--skip-pairs", "--model", str(tmp_path)]) == 1
    assert any(
        line.startswith("FAIL  model") and "config.json" in line for line in capsys.readouterr().out.splitlines()
    )


def test_rank_names_missing_settings(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDSERVE_CLUSTER_SECRET", raising=False)
    for words, expected in (
        (["--count", "0"], "count: got 0, expected 1 to 63 ranks"),
        (["--wait-s", "nan"], "wait-s: got nan, expected seconds up to a day"),
        ([], "cluster_secret: got nothing, expected the cluster's secret in PDSERVE_CLUSTER_SECRET"),
    ):
        assert main(["rank", "127.0.0.1:1", *words]) == 1
        assert expected in capsys.readouterr().err


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pdserve", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"pdserve {FULL_VERSION}\n"


def test_a_closed_pipe_gives_no_traceback(target: str) -> None:
    command = f"{sys.executable} -m pdserve generate hi --target {target} --max-tokens 400 --ignore-eos | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert "Traceback" not in done.stderr


def test_structured_output_flags_accept_text_or_a_file(
    target: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The toy engine supports no grammar, so the error names the field that the flag has set."""
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    for field, flags in {
        "json_schema": ["--json-schema", f"@{tmp_path / 'schema.json'}"],
        "json_object": ["--json-object"],
        "regex": ["--regex", "a+"],
        "choice": ["--choice", "yes", "--choice", "no"],
        "grammar": ["--grammar", 'start: "a"'],
    }.items():
        assert main(["generate", PROMPT, "--target", target, *flags]) == 1
        assert f"{field}: got a grammar" in capsys.readouterr().err
    for flags in (["--regex", "a", "--json-object"], ["--grammar", f"@{tmp_path / 'absent'}"]):
        with pytest.raises(SystemExit):
            main(["generate", PROMPT, "--target", target, *flags])


@pytest.mark.parametrize("module", ["pdserve.cli.main", "pdserve.client.sync", "pdserve.launch.settings"])
def test_ctrl_c_during_imports_is_silent(module: str) -> None:
    code = f"""
import runpy, sys
class Interrupts:
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts)
sys.argv = ["pdserve", "up", "--model", "toy"]
runpy.run_module("pdserve", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """What `up` and `serve` would have started."""
    found: list[Asked] = []

    async def serve(one: Asked, source: SettingsSource, *, detaches: bool) -> int:
        assert source.read(one).spec.http == one.spec.http
        assert not detaches
        found.append(one)
        return 0

    monkeypatch.setattr("pdserve.launch.serve.serve", serve)
    return found


@pytest.mark.parametrize(
    ("argv", "http"),
    [
        (["up", "toy"], None),
        (["up", "--model", "toy"], None),
        (["up", "toy", "--model", "toy", "--prefill", "1"], None),
        (["serve", "toy"], 8000),
        (["serve", "--prefill", "1", "toy", "--http", "9000"], 9000),
        (["serve", "toy", "--set", "http=9001"], 9001),
    ],
)
def test_a_model_may_be_positional_and_serve_has_http(argv: list[str], http: int | None, asked: list[Asked]) -> None:
    assert main(argv) == 0
    assert [(one.spec.model, one.spec.http) for one in asked] == [("toy", http)]


@pytest.mark.parametrize("words", [["--lora", "a=/a", "--lora=b=/b"], ["--lora", "a=/a,b=/b"]])
def test_adapters_may_stand_before_the_model(words: list[str], asked: list[Asked]) -> None:
    assert main(["serve", *words, "--lora-folders", "/l", "toy", "--prefill", "0"]) == 0
    [one] = asked
    assert one.spec.model == "toy"
    assert one.spec.settings["worker"] == {"lora": ("a=/a", "b=/b"), "lora_folders": ("/l",)}


@pytest.mark.parametrize("words", [["a/b", "c"], ["a/b,c"]])
@pytest.mark.parametrize("command", ["up", "serve"])
def test_a_model_may_have_several_names(command: str, words: list[str], asked: list[Asked]) -> None:
    assert main([command, "toy", "--served-model-name", *words, "--prefill", "0"]) == 0
    [one] = asked
    assert (one.spec.model, one.spec.prefill, served_names(one.spec)) == ("toy", 0, ("a/b", "c"))
    config = parse_flags(RouterConfig, ["--model", "toy", "--served-model-name", *words], "python -m router", {})
    assert config.served_model_name == ("a/b", "c")


def test_a_wrong_name_of_the_model_is_an_error(asked: list[Asked], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "toy", "--served-model-name", "a b"]) == 2
    error = "served_model_name: got 'a b', expected names of 1 to 256 printable characters without spaces and commas"
    assert capsys.readouterr().err == f"pdserve serve: error: {error}\n"
    assert asked == []


def test_serve_without_a_model_takes_that_of_the_file(asked: list[Asked], tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("model = 'toy'\nhttp = 9002\n")
    assert main(["serve", "--config", str(file)]) == 0
    assert [(one.spec.model, one.spec.http) for one in asked] == [("toy", 9002)]


@pytest.mark.parametrize(
    ("words", "ray"),
    [
        ("toy --ray", ""),
        ("--ray toy", ""),
        ("--ray=toy --prefill 2", ""),
        ("--ray --model toy", ""),
        ("--ray local toy", ""),
        ("toy --ray auto", "auto"),
        ("--ray head-0.ray:6379 toy", "head-0.ray:6379"),
        ("--ray [::1]:6379 --model toy", "[::1]:6379"),
        ("--ray ray://head:10001 toy", "ray://head:10001"),
        ("--prefill 2 toy", None),
    ],
)
@pytest.mark.parametrize("command", ["up", "serve"])
def test_a_word_after_ray_is_an_address_or_the_model(
    asked: list[Asked], command: str, words: str, ray: str | None
) -> None:
    assert main([command, *words.split()]) == 0
    assert [(one.spec.model, one.ray) for one in asked] == [("toy", ray)]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--ray head toy", "ray: got 'head', expected auto, local, HOST:PORT or ray://HOST:PORT; without a value"),
        ("toy --ray head:port", "ray: got 'head:port', expected auto"),
        ("--model toy --ray toy-marked", "ray: got 'toy-marked', expected auto"),
        ("--set ray=head --model toy", "ray: got 'head', expected auto"),
        ("--ray ./nowhere", "model: got ./nowhere, expected .* (if --ray was given an address: it is auto, local"),
    ],
)
def test_a_word_after_ray_that_is_neither_is_named(
    asked: list[Asked], capsys: pytest.CaptureFixture[str], words: str, why: str
) -> None:
    assert main(["up", *words.split()]) == 2
    seen = capsys.readouterr().err
    assert re.search(re.escape(why).replace(r"\.\*", ".*"), seen), seen
    assert asked == []


def test_no_other_option_takes_the_word_after_it() -> None:
    """An option whose value is optional takes what is meant for a positional argument. `--ray` gives it back; the help
    of `--served-model-name` says to put MODEL first."""
    _, parser_of, _ = make_parsers()
    found = {
        (command, *action.option_strings)
        for command, parser in parser_of.items()
        for action in parser._actions
        if action.option_strings and action.nargs in ("?", "*", "+")
    }
    assert found == {(command, flag) for command in ("up", "serve") for flag in ("--ray", "--served-model-name")}


def test_a_flag_prevails_over_a_wrong_log_level_of_the_environment(
    asked: list[Asked], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDSERVE_LOG_LEVEL", "loud")
    assert main(["up", "toy"]) == 2
    assert "log_level: got loud" in capsys.readouterr().err
    assert main(["up", "toy", "--log-level", "warning"]) == 0
    assert [(one.log_level, one.is_level_given) for one in asked] == [("warning", True)]


def test_two_different_models_are_an_error(asked: list[Asked], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "toy", "--model", "toy-marked"]) == 2
    assert capsys.readouterr().err == "pdserve serve: error: two models, toy and toy-marked\n"
    assert asked == []
