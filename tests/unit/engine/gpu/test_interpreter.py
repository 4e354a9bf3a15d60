"""Triton's interpreter can be selected after any earlier imports, and leaves no setting behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a CUDA device")
ROOT = Path(__file__).parents[4]
PROBE = """
import os, sys
{before}
from tests.gpu.interpreter import prepare
device = prepare()
assert "TRITON_INTERPRET" not in os.environ
from tests.gpu.case_sampling import CASES
assert all(case.check(device) <= case.bound for case in CASES if case.name == "draw few tokens")
"""


# The easier case is that nothing was imported, as in nearly every process that runs the checks.
@pytest.mark.parametrize(
    "before",
    [
        pytest.param("", id="nothing", marks=pytest.mark.slow),
        pytest.param("import triton, triton.language, triton.experimental.gluon", id="triton"),
    ],
)
def test_the_interpreter_works_after_an_earlier_import(before: str) -> None:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    code = PROBE.format(before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_kernels_imported_too_early_are_named() -> None:
    code = "import pdserve.engine.gpu.kernels.casts\nfrom tests.gpu.interpreter import prepare\nprepare()"
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert "pdserve.engine.gpu.kernels.casts was imported before the interpreter was chosen" in done.stderr
