"""With only the base dependencies, every command works, or names the extra that it needs in one line."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pdserve.core.errors import ConfigError
from pdserve.core.installation import EXTRAS, command, missing
from tests.support.slow import slow_except

ROOT = Path(__file__).parents[3]
BASE = ("grpcio", "protobuf", "googleapis-common-protos", "typing-extensions")
HINT = "run pip install -c constraints.txt '.[server]' in the folder of the checkout"
#: Modules whose name differs from that of their distribution.
MODULES = {
    "huggingface-hub": "huggingface_hub",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "prometheus-client": "prometheus_client",
    "pydantic-core": "pydantic_core",
    "opentelemetry-sdk": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-grpc": "opentelemetry",
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages that `pip install .` installs, taken from this environment."""
    folder = tmp_path_factory.mktemp("base")
    for name in BASE:
        files = importlib.metadata.files(name) or []
        for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
            source = Path(str(importlib.metadata.distribution(name).locate_file(top)))
            link(source, folder / top)
    return folder


def link(source: Path, target: Path) -> None:
    """Several distributions share the package `google`, so its parts are linked one by one."""
    if source.name != "google":
        target.symlink_to(source)
        return
    target.mkdir(exist_ok=True)
    for part in ("protobuf", "_upb", "api", "rpc", "type", "logging", "longrunning", "cloud", "gapic"):
        if (source / part).exists() and not (target / part).exists():
            (target / part).symlink_to(source / part)


def run(packages: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """-S: only those packages of this environment, and no paths of an editable install."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PDSERVE"))}
    env |= {"PYTHONPATH": os.pathsep.join((str(packages), str(ROOT)))}
    return subprocess.run(
        [sys.executable, "-S", "-m", *words],
        env=env,
        cwd=packages,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_the_environment_has_only_base_dependencies(packages: Path) -> None:
    names = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {re.split("[<>=]", name)[0] for name in names} == set(BASE) - {"typing-extensions"}
    lines = ["missing = []", f"for name in {list(EXTRAS)}:", " try: __import__(name)"]
    lines += [" except ModuleNotFoundError as error: missing.append(error.name)", "print(missing)"]
    done = run(packages, "timeit", "-n1", "-r1", *lines)
    assert done.stdout.splitlines()[0] == str(list(EXTRAS)), done.stderr


@pytest.mark.parametrize("words", [("up",), ("up", "--model", "toy")])
def test_up_names_the_extra(packages: Path, words: tuple[str, ...]) -> None:
    done = run(packages, "pdserve", *words)
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("pdserve up: error: ")
    assert line.endswith(f"expected the extra server: {HINT}")


@pytest.mark.parametrize("words", [(), ("--model", "toy")])
def test_doctor_names_the_missing_extra(packages: Path, words: tuple[str, ...]) -> None:
    done = run(packages, "pdserve", "doctor", *words)
    assert (done.returncode, done.stderr) == (1, "")
    *lines, last = done.stdout.splitlines()
    found = [(line[:4], line[6:].split()[0]) for line in lines]
    assert {"python", "grpcio", "host", "files", "port", "shm", "torch"} <= {name for _, name in found}
    assert ("FAIL", "redis") in found
    assert (("warn" if words else "FAIL"), "torch") in found
    assert (("warn" if words else "FAIL"), "tokenizers") in found
    assert found.count(("ok  ", "model")) == 1, done.stdout
    assert all(found.count(one) == 1 for one in found if one[0] == "FAIL"), "one line for each thing to repair"
    assert all(HINT in line for line in lines if line.startswith("FAIL") and "redis" in line)
    assert last == f"{[mark for mark, _ in found].count('FAIL')} to repair"


@pytest.mark.parametrize("words", [("generate", "hi"), ("chat",), ("topology",), ("explain", "x")])
def test_commands_that_call_a_router_need_no_extra(packages: Path, words: tuple[str, ...]) -> None:
    name, *rest = words
    done = run(packages, "pdserve", name, "--target", "127.0.0.1:1", *rest)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "no server answers at 127.0.0.1:1" in line


def test_simulation_and_plans_need_no_extra(packages: Path) -> None:
    done = run(packages, "pdserve", "simulate", "--limit", "50", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["requests"] > 0
    for words in (("plan", "--help"), ("replay", "--help"), ("simulate", "--help"), ("--version",)):
        assert run(packages, "pdserve", *words).returncode == 0


@pytest.mark.parametrize("role", ["router", "prefill_worker", "decode_worker"])
def test_a_role_lists_its_settings_and_names_the_extra(packages: Path, role: str) -> None:
    """docs/getting-started.md refers to `python -m router --help`."""
    listed = run(packages, role, "--help")
    assert (listed.returncode, listed.stderr) == (0, "")
    flags = ("--model", "toy", "--router-id" if role == "router" else "--worker-id", "a")
    done = run(packages, role, *flags)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(f"expected the extra server: {HINT}")


def test_every_package_of_an_extra_has_its_module() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    expected = {}
    for extra in ("gateway", "server", "ray", "otel", "nixl", "bench", "top", "store"):
        for requirement in extras[extra]:
            name = re.split("[<>=]", requirement)[0]
            if name == "fsspec":  # torch brings it
                continue
            expected[MODULES.get(name, name)] = extra
    assert expected == EXTRAS
    assert command("server") == "pip install -c constraints.txt '.[server]'"
    assert command() == "pip install -c constraints.txt ."


def test_a_missing_module_without_an_extra_is_an_internal_error() -> None:
    assert missing(ModuleNotFoundError("no", name="pdserve.nothing")) is None
    assert missing(ModuleNotFoundError("no")) is None
    error = missing(ModuleNotFoundError("no", name="redis.asyncio"))
    assert isinstance(error, ConfigError)
    assert error.field == "redis"


#: Runs `pdserve` as on Windows, whose Python lacks these modules, or on macOS.
ELSEWHERE = """
import sys
platform, *words = sys.argv[1:]
if platform == "win32":
    sys.modules.update(dict.fromkeys(("resource", "fcntl", "termios", "pwd", "grp")))
from pdserve.cli.main import main
import grpc, shutil  # the standard library would look for modules of the other system
sys.platform = platform
sys.exit(main(words))
"""


@pytest.mark.parametrize("platform", slow_except(["win32", "darwin"], "win32"))
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["up"], "platform: got {}, expected linux: on another system run the server in a container"),
        (["serve", "toy"], "platform: got {}, expected linux"),
        (["doctor"], "platform: got {}, expected linux"),
        (["rank", "127.0.0.1:1"], "platform: got {}, expected linux"),
        (["topology", "--target", "127.0.0.1:1", "--timeout", "1"], "no server answers at 127.0.0.1:1"),
        (["generate", "x", "--target", "127.0.0.1:1", "--timeout", "1"], "no server answers at 127.0.0.1:1"),
    ],
)
def test_on_another_system_servers_are_refused_and_clients_work(platform: str, words: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, platform, *words], capture_output=True, text=True, check=False, cwd=ROOT
    )
    [line] = done.stderr.splitlines()
    assert line.startswith(f"pdserve {words[0]}: error: ")
    assert said.format(platform) in line
