"""The tables of `make mutants` name modules and tests that exist. The command itself is no part of the suite."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.mutants.rooms import OWN, ROOMS, TOO_SLOW, modules, other_tests, own_tests

ROOT = Path(__file__).parents[2]


def test_tables_name_pure_modules() -> None:
    assert set(OWN) <= set(modules(ROOT))


@pytest.mark.parametrize("room", ROOMS)
def test_every_named_test_file_exists(room: str) -> None:
    for module in modules(ROOT):
        for name in (*own_tests(module, room, ROOT), *other_tests(module, room, ROOT)):
            assert (ROOT / name).is_file(), f"{module}: no file {name}"


@pytest.mark.parametrize("test", TOO_SLOW)
def test_left_out_tests_exist(test: str) -> None:
    file, name = test.split("::")
    assert f"def {name}(" in (ROOT / file).read_text()


SURVIVORS = tomllib.loads((ROOT / "tests/mutants/survivors.toml").read_text())["survivor"]


@pytest.mark.parametrize("mutant", [one["mutant"] for one in SURVIVORS])
def test_survivors_name_lines_that_exist(mutant: str) -> None:
    module, definition, _, line, _ = mutant.split(" | ")
    source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
    assert f"def {definition}(" in source
    assert line in map(str.strip, source.split("\n"))
