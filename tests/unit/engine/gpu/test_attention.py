import pytest
import torch

from pdserve.engine.gpu.splits import MOST_SPLITS, num_splits
from tests.gpu.case_attention import CASES, LONG
from tests.gpu.cases import Case


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=pytest.mark.slow if case.name == LONG.name() else ()) for case in CASES],
)
def test_attention_over_parts_is_that_of_float64(case: Case, device: torch.device) -> None:
    assert case.check(device) <= case.bound


@pytest.mark.parametrize(
    ("num_rows", "context", "expected"),
    [(1, 1024, 8), (1, 131_072, 32), (8, 8192, 4), (64, 8192, 1), (256, 8192, 1), (1, 64, 1), (0, 131_072, 64)],
)
def test_few_rows_are_split_until_the_device_is_full(num_rows: int, context: int, expected: int) -> None:
    assert num_splits(num_rows, 8, 132, context) == expected
    assert expected <= MOST_SPLITS
