import pytest
import torch

from tests.gpu.case_products import CASES
from tests.gpu.cases import Case

pytestmark = pytest.mark.gpu_checks


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_products_of_few_rows_match_float64(case: Case, device: torch.device) -> None:
    assert case.check(device) <= case.bound
