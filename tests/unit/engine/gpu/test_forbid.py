import pytest
import torch

from tests.gpu.case_forbid import CASES
from tests.gpu.cases import Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_banned_tokens_cannot_be_sampled(case: Case, device: torch.device) -> None:
    assert case.check(device) <= case.bound
