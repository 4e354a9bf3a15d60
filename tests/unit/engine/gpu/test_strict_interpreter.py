"""The strict interpreter, which checks the kernels, finds errors that the plain one misses."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import pytest
import torch

from tests.gpu.faulty_kernels import add_before, copy, reset_early, store_and_load, sum_of_last
from tests.gpu.strict_interpreter import OutOfBounds, Shuffled, check_grid, strict_interpreter

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


def test_a_launch_has_cudas_limits() -> None:
    check_grid((2**31 - 1, 65_535, 65_535))
    with pytest.raises(OutOfBounds, match="at most"):
        check_grid((2**31,))
    with strict_interpreter(), pytest.raises(Exception, match="at most"):
        copy[(1, 65_536)](torch.zeros(4), torch.zeros(4), 4, BLOCK=4, MASK_LOADS=True, MASK_STORES=True)


def test_fresh_memory_is_poisoned() -> None:
    with strict_interpreter():
        assert torch.empty(100).isnan().all()
        assert torch.empty(100, dtype=torch.int32).eq(torch.iinfo(torch.int32).max).all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_programs_run_in_random_order() -> None:
    def order(seed: int) -> tuple[tuple[int, int, int], ...]:
        shuffled = Shuffled(seed)
        shuffled.begin((4, 2, 3))
        return tuple(shuffled.place(*place) for place in product(range(4), range(2), range(3)))

    assert len({order(seed) for seed in range(4)}) > 1
    assert sorted(order(0)) == sorted(order(1)) == list(product(range(4), range(2), range(3)))


@pytest.mark.parametrize("seed", range(4))
def test_a_race_between_programs_is_found(seed: int) -> None:
    """In any order, as either the load or the store is late."""
    with strict_interpreter(seed), pytest.raises(Exception, match="what another one has"):
        add_before[(2,)](torch.ones(2, 4), BLOCK=4)


@pytest.mark.parametrize("has_barrier", [True, False])
def test_a_load_of_own_stores_needs_a_barrier(has_barrier: bool) -> None:
    values, out = torch.arange(8.0), torch.empty(8)
    with strict_interpreter():
        if not has_barrier:
            with pytest.raises(Exception, match="loads what it has stored, without a barrier"):
                store_and_load[(1,)](values, out, BLOCK=8, HAS_BARRIER=False)
            return
        store_and_load[(1,)](values, out, BLOCK=8, HAS_BARRIER=True)
        assert values.tolist() == [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("sem", "has_barrier", "error"),
    [
        ("acq_rel", True, None),
        ("acq_rel", False, "releases stores without a barrier"),
        ("relaxed", True, "what another one has stored"),
        ("acquire", True, "what another one has stored"),
    ],
)
def test_atomic_operations_order_programs(sem: str, has_barrier: bool, error: str | None) -> None:
    values, parts, out = torch.arange(4.0), torch.empty(4), torch.empty(1)
    count = torch.zeros(1, dtype=torch.int32)
    with strict_interpreter(), nullcontext() if error is None else pytest.raises(Exception, match=error):
        sum_of_last[(4,)](values, parts, count, out, PROGRAMS=4, SEM=sem, HAS_BARRIER=has_barrier)
        assert out.item() == 6.0
        assert count.item() == 0


@pytest.mark.parametrize(("sem", "is_race"), [("acq_rel", False), ("relaxed", True), ("acquire", True)])
def test_a_counter_is_reset_after_all_changes(sem: str, is_race: bool) -> None:
    count = torch.zeros(1, dtype=torch.int32)
    with strict_interpreter(), pytest.raises(Exception, match="what another one has") if is_race else nullcontext():
        reset_early[(4,)](count, SEM=sem)
        assert count.item() == 0
