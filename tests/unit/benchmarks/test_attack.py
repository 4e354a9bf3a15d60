"""Rows of `python -m benchmarks.attack` are found by their modules."""

import pkgutil

import benchmarks.attacks
from benchmarks.attack import rows

PARTS = {"row", "legitimate", "watching"}  # modules of the folder that are no rows


def test_each_module_is_one_row_with_its_own_name() -> None:
    """Several may attack in the manner of one row of the issue, and share its number."""
    found = rows()
    modules = {one.name for one in pkgutil.iter_modules(benchmarks.attacks.__path__)} - PARTS
    assert len(found) == len(modules)
    assert len({row.name for row in found}) == len(found)
    assert [row.number for row in found] == sorted(row.number for row in found)
