"""The scripts of tests/gpu run on a CPU with stand-ins, and detect seeded errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from benchmarks.gpu.ends import HostPool
from pdserve.core.types import TokenOut
from tests.gpu import __main__ as checks
from tests.gpu import check_transfer
from tests.gpu.check_graphs import differs

ROOT = Path(__file__).parents[4]


@pytest.mark.gpu_checks
@pytest.mark.slow  # test_graph_engine.py and test_device_paths.py check the same.
@pytest.mark.parametrize(
    ("name", "num_right", "told"),
    [
        ("transfer", 3 * 3 + 1, "| nccl | killed in mid-transfer | right |"),
        ("graphs", 1, "| llama | float32 | 2 |"),
    ],
)
def test_the_entry_point_runs_all_rehearsals(name: str, num_right: int, told: str) -> None:
    command = [sys.executable, "-m", "tests.gpu", "--rehearse", "--only", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.count("| right |") == num_right
    assert f"[{name}] {told}" in done.stdout


def test_failed_checks_are_repeated_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = "print('| this | fine |'); print('| that | **wrong** |'); raise SystemExit(1)"
    commands = {
        "right": [sys.executable, "-c", "print('fine')"],
        "kernels": [sys.executable, "-c", wrong],
        "engine": [sys.executable, "-c", "import a_module_that_nobody_has"],
        "transfer": [sys.executable, "-c", "import os; os.abort()"],
    }
    assert checks.session(commands, 300.0, tmp_path) == 1
    text = (tmp_path / "checks.md").read_text()
    assert capsys.readouterr().out.endswith(text)
    assert "| right | right |" in text
    assert "## kernels: exit code 1\n\n| that | **wrong** |\n\n" in text
    assert "No module named 'a_module_that_nobody_has'" in text
    assert "| transfer | **signal 6** |" in text
    assert "[right] fine\n" in (tmp_path / "checks.log").read_text()
    assert len(list(tmp_path.iterdir())) == 2


def test_hanging_and_skipped_checks_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_LEAST_S", 1.0)
    assert checks.session({"graphs": ["sleep", "600"], "times": ["sleep", "600"]}, 2.0, tmp_path) == 1
    text = (tmp_path / "checks.md").read_text()
    assert "| graphs | **over its time** |" in text
    assert "| times | **SKIPPED" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("script", [checks, check_transfer])
def test_without_a_device_the_exit_code_is_2(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script.__name__])
    assert script.main() == 2
    assert "nothing was checked" in capsys.readouterr().err


def test_a_different_token_or_logprob_is_reported() -> None:
    text = [[(5, 0.0), (6, -1.0)]]
    assert differs(text, [[(5, 0.0), (6, -1.0)]], 0.0, "x") == ""
    assert "draws 7 for 6" in differs(text, [[(5, 0.0), (7, -1.0)]], 0.0, "x")
    assert "logprob" in differs(text, [[(5, 0.0), (6, -1.1)]], 0.0, "x")
    assert "logprob" in differs(text, [[(5, 0.0), (6, float("nan"))]], 1.0, "x")


@pytest.mark.parametrize(("ours", "is_broken"), [(1, False), (2, True)])
def test_a_token_beyond_rounding_is_reported(ours: int, is_broken: bool) -> None:
    from tests.gpu.check_engine import Outcome, judge

    exact_V = torch.full((100,), -20.0)
    exact_V[:3] = torch.tensor([0.0, -0.1, -3.0])
    rounded_V = exact_V + 0.1 * (-1.0) ** torch.arange(100)
    outcome = Outcome()
    outs = [TokenOut(token_id=7), TokenOut(token_id=ours)]
    judge(outs, [7, 0], torch.stack([rounded_V, rounded_V]), "bfloat16", outcome, lambda num_sampled: exact_V)
    assert outcome.num_equal == 0
    assert bool(outcome.broken) == is_broken


def test_the_bound_of_draws_is_above_the_rounding_of_a_logprob() -> None:
    """Two of float32 near -10, the reference's and the sum's, and the error of the device's exp2."""
    from tests.gpu.case_sampling import CASES

    rounding = float(np.spacing(np.float32(10.0)))
    bounds = [case.bound for case in CASES if case.name.startswith("draw")]
    assert min(bounds) > 2 * rounding + 2.0**-22
    assert max(bounds) < 10 * rounding


class WrongSender:
    """Reports success, but has sent wrong bytes."""

    def __init__(self, pool: HostPool, block: int) -> None:
        self._pool, self._block = pool, block

    def ask(self, word: str, *rest: object) -> object:
        if word == "send":
            self._pool.fill((self._block,), 9)
            return "sent", "", 0.0
        return self._pool.block(0)


class NoGrant:
    def expect(self, blocks: object) -> None: ...


@pytest.mark.parametrize("block", [1, 90])
def test_wrong_bytes_and_ungranted_blocks_are_reported(block: int) -> None:
    pool = HostPool(check_transfer.NUM_BLOCKS)
    granted = [2, 1, 0]
    wrong = check_transfer.right_bytes(WrongSender(pool, block), NoGrant(), pool, granted)  # type: ignore[arg-type]
    assert f"block {block} " in wrong
