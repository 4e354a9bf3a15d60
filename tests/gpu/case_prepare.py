"""Checks of prepare (attention_plan.py) against torch's own lookups, and against the kernel that divides tiles."""

from __future__ import annotations

import torch

from pdserve.engine.gpu.kernels.attention_plan import Division, prepare, split
from tests.gpu.cases import Case, Launch


def _check(num_pages: int, follows: list[int], division: Division) -> Case:
    def check(device: torch.device) -> float:
        count = len(follows)
        sampled_B, token_B = torch.arange(100, 100 + count), torch.arange(count)
        seq_slot_B = torch.arange(count).mul(3) % (count + 1)
        table_SP = torch.arange((count + 1) * num_pages, dtype=torch.int32).view(count + 1, num_pages)
        given = torch.tensor(follows), sampled_B, token_B, seq_slot_B, table_SP
        ours_B = torch.zeros(count, dtype=torch.int64, device=device)
        length_B = torch.tensor([0 if index == 1 else 700 * index + 1 for index in range(count)], dtype=torch.int32)
        rows = (length_B - 1).clamp(min=0).to(device), length_B.to(device)
        ours_BP, work = prepare(*(each.to(device) for each in given), ours_B, *rows, division)
        expected = [100 + place if place >= 0 else index for index, place in enumerate(follows)]
        is_right = ours_B.tolist() == expected and torch.equal(ours_BP.cpu(), table_SP[seq_slot_B])
        return float(not (is_right and torch.equal(work, split(*rows, division))))

    return Case(f"prepare pages={num_pages} follows={follows} {division}", check, 0.0)


CASES = [
    _check(5, [-1, 2, 0, -1], Division(3, 64, None)),
    _check(300, [1, -1, 0], Division(49, 64, 40)),
    _check(5, [-1], Division(1, 32, None)),
]


def _launch(num_rows: int) -> Launch:
    def make(device: torch.device):  # type: ignore[no-untyped-def]
        row_B = torch.zeros(num_rows, dtype=torch.int64, device=device)
        table_SP = torch.zeros((2 * num_rows, 8192), dtype=torch.int32, device=device)
        length_B, division = row_B.int(), Division(49, 64, None)
        return (
            lambda: prepare(row_B, row_B, row_B, row_B, table_SP, row_B, length_B, length_B, division),
            lambda: table_SP[row_B],
        )

    return Launch(f"prepare b={num_rows} pages=8192", make, num_rows * 8192 * 8)


LAUNCHES = [_launch(128)]
