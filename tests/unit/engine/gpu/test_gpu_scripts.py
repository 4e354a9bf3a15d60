"""The command files for a borrowed GPU: a part that fails or hangs hides no other, and the end says what to try."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.gpu import floors

ROOT = Path(__file__).parents[4]
pytestmark = pytest.mark.gpu_checks

SCRIPT = """
. scripts/gpu/common.sh "$@"
kernels=0
part right 60 nothing echo fine &
part wrong 60 'PDSERVE_GPU=steps=eager' sh -c 'echo "| a | **wrong** |"; echo "| b | **missed** |"; exit 1' &
part hangs 4 '--only it' sh -c 'echo "begins"; sleep 600 & echo $! >"$OUT/child"; wait' &
wait
part dies 60 'a fix' sh -c 'kill -9 $$'
ENDS=0
part late 60 nothing echo fine
summary here
"""


def run(tmp_path: Path, *parts: str) -> tuple[int, str]:
    environment = {**os.environ, "OUT": str(tmp_path / "out"), "STATE": str(tmp_path), "PYTHON": sys.executable}
    environment.pop("REHEARSE", None)
    command = ["bash", "-c", SCRIPT, "script", *parts]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    return done.returncode, done.stdout + done.stderr


def test_parts_that_fail_hide_no_other(tmp_path: Path) -> None:
    code, text = run(tmp_path)
    assert code == 1
    lines, end = text.split("# What came out of here\n")
    assert "[right] fine\n" in lines
    assert "[wrong] | a | **wrong** |\n" in lines
    assert "[hangs] begins\n" in lines
    assert "green    right," in end
    assert re.search(r"RED      wrong, exit code 1, \d+ s. Try: PDSERVE_GPU=steps=eager\n {11}\| a \| \*\*wrong", end)
    assert "**missed**" not in end
    assert "RED      hangs, over its time" in end
    assert "RED      dies, exit code 137" in end
    assert "skipped  late" in end
    assert (tmp_path / "out/wrong.log").read_text().startswith("| a ")
    child = int((tmp_path / "out/child").read_text())
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()


def test_named_parts_alone_run(tmp_path: Path) -> None:
    code, text = run(tmp_path, "right")
    assert code == 0
    assert "green    right," in text
    assert "wrong" not in text


@pytest.mark.parametrize("name", ["first", "second", "third", "carry", "rehearse", "common"])
def test_the_shell_can_read_every_script(name: str) -> None:
    subprocess.run(["bash", "-n", f"scripts/gpu/{name}.sh"], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("versions", "needed"),
    [
        ({"grpcio": "1.81.1", "protobuf": "6.33.5"}, []),
        ({"grpcio": "1.100.0rc1", "protobuf": "7.36.2"}, []),
        ({"grpcio": "1.81.0", "protobuf": "6.33.5"}, ["grpcio"]),
        ({"grpcio": "1.9.9", "protobuf": "6.33"}, ["grpcio", "protobuf"]),
        ({}, ["grpcio", "protobuf"]),
    ],
)
def test_packages_older_than_the_stubs_are_named(
    versions: dict[str, str],
    needed: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a_pb2_grpc.py").write_text("GRPC_GENERATED_VERSION = '1.81.1'\n")
    (tmp_path / "b_pb2_grpc.py").write_text("GRPC_GENERATED_VERSION = '1.9.0'\n")
    (tmp_path / "a_pb2.py").write_text(
        "Validate(\n    _runtime_version.Domain.PUBLIC,\n    6,\n    33,\n    5,\n    '')\n"
    )
    stubs = floors.floors(tmp_path)
    assert stubs == {"grpcio": (1, 81, 1), "protobuf": (6, 33, 5)}
    monkeypatch.setattr(floors, "floors", lambda: stubs)
    monkeypatch.setattr(floors, "installed", lambda name: versions.get(name, ""))
    monkeypatch.setattr(sys, "argv", ["floors.py"])
    floors.main()
    assert capsys.readouterr().out.split() == needed


def test_the_stubs_name_the_versions_that_they_demand() -> None:
    import grpc

    import pdserve.v1.worker_pb2_grpc as stubs

    found = floors.floors()
    assert found["grpcio"] == floors.numbers(stubs.GRPC_GENERATED_VERSION)
    assert found["protobuf"] >= (6,)
    assert floors.numbers(grpc.__version__) >= found["grpcio"]
