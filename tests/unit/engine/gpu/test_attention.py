from __future__ import annotations

import random

import pytest
import torch

from pdserve.engine.gpu.kernels.attention_plan import HEAD_WORDS, Division, split
from pdserve.engine.gpu.kernels.fixed_shapes import (
    edges,
    imbalance,
    least_tiles,
    num_programs,
    parts,
    share_of,
    tile_range,
)
from tests.gpu.case_attention import CASES, LONG
from tests.gpu.cases import Case

TILE = 64


@pytest.mark.gpu_checks
def marks(case: Case) -> list[pytest.MarkDecorator]:
    is_switched = "is_fused" in case.name or "heads_first" in case.name
    return [pytest.mark.slow] * (case.name == LONG.name()) + [pytest.mark.gpu_checks] * is_switched


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=marks(case)) for case in CASES])
def test_attention_over_parts_matches_float64(case: Case, device: torch.device) -> None:
    assert case.check(device) <= case.bound


def draw_rows(rng: random.Random, num_rows: int) -> list[tuple[int, int]]:
    """Start and length; some rows are padding."""
    rows = []
    for _ in range(num_rows):
        start = rng.choice((0, rng.randint(0, 100), rng.randint(0, 30_000)))
        rows.append(rng.choice(((start, start + rng.randint(1, 16)),) * 4 + ((0, 0),)))
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_every_tile_has_one_program(seed: int) -> None:
    rng = random.Random(seed)
    rows, programs = draw_rows(rng, rng.choice((1, 2, 7, 130))), rng.choice((1, 2, 5, 49, 396))
    ranges = [tile_range(*row, TILE, rng.choice((0, 40, 4096))) for row in rows]
    found = parts(ranges, programs, least_tiles(TILE))
    taken = [(part.row, tile) for part in found for tile in range(part.begin, part.end)]
    assert taken == [(row, tile) for row, (first, end) in enumerate(ranges) for tile in range(first, end)]
    assert all(part.begin < part.end for part in found)
    slots = [part.slot for part in found if part.slot is not None]
    assert len(set(slots)) == len(slots)
    assert all(0 <= slot < 2 * programs for slot in slots)
    # The counter of a row that several programs share is that of the program in which it begins.
    begins = {part.row: part.program for part in reversed(found) if part.slot is not None}
    assert len(set(begins.values())) == len(begins)
    loads = [sum(part.end - part.begin for part in found if part.program == one) for one in range(programs)]
    total = sum(loads)
    assert max(loads) <= max(least_tiles(TILE), -(-total // programs))


@pytest.mark.parametrize("num_rows", [1, 5, 513])
@pytest.mark.parametrize("window", [None, 40])
def test_device_and_host_divide_equally(num_rows: int, window: int | None, device: torch.device) -> None:
    rows, programs = draw_rows(random.Random(num_rows), num_rows), 49
    ranges = [tile_range(*row, TILE, window or 0) for row in rows]
    start_B, length_B = torch.tensor(rows, dtype=torch.int32, device=device).T.contiguous()
    share, total, *work = split(start_B, length_B, Division(programs, TILE, window)).tolist()
    edge_of = edges([end - first for first, end in ranges])
    assert (share, total) == (share_of(edge_of[-1], programs, least_tiles(TILE)), edge_of[-1])
    assert work[2 * programs :] == edge_of
    assert len(work) == 2 * programs + num_rows + 1
    assert HEAD_WORDS == 2
    found = parts(ranges, programs, least_tiles(TILE))
    for program in range(programs):
        mine = [part.row for part in found if part.program == program]
        first, last = work[program], work[programs + program]
        assert list(range(first, last + 1)) == mine


@pytest.mark.parametrize(
    ("contexts", "most"),
    [
        ([1024], 1.0),
        ([131_072], 1.03),
        ([1024] * 128, 1.02),
        ([32_768] + [1024] * 127, 1.01),
        ([131_072] + [100] * 255, 1.02),
        ([200 * row for row in range(1, 257)], 1.01),
    ],
)
def test_programs_have_equal_loads(contexts: list[int], most: float) -> None:
    ranges = [tile_range(length - 1, length, TILE) for length in contexts]
    assert imbalance(parts(ranges, num_programs(8, 132, 3), least_tiles(TILE))) <= most


def test_the_number_of_programs_fills_the_device_once() -> None:
    assert [num_programs(heads, 132, 3) for heads in (1, 2, 8, 16, 512)] == [396, 198, 49, 24, 1]
