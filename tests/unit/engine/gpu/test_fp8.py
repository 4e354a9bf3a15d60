import pytest
import torch

from tests.gpu.case_fp8 import CASES
from tests.gpu.cases import Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_activations_are_rounded_to_a_scale_for_each_token(case: Case, device: torch.device) -> None:
    assert case.check(device) <= case.bound
