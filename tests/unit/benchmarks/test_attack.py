"""The rows of `python -m benchmarks.attack`."""

from benchmarks.attack import rows


def test_each_row_has_a_number_and_a_name_of_its_own() -> None:
    found = rows()
    assert [row.number for row in found] == sorted({row.number for row in found})
    assert len({row.name for row in found}) == len(found)
