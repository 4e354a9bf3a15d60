"""What a process does before it starts, and after SIGHUP."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from pdserve.config import LOG_LEVEL_ENV, SECRETS, GatewayConfig, RouterConfig, WorkerConfig, forget_secrets
from pdserve.config_flags import live_flags, parse_flags, with_file
from pdserve.core.errors import ConfigError
from pdserve.core.setting import live_names
from pdserve.program import USAGE_EXIT_CODE, Reloading, run


class Host:
    """Takes what Reloading gives it."""

    memory = ""

    def __init__(self) -> None:
        self.changes: list[dict[str, Any]] = []

    def start(self) -> str:
        return ""

    def drain(self) -> None: ...

    def stop(self) -> None: ...

    def wait(self, timeout_s: float | None = None) -> bool:
        return True

    def reload(self, changes: Mapping[str, Any]) -> None:
        self.changes.append(dict(changes))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.delenv(LOG_LEVEL_ENV, raising=False)
    before, level = signal.getsignal(signal.SIGHUP), logging.getLogger().level
    path = tmp_path / "router.flags"
    path.touch()
    yield path
    signal.signal(signal.SIGHUP, before)
    logging.getLogger().setLevel(level)


def started(file: Path, *argv: str, kind: Any = RouterConfig) -> Reloading:
    words = ["--model=toy", *argv, f"--flags-file={file}"]
    reloading = Reloading(kind, words, "python -m router")
    words = with_file(words, "python -m router")
    reloading.set_level(words)
    reloading.given = parse_flags(kind, words, "python -m router", {"PDSERVE_TOKEN": "secret-token-of-20"})
    return reloading


def hang_up(reloading: Reloading, host: Host) -> None:
    os.kill(os.getpid(), signal.SIGHUP)
    reloading.follow(host)


def test_live_settings_follow_and_others_are_named(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    host, reloading = Host(), started(file, "--slo-ttft-s=1")
    reloading.follow(host)
    assert host.changes == [], "no signal has come"
    file.write_text("# from a ConfigMap\n\n--slo-ttft-s=3\n--drain-s=7\n--max-queue=5\n--port=9\n--log-level=error\n")
    hang_up(reloading, host)
    assert host.changes == [{"slo_ttft_s": 3.0, "drain_s": 7.0}]
    assert logging.getLogger().level == logging.ERROR
    assert os.environ[LOG_LEVEL_ENV] == "error", "its child processes inherit it"
    info, warning = caplog.records
    assert info.__dict__["changed"] == "drain_s, slo_ttft_s, log_level"
    assert warning.__dict__["settings"] == "max_queue, port"
    caplog.clear()
    file.write_text("--max-queue=5\n--port=9")  # the values of the command line are back
    hang_up(reloading, host)
    assert host.changes[1:] == [{"slo_ttft_s": 1.0, "drain_s": 30.0}]
    assert logging.getLogger().level == logging.INFO
    assert caplog.records[1].__dict__["settings"] == "max_queue, port", "they still wait for the next start"


@pytest.mark.parametrize(
    "text",
    [
        "--slo-ttft-s=-1",
        "--slo-ttft-s=x",
        "--no-such-flag",
        "--log-level=loud",
        "drain_s = 3",
        "--flags-file=/dev/null",
        "--host=0.0.0.0\n--no-insecure\n--router-id=a/b",
        "x" * (2**20 + 1),
        None,
    ],
)
def test_an_invalid_file_changes_nothing(file: Path, text: str | None, caplog: pytest.LogCaptureFixture) -> None:
    host, reloading = Host(), started(file)
    before, level = reloading.given, logging.getLogger().level
    if text is None:
        file.unlink()
    else:
        file.write_text(f"--drain-s=7\n{text}")
    hang_up(reloading, host)
    assert (host.changes, reloading.given, logging.getLogger().level) == ([], before, level)
    [error] = caplog.records
    assert error.levelname == "ERROR"
    assert "settings stay as they are" in error.message


def test_secrets_stay(file: Path) -> None:
    """They were removed from the environment after the start."""
    host = Host()
    reloading = started(file, "--host=0.0.0.0", "--insecure")
    file.write_text("--drain-s=7")
    hang_up(reloading, host)
    assert host.changes == [{"drain_s": 7.0}]


@pytest.mark.parametrize("is_in_variable", [True, False])
def test_a_changed_file_of_a_secret_is_named(
    is_in_variable: bool, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    secret = tmp_path / "token"
    secret.write_text("secret-token-of-20")
    for name in SECRETS:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(f"{name}_FILE", raising=False)
    monkeypatch.setenv("PDSERVE_TOKEN_FILE", str(secret))
    if is_in_variable:  # it takes precedence
        monkeypatch.setenv("PDSERVE_TOKEN", "secret-token-of-20")
    host, reloading = Host(), started(file)
    forget_secrets()
    hang_up(reloading, host)
    assert [one.levelname for one in caplog.records] == ["INFO"]
    caplog.clear()
    secret.write_text("another-token-of-20")
    hang_up(reloading, host)
    named = [one.__dict__["settings"] for one in caplog.records if one.levelname == "WARNING"]
    assert named == ([] if is_in_variable else ["token"])
    assert host.changes == [{}, {}]
    assert "another-token" not in caplog.text


def test_a_secret_whose_file_is_gone_stays(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    secret = tmp_path / "token"
    for name in SECRETS:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(f"{name}_FILE", str(secret))
    host, reloading = Host(), started(file, "--host=0.0.0.0", "--insecure")
    before = reloading.given
    forget_secrets()
    file.write_text("--drain-s=7")
    hang_up(reloading, host)
    assert host.changes == [{"drain_s": 7.0}]
    assert isinstance(before, RouterConfig)
    assert reloading.given == replace(before, drain_s=7.0)
    secrets = {one.metadata["env"] for one in fields(RouterConfig)} - {""}
    warnings = [one for one in caplog.records if one.levelname == "WARNING"]
    assert {one.__dict__["why"].partition(":")[0] for one in warnings} == {f"{name}_FILE" for name in secrets}
    assert len(warnings) == len(secrets)


@pytest.mark.parametrize("kind", [WorkerConfig, RouterConfig, GatewayConfig])
def test_flags_of_live_settings_give_the_same_config(kind: Any) -> None:
    needed = {"model": "m"} if kind is not GatewayConfig else {"router": "r:1"}
    needed |= {"worker_id": "p0"} if kind is WorkerConfig else {}
    other = {"trace_share": 1, "stream_interval_s": 0.05, "workers": ("h:1", "h:2")}
    config = kind(**needed, **{name: other.get(name, 1025) for name in live_names(kind)})
    own = [f"--{name.replace('_', '-')}={value}" for name, value in needed.items()]
    assert parse_flags(kind, [*own, *live_flags(config)], "prog", {}) == config
    assert parse_flags(kind, [*own, *live_flags(config), *live_flags(kind(**needed))], "prog", {}) == kind(**needed)


@pytest.mark.parametrize(
    "words",
    [
        ["--flags-file", "F"],
        ["--flags-file=F"],
        ["--x", "--flags-file=F", "--y=1"],
        ["--flags-file=/none", "--flags-file", "F"],
        ["--flags-file", "/none", "--flags-file=F", "-x", "w"],
    ],
)
def test_flags_of_the_file_come_last(words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "a.flags"
    path.write_text("  --drain-s=1  \n#--drain-s=2\n")
    given = [one.replace("F", str(path)) for one in words]
    assert with_file(given, "prog") == [*given, "--drain-s=1"]


@pytest.mark.parametrize(
    ("words", "error"), [(["--flags-file"], "expected one argument"), (["--log-level=loud"], "invalid choice: 'loud'")]
)
def test_a_wrong_flag_is_one_line(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        with_file(words, "prog")
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"prog: error: argument {words[0].partition('=')[0]}: {error}")


def test_an_absent_file_is_named_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^flags_file: got .*/none, expected a file that can be read"):
        with_file([f"--flags-file={tmp_path / 'none'}"], "prog")


@pytest.mark.parametrize(
    ("host", "token", "is_weak"),
    [("0.0.0.0", "abc", True), ("0.0.0.0", "x" * 15, True), ("0.0.0.0", "x" * 16, False), ("127.0.0.1", "abc", False)],
)
def test_a_token_that_can_be_guessed_is_a_warning_beyond_loopback(
    file: Path,
    host: str,
    token: str,
    is_weak: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(config: RouterConfig) -> Host:
        raise ConfigError("port", 1, "nothing, as this is the end")

    monkeypatch.setattr("pdserve.program.log_to_stderr", lambda name: None)
    monkeypatch.setenv("PDSERVE_TOKEN", token)
    assert run("router", RouterConfig, fail, ["--model=toy", f"--host={host}", "--insecure"]) == USAGE_EXIT_CODE
    found = [one.getMessage() for one in caplog.records if "guessed" in one.getMessage()]
    expected = "PDSERVE_TOKEN can be guessed: use at least 16 characters, such as those of `openssl rand -hex 16`"
    assert found == [expected] * is_weak


@pytest.mark.parametrize("has_vllm", [True, False])
def test_a_process_with_vllm_ends_at_once(has_vllm: bool, tmp_path: Path) -> None:
    """Without Python's own end, at which an exit handler runs. What it has written arrives."""
    (tmp_path / "vllm.py").touch()
    code = (
        "import atexit, logging, sys; from pdserve.program import end; logging.basicConfig()\n"
        f"{'import vllm' if has_vllm else ''}\n"
        "atexit.register(lambda: sys.stderr.write('the long end'))\n"
        "print('written', end=''); logging.warning('logged'); end(3)"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, "written")
    assert "logged" in done.stderr
    assert ("the long end" in done.stderr) is not has_vllm
