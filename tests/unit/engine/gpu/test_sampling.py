import pytest
import torch

from tests.gpu.case_sampling import CASES
from tests.gpu.cases import Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_device_and_cpu_sample_the_same_token(case: Case, device: torch.device) -> None:
    assert case.check(device) <= case.bound
