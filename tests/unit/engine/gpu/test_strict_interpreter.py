"""The strict interpreter, which checks the kernels, finds errors that the plain one misses."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.faulty_kernels import add_before, copy
from tests.gpu.strict_interpreter import strict_interpreter

pytestmark = [
    pytest.mark.gpu_checks,
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the CUDA device"),
]


@pytest.mark.parametrize(
    ("loads", "stores", "kind"), [(True, True, None), (False, True, "a load"), (True, False, "a store")]
)
def test_access_stays_inside_tensors(loads: bool, stores: bool, kind: str | None) -> None:
    # Both are in the middle of other memory, so a plain interpreter would silently access it.
    memory = torch.zeros(1000)
    source, target = (torch.frombuffer(memory.numpy()[at : at + 100], dtype=torch.float32) for at in (100, 300))
    source.fill_(1.0)
    with strict_interpreter():
        if kind is None:
            copy[(2,)](source, target, 100, BLOCK=64, MASK_LOADS=loads, MASK_STORES=stores)
            assert target.equal(source)
            return
        with pytest.raises(Exception, match=kind):
            copy[(2,)](source, target, 100, BLOCK=64, MASK_LOADS=loads, MASK_STORES=stores)


def test_fresh_memory_is_poisoned() -> None:
    with strict_interpreter():
        assert torch.empty(100).isnan().all()
        assert torch.empty(100, dtype=torch.int32).eq(torch.iinfo(torch.int32).max).all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_strict_interpreter_shuffles_programs() -> None:
    def run(seed: int) -> list[float]:
        values = torch.ones(16, 4)
        with strict_interpreter(seed):
            add_before[(16,)](values, BLOCK=4)
        return values[:, 0].tolist()

    assert len({tuple(run(seed)) for seed in range(4)}) > 1
