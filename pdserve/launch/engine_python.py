"""Finds the Python of an engine that needs an environment of its own, and checks it before a process of the cluster
starts.

The check reads the metadata of packages. It does not import vLLM, because that takes many seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pdserve
from pdserve.build import FULL_VERSION
from pdserve.config import without_secrets
from pdserve.core.errors import ConfigError, shortened
from pdserve.core.installation import is_compatible
from pdserve.engine.vllm import PACKAGES, SUPPORTED_RANGE, is_supported
from pdserve.isolated.process import outcome

ENVIRONMENT: Final = ".venv-vllm"  # of the checkout
MAKE_VLLM: Final = f"run `make vllm-env` in the checkout, which makes {ENVIRONMENT}"
ANSWER_S: Final = 30.0  # a Python on a busy machine and a cold disk
_MAX_BYTES: Final = 1 << 16  # of its output; more is not read
#: Runs there, with whatever version of Python it is.
_QUESTION: Final = """
import importlib.metadata, importlib.util, json, sys
found = {"python": sys.version.split()[0], "pdserve": None, "vllm": None, "error": ""}
for name in sys.argv[1:]:
    try:
        found["vllm"] = importlib.metadata.version(name)
        break
    except importlib.metadata.PackageNotFoundError:
        pass
if importlib.util.find_spec("pdserve") is not None:
    try:
        from pdserve.build import FULL_VERSION
        found["pdserve"] = FULL_VERSION
    except Exception as error:
        found["error"] = repr(error)
print("\\n" + json.dumps(found))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Versions in that environment; None if a package is absent. `error`: why its pdserve cannot be imported."""

    python: str
    pdserve: str | None
    vllm: str | None
    error: str


def vllm_python() -> str | None:
    """This Python if it has vLLM, else that of the checkout's environment; None without such an environment."""
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    python = Path(pdserve.__file__).parents[1] / ENVIRONMENT / "bin" / "python"
    return str(python) if os.access(python, os.X_OK) else None


def absolute(python: str) -> str:
    """Of a setting or a flag. A link stays, because it names the environment."""
    return str(Path(python).expanduser().absolute())


def check_python(field: str, python: str, *, is_for_vllm: bool, answer_s: float = ANSWER_S) -> None:
    """Raises ConfigError unless a worker can start with this python. `field`: the setting that gives it."""
    expected = "the python of an environment with pdserve" + (f" and {SUPPORTED_RANGE}" if is_for_vllm else "")
    if not os.access(python, os.X_OK) or Path(python).is_dir():
        raise ConfigError(field, python, f"{expected}; {MAKE_VLLM}")
    answer = ask(python, answer_s)
    trouble = answer if isinstance(answer, str) else _lacks(answer, is_for_vllm=is_for_vllm)
    if trouble:
        is_ours = Path(python).parts[-3:-2] == (ENVIRONMENT,)
        remedy = f"remove {ENVIRONMENT} in the checkout and run `make vllm-env` there" if is_ours else MAKE_VLLM
        raise ConfigError(field, python, f"{expected}; it {trouble}. Give another one, or {remedy}")


def trouble_with(python: str, *, is_for_vllm: bool) -> str:
    """Why a worker cannot start with this python of the host on which it is called; empty if it can."""
    try:
        check_python("worker.engine_python", python, is_for_vllm=is_for_vllm)
    except ConfigError as error:
        return error.message
    return ""


def _lacks(answer: Answer, *, is_for_vllm: bool) -> str:
    """Why a worker cannot run there; empty if it can. Pure."""
    if answer.error:
        return f"is Python {answer.python}, and its pdserve cannot be imported: {answer.error}"
    if answer.pdserve is None:
        return "has no pdserve"
    if not is_compatible(FULL_VERSION, answer.pdserve):
        return f"has pdserve {answer.pdserve}, and this is {FULL_VERSION}"
    if is_for_vllm and answer.vllm is None:
        return "has no vLLM"
    if is_for_vllm and not is_supported(str(answer.vllm)):
        return f"has vLLM {answer.vllm}"
    return ""


def ask(python: str, answer_s: float) -> Answer | str:
    """What `python` has, or why it does not answer."""
    output, trouble = run_there([python, "-c", _QUESTION, *PACKAGES], answer_s)
    names = {one.name for one in dataclasses.fields(Answer)}
    found = json_line(output, names)
    return trouble if found is None else Answer(**{name: found[name] for name in names})


def run_there(command: Sequence[str], answer_s: float) -> tuple[str, str]:
    """Runs a command of another environment, without secrets. Returns its output (stdout and stderr), and the reason
    to report if the output has no answer. Afterwards neither the command nor the processes that it started run."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=without_secrets(os.environ),
            start_new_session=True,
        )
    except OSError as error:
        return "", f"cannot be run: {error.strerror}"
    assert process.stdout is not None
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        _kill(process)

    timer = threading.Timer(answer_s, end)
    timer.start()
    try:
        output = process.stdout.read(_MAX_BYTES).decode(errors="replace")
        status = None if len(output) >= _MAX_BYTES else process.wait()
    finally:
        timer.cancel()
        _kill(process)
        process.wait()
        process.stdout.close()
    if is_late.is_set():
        return output, f"gave no answer within {answer_s:g} s"
    last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "it printed nothing")
    how = f"printed more than {_MAX_BYTES >> 10} KiB" if status is None else outcome(status)
    return output, f"{how}: {shortened(last, 200)}"


def json_line(output: str, needed: Set[str]) -> dict[str, Any] | None:
    """The fields that are strings or null, of the last line that is a JSON object with the `needed` ones. Packages may
    print other lines."""
    for line in reversed(output.splitlines()):
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(line)
            if isinstance(found, dict):
                texts = {name: value for name, value in found.items() if isinstance(value, str | None)}
                if needed <= texts.keys():
                    return texts
    return None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With the processes that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
