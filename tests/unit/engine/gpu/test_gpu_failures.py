"""A failed case of the GPU programs says why, and does not take the later cases with it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest
import torch
from triton.compiler.errors import CompilationError

from benchmarks.gpu.failures import TRACES, Cases, chosen, out_folder, reason, told
from tests.gpu import __main__ as checks

ROOT = Path(__file__).parents[4]
pytestmark = pytest.mark.gpu_checks

SOURCE = (
    "def _attend(\n"
    + "".join(f"    argument_with_a_long_name_{number}: tl.constexpr,\n" for number in range(30))
    + "):\n"
)
MESSAGE = "mismatched types in both branches: acc_MD is fp32['16', '128'] and fp32['16', '64']"


def compilation_error(message: str | None) -> CompilationError:
    node = ast.parse(SOURCE + "    acc = tl.dot(q, k)\n").body[0].body[0]  # type: ignore[attr-defined]
    return CompilationError(SOURCE + "    acc = tl.dot(q, k)\n", node, message)


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


CUDA = torch.AcceleratorError if hasattr(torch, "AcceleratorError") else RuntimeError
CUDA_TEXT = (
    "CUDA error: an illegal memory access was encountered\n"
    "Search for `cudaErrorIllegalAddress' in https://docs.nvidia.com/cuda/ for more information.\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
PTXAS_TEXT = (
    "Internal Triton PTX codegen error\n`ptxas` stderr:\nptxas /tmp/x.ptx, line 7; fatal   : Unknown symbol 'wgmma'\n"
    "\nRepro command: /usr/bin/ptxas -lineinfo -v --gpu-name=sm_90a /tmp/x.ptx -o /tmp/x.ptx.o\n"
)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (raised(compilation_error(MESSAGE)), f"CompilationError: {MESSAGE}"),
        # An error of a function that a kernel calls: only its cause has a message.
        (
            raised(compilation_error(None), compilation_error(MESSAGE)),
            f"CompilationError: CompilationError: {MESSAGE}",
        ),
        (raised(RuntimeError(CUDA_TEXT)), "RuntimeError: CUDA error: an illegal memory access was encountered"),
        (raised(RuntimeError(PTXAS_TEXT)), "RuntimeError: ptxas /tmp/x.ptx, line 7; fatal : Unknown symbol 'wgmma'"),
        (raised(AssertionError()), "AssertionError"),
        (raised(ValueError("a | b")), "ValueError: a / b"),
        (raised(RuntimeError("x" * 5000 + " because")), "RuntimeError: "),
    ],
)
def test_the_reason_is_one_line(error: BaseException, expected: str) -> None:
    line = reason(error)
    assert line.startswith(expected)
    assert "\n" not in line
    assert "|" not in line
    assert len(line) < 420
    if isinstance(error, (AssertionError, ValueError)):
        assert f"({Path(__file__).relative_to(ROOT)}:" in line
    if "because" in str(error):
        assert "because" in line


def test_a_realistic_compile_error_has_its_reason_after_the_first_500_characters(tmp_path: Path) -> None:
    """What made the fixed limits useless; the traces have everything."""
    error = raised(compilation_error(None), raised(compilation_error(MESSAGE)))
    text = str(compilation_error(MESSAGE))
    assert MESSAGE not in text[:500]
    assert MESSAGE in told("norms: x", error, tmp_path)
    trace = (tmp_path / TRACES).read_text()
    assert trace.startswith("## norms: x\n")
    assert trace.count(MESSAGE) == 1
    assert "Traceback (most recent call last)" in trace
    assert "in raised" in trace
    told("second", error, tmp_path)
    assert (tmp_path / TRACES).read_text().startswith(trace)


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ("", ["llama float32", "llama, sampling options float32", "llama-tied float32", "qwen3 bfloat16"]),
        ("llama", ["llama float32", "llama, sampling options float32"]),
        ("qwen3,llama-tied", ["llama-tied float32", "qwen3 bfloat16"]),
        ("(?!llama).*", ["qwen3 bfloat16"]),
        (".*float32", ["llama float32", "llama, sampling options float32", "llama-tied float32"]),
    ],
)
def test_cases_are_chosen_by_how_their_names_begin(only: str, expected: list[str]) -> None:
    names = ["llama float32", "llama, sampling options float32", "llama-tied float32", "qwen3 bfloat16"]
    assert chosen(names, only) == expected
    assert chosen(names, only, expected[-1]) == expected[-1:]
    with pytest.raises(ValueError, match="no case begins with"):
        chosen(names, "llama,mixtral")
    with pytest.raises(ValueError, match="no case 'mixtral': there are llama float32"):
        chosen(names, "", "mixtral")


def test_both_processes_of_the_kernels_checks_have_all_cases_between_them() -> None:
    from tests.gpu.all_cases import NAMED_CASES

    commands = [checks.TOGETHER[name] for name in ("kernels", "kernels-1")]
    first, second = (chosen(list(NAMED_CASES), command[command.index("--only") + 1]) for command in commands)
    assert sorted(first + second) == sorted(NAMED_CASES)
    assert first
    assert second


class Lost(Exception):
    """Raised where the process would be replaced."""


def test_only_an_error_that_stays_replaces_the_process() -> None:
    said: list[str] = []
    is_lost = False

    def synchronise() -> None:
        if is_lost:
            raise RuntimeError("an illegal memory access was encountered")

    def restart(start: str, num_failed: int) -> None:
        said.append(f"restart at {start} after {num_failed}")
        raise Lost

    def body(name: str) -> None:
        nonlocal is_lost
        is_lost |= name == "c"
        if name in "bc":
            raise RuntimeError(name)
        said.append(name)

    cases = Cases(["a", "b", "c", "d"], synchronise, restart=restart)

    def run_all() -> None:
        for name in ("a", "b", "not chosen", "c", "d"):
            cases.run(name, partial(body, name), lambda error: said.append(f"failed: {error}"))

    with pytest.raises(Lost):
        run_all()
    assert said == ["a", "failed: b", "failed: c", "restart at d after 2"]
    assert cases.num_failed == 2


STICKY = """
    import torch
    from tests.gpu import check_kernels
    from tests.gpu import all_cases
    from tests.gpu.cases import Case

    is_lost = False

    def synchronise(*_):
        if is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\\nFor debugging consider x")

    def check(name):
        def run(device):
            global is_lost
            synchronise()
            if name == "poison":
                is_lost = True
                synchronise()
            if name == "hangs":
                import subprocess, time
                print("child", subprocess.Popen(["sleep", "600"]).pid, flush=True)
                time.sleep(600)
            if name == "does not compile":
                raise ValueError("types differ")
            return 1.0 if name == "wrong" else 0.0
        return run

    names = ("first", "does not compile", "poison", "wrong", {more} "last")
    cases = {{f"it: {{name}}": Case(name, check(name), 0.5) for name in names}}
    all_cases.NAMED_CASES.clear()
    all_cases.NAMED_CASES.update(cases)
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_name = lambda: "a stand-in"
    torch.cuda.synchronize = synchronise
    check_kernels.CASE_S = {most_s}
    raise SystemExit(check_kernels.main())
