"""Checks an installation before its first request; the build of the image runs it.

    python -m pdserve.image_check [--gpu] [--vllm]

Imports every module, except those of extras that are not installed. --gpu also checks that torch, CuPy and NCCL are
built for the same CUDA, CuPy and NCCL's binding, a C compiler with the headers for Triton's launchers, and compiles one
kernel for sm_90. No GPU and no driver is needed. --vllm also checks vLLM, and the programs and libraries that it needs.
If something is missing, prints one line each on stderr and exits with status 1.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from pdserve.core.installation import advice, command, missing

#: Distributions for one major version of CUDA, which their name contains. Those of a kind own the same files.
_FOR_ONE_CUDA: Final = (re.compile(r"cupy-cuda(\d+)x"), re.compile(r"nvidia-nccl-cu(\d+)"))
_EXTRAS: Final = {"12": "cuda12", "13": "cuda13"}  # by major version
PACKAGES: Final = ("pdserve", "router", "prefill_worker", "decode_worker", "kvtransfer", "simulator")
_PROGRAM: Final = "__main__"
_LAUNCHER: Final = '#include <Python.h>\n#include "cuda.h"\nint pdserve_check(void) { return CUDA_VERSION > 0; }\n'
Checks = Sequence[Callable[[], Iterator[str]]]


def main(argv: Sequence[str]) -> int:
    gpu_checks: Checks = (cuda_versions_agree, cupy_is_there, compiler_is_there, a_kernel_compiles)
    vllm_checks: Checks = (vllm_serves,)
    checks: Checks = (
        everything_imports,
        *(gpu_checks if "--gpu" in argv else ()),
        *(vllm_checks if "--vllm" in argv else ()),
    )
    complaints = [complaint for check in checks for complaint in check()]
    for complaint in complaints:
        sys.stderr.write(f"image check: {complaint}\n")
    return int(bool(complaints))


def everything_imports(packages: Sequence[str] = PACKAGES) -> Iterator[str]:
    for package in packages:
        try:
            root = importlib.import_module(package)
        except ImportError as error:
            yield f"{package} cannot be imported: {error}"
            continue
        for found in pkgutil.walk_packages(root.__path__, f"{package}.", onerror=lambda name: None):
            if found.name.rpartition(".")[2] == _PROGRAM:
                continue
            try:
                importlib.import_module(found.name)
            except ModuleNotFoundError as error:
                if missing(error) is None and not _is_of_others(error):  # the rest needs an extra that is not installed
                    yield f"{found.name} cannot be imported: {error}"
            except (ImportError, OSError, RuntimeError) as error:
                yield f"{found.name} cannot be imported: {error}"


def cuda_versions_agree() -> Iterator[str]:
    """Compares the CUDA of torch with that of the installed distributions of CuPy and NCCL. torch is not imported,
    because it may fail to load the NCCL of another CUDA."""
    if _folder_of("torch") is None:
        return
    cuda, names = cuda_of_torch(), _distributions()
    kinds = [{name: match[1] for name in names if (match := one.fullmatch(name))} for one in _FOR_ONE_CUDA]
    wrong = [name for found in kinds for name, version in found.items() if version != cuda]
    if not wrong:
        return
    text = f"torch is built {f'for CUDA {cuda}' if cuda else 'without CUDA'}, beside {' and '.join(wrong)}"
    if cuda not in _EXTRAS:
        yield f"{text}; install a build of torch for CUDA {' or '.join(_EXTRAS)}"
        return
    removed = [name for found in kinds if found.keys() & set(wrong) for name in found]
    if len(removed) > len(wrong):
        text += ", which may have replaced files of the right one"
    yield f"{text}; run pip uninstall -y {' '.join(removed)} && {command(_EXTRAS[cuda])} in the folder of the checkout"


def cuda_of_torch() -> str | None:
    """The major version, read from torch's files; None if torch is missing, or built without CUDA."""
    folder = _folder_of("torch")
    if folder is None or not (folder / "version.py").is_file():
        return None
    match = re.search(r"^cuda\b.*= *['\"](\d+)", (folder / "version.py").read_text(), re.MULTILINE)
    return None if match is None else match[1]


def cuda_extra() -> str:
    """The extra with CuPy, NCCL and Triton for the installed torch."""
    return _EXTRAS.get(cuda_of_torch() or "", "cuda13")


def cupy_is_there() -> Iterator[str]:
    try:
        importlib.import_module("cupy")
        nccl = importlib.import_module("cupy.cuda.nccl")
    except (ImportError, OSError) as error:
        yield f"cupy cannot be imported ({error}): NCCL transfers need it; {advice(cuda_extra())}"
        return
    if not hasattr(nccl, "get_unique_id"):  # without NCCL, CuPy has an empty module, with a warning
        yield f"CuPy finds no NCCL library (libnccl.so.2); {advice(cuda_extra())}"


def compiler_is_there() -> Iterator[str]:
    """Finds a compiler like Triton (runtime/build.py), with Python's headers and CUDA's headers from Triton's wheel."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        yield "no C compiler: Triton builds a launcher for each kernel; install gcc and libc6-dev, or set CC"
        return
    headers = [sysconfig.get_paths()["include"]]
    if (triton := _folder_of("triton")) is not None:
        headers.append(str(triton / "backends/nvidia/include"))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "launcher.c"
        source.write_text(_LAUNCHER)
        command = [compiler, str(source), "-shared", "-fPIC", "-o", f"{folder}/launcher.so"]
        try:
            done = subprocess.run([*command, *(f"-I{one}" for one in headers)], capture_output=True, text=True)
        except OSError as error:
            yield f"the C compiler {compiler} does not run: {error}"
            return
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit code {done.returncode}"]
        yield f"{compiler} builds no launcher: {lines[0]}"


def a_kernel_compiles() -> Iterator[str]:
    """Compiles from Python to machine code, without a device."""
    try:
        import torch
        import triton
        from triton.backends.compiler import GPUTarget

        from pdserve.engine.gpu import resample
    except (ImportError, OSError) as error:
        yield f"Triton cannot be imported ({error}): {advice(cuda_extra())}"
        return

    class NoDevice:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

    triton.runtime.driver.set_active(NoDevice())
    logits, words = torch.empty(1, 128, device="meta"), torch.empty(1, 4, dtype=torch.int32, device="meta")
    row = torch.empty(1, dtype=torch.int64, device="meta")
    try:
        kernel: Any = resample._forbid
        kernel.warmup(logits, words, row, 128, 4, 128, BLOCK=128, grid=(1, 1))
    except Exception as error:  # any error of a compiler and its assembler
        yield f"no kernel compiles for sm_90: {type(error).__name__}: {error}"


def vllm_serves() -> Iterator[str]:
    """Runs the checks before a start of the engine vllm, for the bundled model. No weights are read."""
    from pdserve.engine.vllm.checks import describe
    from pdserve.launch.settings import bundled_model

    try:
        found = describe(str(bundled_model()))
    except (ImportError, OSError, RuntimeError) as error:
        yield f"vLLM cannot be imported: {error}"
        return
    if "error" in found:
        yield f"vLLM cannot serve here: {found['error']}"


def _distributions() -> list[str]:
    """The normalised names of all that are installed."""
    names = (one.metadata["Name"] for one in importlib.metadata.distributions())
    return sorted({re.sub(r"[-_.]+", "-", name).lower() for name in names if name})


def _is_of_others(error: ModuleNotFoundError) -> bool:
    """A package that only images for GPUs, or only the one with vLLM's engine, have."""
    return (error.name or "").partition(".")[0] in ("triton", "vllm")


def _folder_of(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
