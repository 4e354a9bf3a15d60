"""What only the compiler refuses: every kernel, at real shapes, for an H100 that is not there.

In every run each kernel is compiled once per types of its arguments; test-slow compiles all launches.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.all_cases import FILES

ROOT = Path(__file__).parents[4]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "flags", [pytest.param(["--short"], id="short"), pytest.param([], id="every-launch", marks=pytest.mark.slow)]
)
def test_every_kernel_compiles_for_sm_90_without_a_device(flags: list[str]) -> None:
    command = [sys.executable, "-m", "tests.gpu.compile_kernels", *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    missing = {case.__name__ for case in FILES if not any(launch.name in done.stdout for launch in case.LAUNCHES)}
    assert not missing, done.stdout
