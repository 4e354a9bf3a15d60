import pytest
import torch

from tests.gpu.case_prepare import CASES
from tests.gpu.cases import Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rows_get_their_tokens_and_tables(case: Case, device: torch.device) -> None:
    assert case.check(device) <= case.bound
