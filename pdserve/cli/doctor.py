"""`pdserve doctor`: checks whether this host can run a cluster. Prints one line per check, with advice."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pdserve.build import FULL_VERSION
from pdserve.cli.up import SERVE_PORT
from pdserve.core.errors import ConfigError, ModelError, PdserveError
from pdserve.core.installation import (
    EXTRAS,
    CheckResult,
    Level,
    advice,
    check_platform,
    is_compatible,
    mismatch,
    missing,
)
from pdserve.core.setting import AUTO
from pdserve.engine.load_engine import BUILT_IN, OURS, VLLM, engine_name, read_mock, registered
from pdserve.engine.memory.host import free_bytes, usable_cores
from pdserve.image_check import compiler_is_there, cuda_of_torch, cuda_versions_agree, cupy_is_there
from pdserve.model_source import TOY, TOY_MODELS, find_model, model_name

if TYPE_CHECKING:
    from pdserve.text.tokenizer import Tokenizer

HELP = "check whether this host can run a cluster"
_MARKS: Final[dict[Level, str]] = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}
_HOST: Final = "127.0.0.1"
_FILES_WANTED: Final = 1024
_MEMORY_WANTED_GIB: Final = 2
_VLLM_S: Final = 180  # until vLLM's environment has answered: importing vLLM from a cold disk takes a minute
_FOR_GPUS: Final = "for the GPUs of this host remove .venv-vllm, and run `make vllm-env VLLM='vllm>=0.32,<0.33'`"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="MODEL", help="model to check, as for up; the bundled model when absent")
    parser.add_argument("--engine", metavar="ENGINE", default=AUTO, help="engine to check, as for up (auto)")
    parser.add_argument(
        "--engine-python", metavar="FILE", help="python with vLLM to check, as worker.engine_python; found when absent"
    )
    parser.add_argument("--skip-pairs", action="store_true", help="do not measure KV transfers between two processes")
    parser.add_argument("--port", type=int, default=50051, help="gRPC port to check (50051)")
    parser.add_argument(
        "--http", type=int, default=SERVE_PORT, metavar="PORT", help=f"HTTP port to check ({SERVE_PORT})"
    )


def run(args: argparse.Namespace) -> int:
    check_platform(sys.platform)
    from kvtransfer.checks import pairs, shared_memory

    checks: list[Callable[[], Iterator[CheckResult]]] = [
        _python,
        lambda: _packages(args.model),
        _memory,
        _limits,
        lambda: _port("port", args.port),
        lambda: _port("http", args.http),
        shared_memory,
        _redis,
        lambda: _torch(args.model),
        lambda: _engine(args.engine, args.model, args.engine_python),
        lambda: _model(args.engine, args.model),
        *(() if args.skip_pairs else (pairs,)),
    ]
    findings: list[CheckResult] = []
    for check in checks:
        for finding in _found(check):
            if any(known.level == "fail" and known.name == finding.name for known in findings):
                continue  # one thing to repair
            findings.append(finding)
            print(line(finding), flush=True)
    worst = [finding for finding in findings if finding.level == "fail"]
    print(f"{len(worst)} to repair" if worst else "this host can run a cluster")
    return 1 if worst else 0


def _found(check: Callable[[], Iterator[CheckResult]]) -> Iterator[CheckResult]:
    """The findings of a check. If a package that the check needs is missing, that is also a finding."""
    try:
        yield from check()
    except ModuleNotFoundError as error:
        if (absent := missing(error)) is None:
            raise
        yield CheckResult("fail", absent.field, "needed, and not installed", advice(EXTRAS[absent.field]))


def line(finding: CheckResult) -> str:
    advice = f"; {finding.advice}" if finding.advice else ""
    return f"{_MARKS[finding.level]}  {finding.name:<17} {finding.text}{advice}"


def _python() -> Iterator[CheckResult]:
    yield CheckResult("ok", "pdserve", FULL_VERSION)
    yield CheckResult("ok", "python", f"{platform.python_version()} on {platform.machine()}")


_PACKAGES: Final[tuple[tuple[str, Level, str], ...]] = (  # distribution, level if it is missing, advice
    ("grpcio", "fail", advice("")),
    ("protobuf", "fail", advice("")),
    ("tokenizers", "fail", advice("server")),
    ("redis", "fail", advice("server")),
    ("grpcio-health-checking", "fail", advice("server")),
    ("xxhash", "warn", advice("server")),
    ("ray", "warn", f"needed by up --ray alone: {advice('ray')}"),
    ("opentelemetry-sdk", "warn", f"needed by --otlp alone: {advice('otel')}"),
)
_NOT_FOR_TOYS: Final = ("tokenizers",)


def _packages(model: str | None) -> Iterator[CheckResult]:
    for name, level, text in _PACKAGES:
        try:
            yield CheckResult("ok", name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            is_needed = model not in TOY_MODELS or name not in _NOT_FOR_TOYS
            yield CheckResult(level if is_needed else "warn", name, "not installed", text)


def _memory() -> Iterator[CheckResult]:
    cores, num_bytes = f"{usable_cores()} cores", free_bytes()
    if num_bytes is None:
        yield CheckResult("warn", "host", f"{cores}, unknown memory", f"a cluster needs {_MEMORY_WANTED_GIB} GiB")
    elif (free_gib := num_bytes / 2**30) < _MEMORY_WANTED_GIB:
        advice = f"free some memory, or raise the container's limit, to {_MEMORY_WANTED_GIB} GiB or more"
        yield CheckResult("warn", "host", f"{cores}, {free_gib:.1f} GiB available", advice)
    else:
        yield CheckResult("ok", "host", f"{cores}, {free_gib:.1f} GiB available")


def _limits() -> Iterator[CheckResult]:
    import resource  # which Windows lacks

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < _FILES_WANTED:
        yield CheckResult("warn", "files", f"{files} open files allowed", f"ulimit -n {_FILES_WANTED} or more")
    else:
        yield CheckResult("ok", "files", f"{files} open files allowed")


def _port(flag: str, port: int) -> Iterator[CheckResult]:
    from pdserve.launch.ports import is_free, user_of_port

    if is_free(_HOST, port):
        yield CheckResult("ok", flag, f"{port} is free")
    else:
        text = f"{port} is in use: {user_of_port(_HOST, port)}"
        yield CheckResult("warn", flag, text, f"choose another one with --{flag}; 0 picks a free one")


def _redis() -> Iterator[CheckResult]:
    from pdserve.prefix.embedded import server_binary

    try:
        binary = server_binary()
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (PdserveError, OSError, subprocess.SubprocessError) as error:
        yield CheckResult("warn", "redis-server", f"no server binary ({error})", "give up --redis URL")
    else:
        version = next((word[2:] for word in done.stdout.split() if word.startswith("v=")), "?")
        yield CheckResult("ok", "redis-server", f"{version}, {binary}")


def _torch(model: str | None) -> Iterator[CheckResult]:
    if importlib.util.find_spec("torch") is None:
        level: Level = "warn" if model in TOY_MODELS else "fail"
        yield CheckResult(level, "torch", "not installed", f"{advice('server')}; without it only --model toy runs")
        return
    yield from _complaints("cuda", "fail" if cuda_of_torch() else "warn", cuda_versions_agree)
    try:
        import torch
    except (ImportError, OSError) as error:
        yield CheckResult("fail", "torch", f"cannot be imported ({error})", "install it again")
        return
    yield CheckResult("ok", "torch", torch.__version__)
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            yield CheckResult("ok", f"gpu {index}", f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB")
        yield from _gpu_parts()
    else:
        yield CheckResult("ok", "gpu", "none; the CPU serves")


def _gpu_parts() -> Iterator[CheckResult]:
    """What a GPU worker needs besides torch: a C compiler builds the code that launches kernels."""
    checks: tuple[tuple[str, Level, Callable[[], Iterator[str]]], ...] = (
        ("compiler", "fail", compiler_is_there),
        ("cupy", "warn", cupy_is_there),
    )
    for name, level, check in checks:
        complaints = list(_complaints(name, level, check))
        yield from complaints or [CheckResult("ok", name, "found")]


def _complaints(name: str, level: Level, check: Callable[[], Iterator[str]]) -> Iterator[CheckResult]:
    for complaint in check():
        text, _, repair = complaint.partition("; ")
        yield CheckResult(level, name, text, repair)


def _chosen(asked: str, model: str | None) -> tuple[str, Path | None, ModelError | None]:
    """The engine of the model, the model's folder, and why `auto` takes vLLM for it, as `up` chooses. There is no
    folder for a toy, nor for a model that `_model` rejects."""
    from pdserve.launch.settings import bundled_model, served_by_vllm_only

    folder, unknown = None, None
    if model not in TOY_MODELS:
        with contextlib.suppress(PdserveError):
            folder = Path(find_model(model, has_weights=asked != TOY)) if model else bundled_model()
            unknown = served_by_vllm_only(folder) if asked == AUTO else None
    return VLLM if unknown else engine_name(asked, model or ""), folder, unknown


def _engine(asked: str, model: str | None, python: str | None) -> Iterator[CheckResult]:
    """Names the engine of the model, and the vLLM of this host."""
    from pdserve.launch.engine_python import MAKE_VLLM, absolute, vllm_python
    from pdserve.launch.settings import without_vllm

    engine, folder, unknown = _chosen(asked, model)
    python = absolute(python) if python else vllm_python()
    try:
        if unknown is not None and python is None:
            raise without_vllm(unknown)
        if engine not in BUILT_IN:
            registered(engine)
        if engine in ("torch", VLLM) and model in TOY_MODELS:
            raise ConfigError("engine", engine, f"auto or toy: the model {model} has no weights")
    except PdserveError as error:
        yield CheckResult("fail", "engine", str(error))
        return
    if asked != AUTO:
        reason = "as asked"
    elif unknown is not None:
        seen = str(unknown.seen).strip("[]'")
        if not unknown.field.endswith("architectures"):
            seen = f"{unknown.field} {seen}"
        reason = f"chosen by auto: our own engine does not know {seen}"
    else:
        reason = "our own, chosen by auto"
    yield CheckResult("ok", "engine", f"{engine}, {reason}")
    if python is not None:
        yield from _vllm(python, str(folder) if folder and engine == VLLM else "", is_needed=engine == VLLM)
    elif engine == VLLM:
        yield CheckResult("fail", "vllm", "not installed", MAKE_VLLM)
    else:
        yield CheckResult("warn", "vllm", "not installed", f"for models that our own engine does not know: {MAKE_VLLM}")


def _vllm(python: str, folder: str, *, is_needed: bool) -> Iterator[CheckResult]:
    """Asks vLLM's environment, in which pdserve describes it. `folder`: of a model that vLLM shall serve."""
    from pdserve.launch.engine_python import MAKE_VLLM, json_line, run_there
    from pdserve.launch.settings import visible_gpus

    level: Level = "fail" if is_needed else "warn"
    output, trouble = run_there([python, "-m", "pdserve.engine.vllm.checks", folder], _VLLM_S)
    found = json_line(output, {"pdserve", "vllm", "build"}) or json_line(output, {"pdserve", "error"})
    if found is None:
        yield CheckResult(level, "vllm", f"{python} {trouble}", MAKE_VLLM)
        return
    if not is_compatible(FULL_VERSION, release := str(found["pdserve"])):
        yield CheckResult(level, "vllm", f"{python}: {mismatch(FULL_VERSION, release)}", MAKE_VLLM)
    elif "build" not in found or found.get("about") == "vllm":
        yield CheckResult(level, "vllm", f"{found['error']}; {python}")
    else:
        text = f"{found['vllm']}, built for {found['build']}, {python}"
        if found["build"] == "CPUs" and visible_gpus():
            yield CheckResult("warn", "vllm", text, _FOR_GPUS)
        else:
            yield CheckResult("ok", "vllm", text)
    if found.get("about") == "model":
        yield CheckResult("fail", "model", found["error"], "give another folder with --model")


