import pytest
import torch

from tests.gpu.case_place import CASES
from tests.gpu.cases import Case


@pytest.mark.gpu_checks
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_stored_keys_match_the_cpu(case: Case, device: torch.device) -> None:
    assert case.check(device) <= case.bound
