"""`pdserve simulate` as a user runs it."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.cli.main import main
from router.policy import POLICIES
from router.policy.interface import RULES
from simulator.commands.simulate import FORMAT_NAMES, POLICY_NAMES, RULE_NAMES, WORKLOAD_NAMES
from simulator.traces.files import FORMATS
from simulator.traces.workloads import WORKLOADS
from tests.unit.router.test_random_runs import run
from tests.unit.router.test_replay import recording

SMALL = ["simulate", "--limit", "40"]


def mooncake(path: Path, count: int = 30) -> str:
    rows = [
        {"timestamp": 3000 * (number // 10), "input_length": 600, "output_length": 5, "hash_ids": [0, number + 1]}
        for number in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def answer(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, object]:
    assert main([*SMALL, "--json", *flags]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_without_any_flag_it_compares_policies_on_a_built_in_workload(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0
    seen = capsys.readouterr()
    lines = seen.out.splitlines()
    assert lines[0] == "built-in chat: 40 requests, h100-sxm.llama-3.1-8b.bf16, seed 0"
    runs = [tuple(line.split()[:2]) for line in lines[4:20]]
    assert runs == [("goodput", "1:1"), ("goodput", "0:2"), ("round-robin", "1:1"), ("colocated", "0:2")] * 4
    assert lines[21].startswith("highest of these rates at which 90%")
    assert [line.split(":")[0] for line in lines[22:24]] == ["  goodput", "  goodput 0"]
    assert [line.split("  ")[0] for line in lines[-3:]] == ["ATTAINED", "BOUND", "OF BOUND"]
    assert "error" not in seen.err


def test_a_demonstration_without_prefill_workers_runs_goodput_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--prefill", "0", "--decode", "2"]) == 0
    text = capsys.readouterr().out
    assert [tuple(line.split()[:2]) for line in text.splitlines()[4:7]] == [
        ("goodput", "0:2"),
        ("round-robin", "0:2"),
        ("colocated", "0:2"),
    ]
    assert "disaggregation" not in text


def test_the_help_describes_the_demonstration(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "(goodput, or those of the demonstration)" in text
    assert "a demonstration runs at four rates of the built-in workload: goodput with and without prefill" in text


def test_json_is_one_object_and_equal_arguments_give_an_equal_one(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--policy", "goodput", "--seed", "3", "--noise", "0.05")
    found = answer(capsys, *flags)
    assert found == answer(capsys, *flags)
    assert found != answer(capsys, *flags[:-3], "4", *flags[-2:])
    assert (found["requests"], found["policy"], found["seed"]) == (40, "goodput", 3)
    outcomes = found["outcomes"]
    assert isinstance(outcomes, dict)
    assert sum(outcomes.values()) == 40
    for name in ("attainment", "goodput_rps", "ttft_s", "tpot_s", "refused"):
        assert name in found


def test_a_published_trace_can_be_reshaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["simulate", "--json", "--trace", mooncake(tmp_path / "t"), "--limit", "20"]
    assert main(flags) == 0
    plain = json.loads(capsys.readouterr().out)
    assert (plain["requests"], plain["span_s"], plain["policy"]) == (20, 3.0, "goodput")
    assert main([*flags, "--rate-scale", "2", "--jitter", "1"]) == 0
    spread = json.loads(capsys.readouterr().out)
    assert (spread["trace"], spread["requests"]) == ("t", 20)
    assert 1.5 < spread["span_s"] < 3.0


def test_a_recording_uses_its_own_cluster_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recording"
    path.write_text("".join(recording(run(3, faults=0.0, policy="round-robin", requests=40))), encoding="utf-8")
    flags = ["simulate", "--json", "--trace", str(path)]
    assert main(flags) == 0
    same = json.loads(capsys.readouterr().out)
    assert (same["cluster"], same["policy"], same["requests"]) == ("the recorded cluster", "round-robin", 40)
    assert main([*flags, "--policy", "colocated"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert (both["prefill"], both["decode"]) == (0, same["prefill"] + same["decode"])
    assert main([*flags, "--decode", "3", "--slo-ttft", "7"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert (other["cluster"], other["decode"], other["slo"]["ttft_s"]) == ("h100-sxm.llama-3.1-8b.bf16", 3, 7.0)
    assert other["policy"] == "round-robin"


def test_each_rate_and_policy_is_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, html = tmp_path / "rows.csv", tmp_path / "page.html"
    found = answer(
        capsys, "--rates", "0.5,1", "--policy", "goodput,least-loaded", "--rows", str(rows), "--html", str(html)
    )
    runs = found["runs"]
    assert found["attainment"] == 1.0
    assert isinstance(runs, list)
    assert [(one["rate_scale"], one["policy"]) for one in runs] == [
        (0.5, "goodput"),
        (0.5, "least-loaded"),
        (1.0, "goodput"),
        (1.0, "least-loaded"),
    ]
    with rows.open(encoding="utf-8", newline="") as file:
        written = list(csv.DictReader(file))
    assert len(written) == 160
    assert {row["policy"] for row in written} == {"goodput", "least-loaded"}
    text = html.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "rate of arrival" in text
    assert "pdserve 0." in text
    assert "seed 0" in text


def test_too_few_requests_give_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--rates", "0.5,1", "--policy", "goodput")
    found = answer(capsys, *flags)
    assert not found["is_long_enough"]
    assert found["highest_held_rps"] == {"goodput": None}
    assert main([*SMALL, *flags]) == 0
    text = capsys.readouterr().out
    assert "  goodput: no verdict" in text
    assert "no verdict on 2 runs, which are too short; for example 40 requests last" in text


def test_certain_misses_are_not_called_too_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--rates", "0.5,1", "--policy", "goodput", "--slo-ttft", "0.001"]) == 0
    text = capsys.readouterr().out
    assert "  goodput: 0 requests/s" in text
    assert "too short" not in text


def test_rows_are_json_lines_unless_the_file_is_named_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    found = answer(capsys, "--policy", "goodput", "--rows", str(path))
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [row["number"] for row in rows] == list(range(40))
    assert sum(row["outcome"] == "served" for row in rows) == found["met"]


def test_a_killed_worker_affects_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--policy", "round-robin", "--decode", "1")
    whole, broken = answer(capsys, *flags), answer(capsys, *flags, "--kill", "d0@1:2")
    assert isinstance(whole["attainment"], float)
    assert isinstance(broken["attainment"], float)
    assert broken["attainment"] < whole["attainment"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--policy", "magic"), "policy: got magic, expected one of colocated, dynamo, goodput"),
        (("--policy", ","), "policy: got ,, expected one of"),
        (("--profile", "tpu"), "h100-sxm.llama-3.1-8b.bf16"),
        (("--rules-off", "gravity"), "rules_off: got gravity, expected some of path-choice"),
        (("--slo-ttft", "0"), "slo.ttft_s: got 0.0"),
        (("--slo-tpot", "-1"), "slo.tpot_s: got -1.0"),
        (("--slo-tpot", "nan"), "slo.tpot_s: got nan"),
        (("--decode", "0"), "decode: got 0, expected 1 to"),
        (("--decode", "0", "--prefill", "0"), "decode: got 0, expected 1 to"),
        (("--prefill", "-1"), "prefill: got -1, expected 0 to"),
        (("--routers", "0"), "num_routers: got 0, expected at least 1"),
        (("--rate-scale", "0"), "rate_scale: got 0.0"),
        (("--rates", "1,-1"), "rate_scale: got -1.0"),
        (("--limit", "0"), "limit: got 0"),
        (("--link", "pigeon"), "link: got pigeon, expected one of nvlink, ib400, eth25"),
        (("--kill", "d9@1"), "worker: got d9, expected one of p0, d0"),
        (("--jitter", "1"), "jitter: got 1, expected a trace whose timestamps are rounded"),
        (("--trace", "absent.jsonl"), "trace: got absent.jsonl, expected a file that can be read"),
        (("--rows", "no/such/folder/rows"), "a file that can be written"),
        (("--noise", "-1"), "noise: got -1.0"),
        (("--host-gib", "-1"), "host-gib: got -1.0"),
        (("--host-gib", "1", "--host-gb-per-s", "0"), "host_bytes_per_s: got 0.0"),
        (("--disk-gib", "-1"), "disk-gib: got -1.0"),
        (("--disk-gib", "1", "--disk-gb-per-s", "0"), "disk_bytes_per_s: got 0.0"),
    ],
)
def test_wrong_arguments_are_one_line(flags: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *flags]) == 1
    seen = capsys.readouterr()
    assert seen.out == ""
    [line] = seen.err.splitlines()
    assert line.startswith("pdserve simulate: error: ")
    assert told in line


def test_a_wrong_row_fails_before_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    mooncake(path)
    with path.open("a", encoding="utf-8") as file:
        file.write('\n{"timestamp": 0}')
    assert main(["simulate", "--trace", str(path)]) == 1
    assert "t.jsonl, line 31, input_length: got nothing" in capsys.readouterr().err


def test_the_help_lists_available_names() -> None:
    assert sorted(POLICY_NAMES.split(", ")) == sorted(POLICIES)
    assert RULE_NAMES.split(", ") == list(RULES)
    assert FORMAT_NAMES.split(", ") == [one.name for one in FORMATS]


def test_the_simulator_is_loaded_on_demand() -> None:
    probe = "import sys, pdserve.cli.main; print('simulator.cluster.world' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_every_built_in_workload_runs_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert tuple(WORKLOADS) == tuple(WORKLOAD_NAMES.split(", "))
    for name in WORKLOADS:
        found = answer(capsys, "--policy", "goodput", "--workload", name, "--duration", "15")
        assert found["trace"] == f"built-in {name}"
        assert found["requests"] == 40


def test_invalid_workload_arguments_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = mooncake(tmp_path / "trace.jsonl")
    assert main([*SMALL, "--trace", trace, "--workload", "chat"]) != 0
    assert "workload" in capsys.readouterr().err
    assert main([*SMALL, "--workload", "nothing"]) != 0
    assert "long-tail" in capsys.readouterr().err
