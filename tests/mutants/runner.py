"""Runs tests against a copy of the tree in which one file is changed. The tree itself is never written.

This process has the libraries loaded and forks for every run, which saves the seconds that they take to load.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

CPU_S = 120  # of one run of some test files; a mutant that takes longer loops for ever
WALL_S = 1800.0  # the same on a machine that is busy with other things
TEST_S = 150  # of one test; the slowest takes some seconds
DATA_BYTES = 12 << 30
LOADED = (
    "pytest",
    "hypothesis",
    "xdist",
    "pytest_asyncio",
    "pytest_timeout",
    "numpy",
    "torch",
    "grpc",
    "google.protobuf",
)
OURS = ("tests", "benchmarks", "pdserve", "router", "prefill_worker", "decode_worker", "kvtransfer", "simulator")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    passed: bool
    how: str  # the test that failed first, or why there is none
    wall_s: float


class Copy:
    """A copy of the files that git knows or would take, at `at`."""

    def __init__(self, root: Path, at: Path) -> None:
        self.at = at
        shutil.rmtree(at, ignore_errors=True)
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            capture_output=True,
            check=True,
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (root / name).is_file():
                (at / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, at / name)

    @contextlib.contextmanager
    def changed(self, path: str, code: str) -> Iterator[None]:
        file = self.at / path
        original = file.read_text()
        try:
            self._write(file, code)
            yield
        finally:
            self._write(file, original)

    @staticmethod
    def _write(file: Path, code: str) -> None:
        file.write_text(code)
        for stale in (file.parent / "__pycache__").glob(f"{file.stem}.*"):  # of the same second and size, perhaps
            stale.unlink()


def load_libraries() -> None:
    """Called before the first run. Hypothesis draws the same examples in every run, and does not shrink failures."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in LOADED:
        importlib.import_module(name)
    from hypothesis import Phase, settings

    settings.register_profile(
        "mutants", derandomize=True, database=None, deadline=None, phases=(Phase.explicit, Phase.generate)
    )
    settings.load_profile("mutants")


def run(copy: Copy, tests: Sequence[str], left_out: Sequence[str], log: Path, *, cpu_s: int) -> Ran:
    started_s = time.monotonic()
    args = [
        "-x",
        "-q",
        "-m",
        "not slow",
        "-rfE",
        "--tb=line",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        f"--timeout={TEST_S}",
    ]
    args += [f"--deselect={one}" for one in left_out]
    pid = os.fork()
    if pid == 0:
        _test(copy, [*args, *tests], log, cpu_s)
    code = _wait(pid, started_s + WALL_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # processes that the tests have left running
    wall_s = time.monotonic() - started_s
    if code is None or code < 0:
        return Ran(passed=False, how="out of time or memory", wall_s=wall_s)
    output = log.read_text(errors="replace")
    if code == 5:
        raise SystemExit(f"no test was run:\n{output}")
    failed = [line.split(" - ")[0] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return Ran(passed=code == 0, how=failed[0] if failed else f"pytest ended with {code}", wall_s=wall_s)


def _wait(pid: int, until_s: float) -> int | None:
    """The exit code, negative for a signal; None if the time is up, and the process is ended."""
    while time.monotonic() < until_s:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _test(copy: Copy, args: list[str], log: Path, cpu_s: int) -> None:
    """In the child: the tests of the copy, with the modules of the copy. Does not return."""
    code = 3
    try:
        os.setsid()
        with log.open("wb") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
        os.chdir(copy.at)
        os.environ["PYTHONPATH"] = str(copy.at)
        root = str(Path(__file__).parents[2])
        sys.path[:] = [str(copy.at), *(one for one in sys.path if one not in ("", root))]
        for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
            del sys.modules[name]
        importlib.invalidate_caches()
        import pytest

        code = int(pytest.main(args))
        sys.stdout.flush()
        strays = [
            name
            for name, one in sys.modules.items()
            if name.split(".")[0] in OURS
            and not str(getattr(one, "__file__", None) or copy.at).startswith(str(copy.at))
        ]
        if strays:
            print("imported from elsewhere than the copy:", *strays)
            code = 5
    except BaseException as failure:
        print(repr(failure), flush=True)
    finally:
        sys.stdout.flush()
        os._exit(code)
