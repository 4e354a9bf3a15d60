"""`make demo` prints answers and timelines."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_demo_prints_four_answers_with_timelines() -> None:
    done = subprocess.run(
        [sys.executable, "examples/demo.py"], capture_output=True, text=True, cwd=ROOT, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^ +decode +[\d.]+ ", done.stdout, re.MULTILINE)) == 4
    # The router chooses local or remote by prediction, which depends on how busy the machine is.
    assert done.stdout.count("local on d0:") + done.stdout.count("remote on p0 → d0:") == 4
    assert "topology" in done.stdout
    answers = done.stdout.partition("shown one after the other\n")[2].partition("why request 2")[0]
    third, _, fourth = answers.partition("\n4\n")
    assert third.startswith("\n3\n│ ")
    assert fourth.startswith("│ ")
    for answer in (third, fourth):
        assert len(re.findall(r"^  (?:local|remote) on ", answer, re.MULTILINE)) == 1, "its text, then its times"
    page, _, heading = done.stdout.splitlines()[-1].removeprefix("what the rows mean: ").partition("#")
    assert f"## {heading}" in (ROOT / page).read_text(encoding="utf-8").lower().splitlines()