"""


def run_sticky(tmp_path: Path, *flags: str, more: str = "", most_s: float = 60.0) -> tuple[int, str]:
    script = tmp_path / "sticky.py"
    script.write_text(textwrap.dedent(STICKY).format(more=more, most_s=most_s))
    command = [sys.executable, str(script), "--errors", "--out", str(tmp_path), *flags]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout + done.stderr


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_checks_go_on_in_a_new_process_after_an_error_that_stays(tmp_path: Path) -> None:
    code, text = run_sticky(tmp_path)
    assert code == 1
    assert "| it: first | 0 | 0.5 |  |" in text
    assert "| it: does not compile | ValueError: types differ (" in text
    assert "| it: poison | RuntimeError: CUDA error: an illegal memory access was encountered" in text
    assert text.count("| it: first") == 1
    assert "| it: wrong | 1 | 0.5 | **wrong** |" in text
    assert "| it: last | 0 | 0.5 |  |" in text
    assert text.rstrip().endswith("3 wrong"), "with those of the first process"
    traces = (tmp_path / TRACES).read_text()
    assert traces.count("Traceback") == 2
    assert "types differ" in traces


def test_a_case_that_hangs_does_not_take_the_later_ones_with_it(tmp_path: Path) -> None:
    """The cases before the one that is named first do not run."""
    code, text = run_sticky(tmp_path, "--from", "it: hangs", more='"hangs",', most_s=2.0)
    assert code == 1
    assert "poison" not in text
    assert "| it: hangs | TimeoutError: ended after 2 s: it hangs" in text
    assert "| it: last | 0 | 0.5 |  |" in text
    [child] = [int(line.split()[1]) for line in text.splitlines() if line.startswith("child")]
    assert not is_running(child), "it would hold the device"
    assert "time.sleep(600)" in (tmp_path / TRACES).read_text()


def test_out_is_the_folder_that_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", "/tmp/comes-back")
    assert out_folder() == Path("/tmp/comes-back")
    monkeypatch.setenv("OUT", "")
    assert out_folder() == Path("gpu-results")
