import pytest
import torch

from tests.gpu.case_flatten import CASES
from tests.gpu.cases import Case


@pytest.mark.gpu_checks
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rows_of_blocks_become_contiguous(case: Case, device: torch.device) -> None:
    assert case.check(device) <= case.bound
