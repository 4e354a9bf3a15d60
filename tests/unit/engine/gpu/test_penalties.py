import pytest
import torch

from pdserve.core.errors import InternalError
from pdserve.core.types import Sampling
from pdserve.engine.gpu.resample import Penalties
from pdserve.engine.interface import PENDING, Row
from tests.gpu.case_penalties import CASES
from tests.gpu.cases import Case

SAMPLING = Sampling(temperature=0.0, frequency_penalty=1.0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_device_penalties_match_the_cpu(case: Case, device: torch.device) -> None:
    assert case.check(device) <= case.bound


def row(history: list[int], num_pending: int = 0) -> Row:
    return Row(
        tokens=(PENDING,) if num_pending else history[-1:],
        start=len(history) - 1 + num_pending,
        blocks=(),
        sample=SAMPLING,
        history=history,
        prompt_len=1,
        follows=0 if num_pending else None,
    )


def test_a_token_that_the_host_has_not_read_counts(device: torch.device) -> None:
    penalties, text, first = Penalties(4, 1, device), [3, 2], torch.tensor([0], device=device)
    for num_pending, expected in enumerate(([0, 0, -1, 0], [0, -1, -1, 0], [0, -2, -1, 0])):
        logits_SV = torch.zeros(1, 4, device=device)
        slot_P = penalties.apply([row(text, num_pending)], logits_SV, first)
        assert logits_SV[0].tolist() == expected
        penalties.count(slot_P, torch.tensor([1], device=device))


def test_counts_survive_growth_of_the_table(device: torch.device) -> None:
    penalties, text = Penalties(4, 20, device), [3, 2]
    penalties.apply([row(text)], torch.zeros(1, 4, device=device), torch.tensor([0], device=device))
    others = [[3, 1] for _ in range(19)]
    logits_SV = torch.zeros(20, 4, device=device)
    penalties.apply([row(text, 1), *(row(one) for one in others)], logits_SV, torch.arange(20, device=device))
    assert logits_SV[0].tolist() == [0, 0, -1, 0]
    assert logits_SV[19].tolist() == [0, -1, 0, 0]
    with pytest.raises(InternalError, match="was not counted"):
        penalties.apply([row([3, 2], 1)], logits_SV, torch.tensor([0], device=device))
