"""Every command with --json prints RFC 8259: never NaN or Infinity."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

import pytest

from pdserve import Client, Slo
from pdserve.cli.main import NAMES, load, main
from tests.unit.cli.test_replay import recorded

HOPELESS: Final = "hopeless"  # A request whose targets cannot be met.
TRACE: Final = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:00:{number:02d}.000,4000,40\n" for number in range(20)
)


def trace(folder: Path) -> str:
    path = folder / "trace.csv"
    path.write_text(TRACE, encoding="utf-8")
    return str(path)


IMPOSSIBLE: Final = ["--slo-ttft", "0.000001", "--slo-tpot", "0.000001"]
ASKED: Final[dict[str, Callable[[str, Path], list[str]]]] = {
    "generate": lambda target, _: ["a prompt", "--max-tokens", "1", "--logprobs", "1", "--target", target],
    "topology": lambda target, _: ["--target", target],
    "explain": lambda target, _: [HOPELESS, "--target", target],
    "replay": lambda _, folder: [str(recorded(folder))],
    "bench": lambda target, _: ["--target", target, "--requests", "2", "--warmup", "0", "--ttft", "1", "--tpot", "1"],
    "simulate": lambda _, folder: ["--trace", trace(folder), *IMPOSSIBLE],
    "plan": lambda _, folder: ["--trace", trace(folder), "--workers", "2", "--jobs", "1", "--rate", "1", *IMPOSSIBLE],
}


def strict(text: str) -> object:
    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def with_json() -> set[str]:
    found = set()
    for name in NAMES:
        parser = argparse.ArgumentParser()
        load(name).add_flags(parser)
        if "--json" in parser._option_string_actions:
            found.add(name)
    return found


def test_every_command_with_json_is_tried() -> None:
    assert with_json() == set(ASKED)


@pytest.mark.parametrize("command", sorted(ASKED))
def test_json_output_is_json(command: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if command == "explain":
        with Client(target) as client:  # Tight enough that a local placement has no time left.
            client.generate(
                "a prompt of some length", max_tokens=4, request_id=HOPELESS, slo=Slo(ttft_s=1e-6, tpot_s=1e-6)
            )
    main([command, *ASKED[command](target, tmp_path), "--json"])
    strict(capsys.readouterr().out)


def test_every_command_uses_the_json_encoder() -> None:
    """`json.dumps` writes NaN; pdserve.core.json_text.to_json does not."""
    root = Path(__file__).parents[3]
    commands = [*root.glob("pdserve/cli/*.py"), *root.glob("simulator/*.py")]
    assert [one.name for one in commands if "json.dump" in one.read_text(encoding="utf-8")] == []
