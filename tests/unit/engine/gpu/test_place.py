import pytest
import torch

from tests.gpu.case_place import CASES
from tests.gpu.cases import Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_keys_are_rotated_and_stored_as_the_cpu_stores_them(case: Case, device: torch.device) -> None:
    assert case.check(device) <= case.bound
