"""benchmarks.gpu from the first line to the last on a CPU: every part leaves its rows, and a bad one stops no other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu_report import Bar, Report, read, table

ROOT = Path(__file__).parents[4]
#: What the GPU machine does not have (and what numba would take the CPU path with).
MISSING = ("xxhash", "numba", "redis", "ray", "opentelemetry", "prometheus_client", "llguidance", "grpc_health")
BLOCKER = f"""
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = lambda name, path=None, target=None: (
    None if name.split(".")[0] in {MISSING!r} else find(name, path, target)
)
"""


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The environment of processes that find none of MISSING, their children included."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(BLOCKER)
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TRITON_INTERPRET")}
    return kept | {"PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}", "OMP_NUM_THREADS": "1"}


def test_a_rehearsal_without_the_packages_that_the_gpu_machine_lacks(bare: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--out", str(out)]
    done = subprocess.run(command, env=bare, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    findings = {part.name: read(out / f"{part.name}.json") for part in gpu.PARTS}
    assert all(one.rows and not one.errors for one in findings.values())
    assert all(len(row) == len(one.columns) for one in findings.values() for row in one.rows)
    kinds = {row[0] for row in findings["llama-fp8"].rows}
    assert kinds == {"loaded", "captured", "decode", "prefill", "kernels of a step"}
    assert {"cuda_ipc", "nccl", "cuda_ipc, its copy alone"} <= {row[0] for row in findings["transfers"].rows}
    texts = [bar for bar in findings["serving"].bars if "equal texts" in bar.name]
    assert len(texts) == 2
    assert all(bar.is_met for bar in texts)
    assert (out / "table.md").read_text().count("\n## ") + 1 == len(gpu.PARTS)


def test_what_the_gpu_scripts_import_is_there(bare: dict[str, str]) -> None:
    code = "import importlib.util; assert importlib.util.find_spec('numba') is None\n" + "\n".join(
        f"import {name}"
        for name in (
            "kvtransfer.cuda",
            "kvtransfer.nccl_lane",
            "kvtransfer.cuda_handles",
            "decode_worker.program",
            "prefill_worker.program",
            "pdserve.engine.gpu.opening",
            "tests.gpu.check_engine",
            "tests.gpu.check_kernels",
        )
    )
    done = subprocess.run([sys.executable, "-c", code], env=bare, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_part_that_raises_or_is_cut_keeps_its_rows(tmp_path: Path) -> None:
    report = Report(tmp_path, "qwen", "a title", ["what", "value"])
    report.row("first", 1234.5)

    def fails() -> None:
        raise RuntimeError("out of memory")

    gpu.guarded("qwen", tmp_path, fails)
    gpu.note(tmp_path, "serving", TimeoutError("no time was left for it"))
    kept = read(tmp_path / "qwen.json")
    assert kept.rows == [["first", "1234"]]
    assert kept.errors == ["qwen: RuntimeError: out of memory"]
    assert "- failed: qwen: RuntimeError" in table(kept)
    assert read(tmp_path / "serving.json").errors


def test_bars_are_met_at_their_bound() -> None:
    assert Bar("least", 155.0, 155.0).is_met
    assert not Bar("least", 154.9, 155.0).is_met
    assert Bar("most", 1.1, 1.1, is_least=False).is_met
    assert not Bar("most", float("nan"), 1.1, is_least=False).is_met


@pytest.mark.skipif(bool(os.environ.get("CUDA_VISIBLE_DEVICES")), reason="there may be a CUDA device")
def test_without_a_device_nothing_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 or gpu.has_cuda()
    assert "nothing was measured" in done.stderr or gpu.has_cuda()
