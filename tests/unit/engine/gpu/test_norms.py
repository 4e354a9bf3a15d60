import pytest
import torch

from tests.gpu.case_norms import CASES
from tests.gpu.cases import Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_norms_and_gates_match_float64(case: Case, device: torch.device) -> None:
    assert case.check(device) <= case.bound
