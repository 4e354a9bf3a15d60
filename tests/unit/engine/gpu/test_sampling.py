import pytest
import torch

from tests.gpu.case_sampling import CASES
from tests.gpu.cases import Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_device_draws_the_token_that_the_cpu_draws(case: Case, device: torch.device) -> None:
    assert case.check(device) <= case.bound
