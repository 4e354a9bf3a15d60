"""Checks of forbid_tokens (resample.py) against a mask that is built token by token."""

from __future__ import annotations

import torch

from pdserve.engine.gpu.resample import forbid_tokens
from tests.gpu.cases import Case, Launch, draw


def _check(vocab_size: int, num_rows: int, rows: list[int]) -> Case:
    def check(device: torch.device) -> float:
        logits_SV = draw((num_rows, vocab_size + 5), torch.float32, 1)[:, :vocab_size]  # rows with a stride
        is_allowed_RV = draw((len(rows), vocab_size), torch.float32, 2) > 0
        word_RW = torch.zeros(len(rows), -(-vocab_size // 32), dtype=torch.int64)
        for token in range(vocab_size):
            word_RW[:, token // 32] |= is_allowed_RV[:, token].long() << token % 32
        ours_SV = logits_SV.to(device)
        row_R = torch.tensor(rows, dtype=torch.int64, device=device)
        forbid_tokens(ours_SV, word_RW.to(torch.int32).to(device), row_R)
        expected_SV = logits_SV.clone()
        for at, row in enumerate(rows):
            expected_SV[row, ~is_allowed_RV[at]] = -torch.inf
        return float(not torch.equal(ours_SV.cpu(), expected_SV))

    return Case(f"forbid v={vocab_size} rows={rows}", check, 0.0)


CASES = [_check(3000, 4, [2, 0]), _check(31, 1, [0]), _check(1025, 3, [0, 1, 2]), _check(64, 2, [])]


def _launch(num_rows: int) -> Launch:
    def make(device: torch.device):  # type: ignore[no-untyped-def]
        logits_SV = torch.zeros(num_rows, 128_256, device=device)
        word_RW = torch.zeros(num_rows, 128_256 // 32, dtype=torch.int32, device=device)
        row_R = torch.arange(num_rows, device=device)
        return lambda: forbid_tokens(logits_SV, word_RW, row_R), None

    return Launch(f"forbid b={num_rows} v=128256", make, num_rows * 128_256 * 4)


LAUNCHES = [_launch(64)]
