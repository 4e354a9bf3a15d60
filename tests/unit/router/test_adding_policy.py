"""A new placement policy is one file: settings, commands and the reference page know it without another change."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

POLICY = """
from router.policy.availability import wait_for_decode
from router.policy.interface import Candidate, Choice, Decision, PolicyEntry
from router.policy.two_stage import with_room

def last_worker(request, prefills, decodes, now_s):
    room = with_room(request, decodes, now_s)
    if not room:
        return wait_for_decode(decodes, now_s)
    return Decision(choice=Choice.LOCAL, decode_worker=room[-1].worker_id, reason="the last one")

POLICY = PolicyEntry(make=lambda settings, links: last_worker)
"""

USE = """
from pdserve.cli.main import main
from pdserve.config import RouterConfig
from scripts.reference import settings_page

assert RouterConfig(model="toy", policy="last-worker").policy == "last-worker"
assert "`last-worker`" in settings_page()
assert main(["simulate", "--workload", "short", "--limit", "20", "--policy", "last-worker"]) == 0
"""


def run(program: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """With the router of `cwd`, and everything else of this checkout."""
    environ = os.environ | {"PYTHONPATH": f"{cwd}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environ, timeout=60)


@pytest.mark.parametrize("is_added", [True, False])
def test_a_policy_is_one_file(is_added: bool, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "router", tmp_path / "router", ignore=shutil.ignore_patterns("__pycache__"))
    if is_added:
        (tmp_path / "router/policy/policies/last_worker.py").write_text(POLICY)
    done = run(USE, tmp_path)
    if is_added:
        assert (done.returncode, done.stderr) == (0, "")
        assert "last-worker" in done.stdout
    else:
        assert "policy: got last-worker, expected one of colocated, dynamo, goodput" in done.stderr


def test_names_need_no_import_of_a_policy(tmp_path: Path) -> None:
    program = "import sys, pdserve.config; print([name for name in sys.modules if name.startswith('router.')])"
    assert run(program, tmp_path).stdout == "[]\n"