def _encoded(text: str, tokenizer: Tokenizer, folder: Path) -> list[int]:
    """Raises ModelError."""
    if tokenizer.is_linear:
        return tokenizer.encode(text, has_special_tokens=False)
    from pdserve.text.child import ids_of, load_message, to_bytes
    from pdserve.text.template_facts import ask_once

    message = {
        "do": "text",
        "text": to_bytes(text),
        "has_special_tokens": False,
        "cpu_s": 1.0,
        "wall_s": 10.0,
        "more_bytes": 0,
    }
    answer = ask_once(load_message(None, folder=str(folder)), message)[1]
    if "ids" not in answer:
        raise ModelError("tokenizer.json", "patterns without an end", "patterns that end within 1 s on a short text")
    return ids_of(answer["ids"])


def _model(engine: str, asked: str | None) -> Iterator[CheckResult]:
    from pdserve.engine.load.checkpoint_files import ALL_BITS, OWN_BITS, check_sizes, open_checkpoint
    from pdserve.engine.model.config import read_config
    from pdserve.launch.report import size_text
    from pdserve.launch.settings import bundled_model

    if asked in TOY_MODELS:
        yield CheckResult("ok", "model", f"{asked}: made up, without weights or tokenizer")
        return
    is_mock = engine == TOY
    try:
        folder = Path(find_model(asked, has_weights=not is_mock)) if asked else bundled_model()
        if is_mock:
            mock, context_tokens = read_mock(str(folder))
            yield CheckResult("ok", "model", f"{mock.name}: a mock without weights, {context_tokens} tokens of context")
            yield from _tokenizer(folder)
            return
        config = read_config(folder) if _chosen(engine, asked)[0] in OURS else None  # others read it themselves
        checkpoint = open_checkpoint(folder, ALL_BITS if config is None else OWN_BITS)
        if config is not None:
            check_sizes(config, checkpoint.tensors)
        size = sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
        yield CheckResult(
            "ok", "model", f"{model_name(str(folder))}: {len(checkpoint.tensors)} tensors, {size_text(size)}"
        )
        yield from _tokenizer(folder)
    except PdserveError as error:
        yield CheckResult("fail", "model", str(error), "repair the folder, or give another one with --model")


def _tokenizer(folder: Path) -> Iterator[CheckResult]:
    """Raises ModelError."""
    from pdserve.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(folder))
    text = "def f(x):\n    return x"
    ids = _encoded(text, tokenizer, folder)
    if tokenizer.decode(ids) == text:
        yield CheckResult("ok", "tokenizer", f"{tokenizer.vocab_size} tokens; text comes back as it went in")
    else:
        yield CheckResult("warn", "tokenizer", "text does not come back as it went in", "look at its normalizer")
