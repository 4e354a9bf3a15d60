"""The inputs of a decode step in one run of bytes, with one copy to the device per step.

The host writes into pinned memory, and the device reads views of its own copy. Pinned buffers alternate, because a copy
that was queued may still read the last one. Two are enough, because at most two steps are launched and not waited for.
"""

# Shapes: B rows of a bucket, F bytes of all fields for a row.

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from pdserve.core.types import Sampling
from pdserve.engine.gpu.kernels.kv import NOWHERE
from pdserve.engine.gpu.kernels.samplings import FIELDS as DRAW_FIELDS
from pdserve.engine.gpu.kernels.samplings import Draws, Samplings
from pdserve.engine.gpu.plain_rows import PlainRows
from pdserve.engine.interface import Row

_ALIGNMENT: Final = 16
FIELDS: Final = (  # wide types first
    ("token", np.int64),
    ("follows", np.int64),  # row of the previous step whose sampled token is the input; -1: use `token`
    ("position", np.int64),
    ("slot", np.int64),
    ("seq_slot", np.int64),
    ("seed", np.int64),
    ("num_before", np.int64),  # tokens before the sampled one
    ("top_p", np.float64),
    ("start", np.int32),
    ("length", np.int32),
    ("top_k", np.int32),
    ("floor", np.int32),
    ("first", np.int32),  # for rows with drafts: the row's first token; after the last row, the end
    ("temperature", np.float32),
)
_TORCH: Final[dict[Any, torch.dtype]] = {
    np.int64: torch.int64,
    np.float64: torch.float64,
    np.int32: torch.int32,
    np.float32: torch.float32,
}


@final
class Inputs:
    """Fields of up to `most_tokens` tokens and as many rows, on the device: tensors that keep their addresses.

    A row has one token, or one and its drafts (`send_drafted`). seq_slot, start, length and first are per row, all
    other fields per token.
    """

    def __init__(self, most_tokens: int, block_size: int, device: torch.device, num_seq_slots: int) -> None:
        self._most_tokens, self._block_size = most_tokens, block_size
        self.samplings = Samplings(num_seq_slots)
        sizes = [(most_tokens + 1) * np.dtype(kind).itemsize for _, kind in FIELDS]
        starts = np.cumsum([0, *(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)])
        num_bytes = int(starts[-1])
        is_cuda = device.type == "cuda"
        self._hosts = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2)]
        self._turn = 0
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._host_fields: list[dict[str, Any]] = [{}, {}]
        self._fields: dict[str, Tensor] = {}
        for (name, kind), begin, size in zip(FIELDS, starts.tolist(), sizes, strict=False):
            self._fields[name] = self._device[begin : begin + size].view(_TORCH[kind])
            for host, fields in zip(self._hosts, self._host_fields, strict=True):
                fields[name] = host[begin : begin + size].view(_TORCH[kind]).numpy()

    def field(self, name: str, num_rows: int) -> Tensor:
        return self._fields[name][:num_rows]

    def draws(self, num_rows: int) -> Draws:
        return Draws(
            seed=self.field("seed", num_rows),
            position=self.field("num_before", num_rows),
            temperature=self.field("temperature", num_rows),
            top_k=self.field("top_k", num_rows),
            top_p=self.field("top_p", num_rows),
            floor=self.field("floor", num_rows),
        )

    def draws_of(self, token_S: Tensor) -> Draws:
        """The values at some tokens of the step, given by int64 numbers."""
        every = self.draws(self._most_tokens)
        return Draws(
            **{one.name: getattr(every, one.name).index_select(0, token_S) for one in dataclasses.fields(Draws)}
        )

    def send(self, rows: PlainRows, bucket: int) -> None:
        """Queues the copy for these rows and the padding after them, which attends to nothing and stores nothing.
        `samplings` must contain the sampling of each sequence slot."""
        fields = self._host_fields[self._turn]
        self._fill(fields, "token", rows.token_B, bucket, 0)
        self._fill(fields, "follows", rows.follows_B, bucket, -1)
        self._fill(fields, "seq_slot", rows.seq_slot_B, bucket, 0)
        self._fill(fields, "start", rows.start_B, bucket, 0)
        self._fill(fields, "length", rows.start_B + 1, bucket, 0)
        self._fill_draws(fields, rows.seq_slot_B, rows.start_B, rows.block_B, bucket)

    def send_drafted(self, rows: Sequence[Row], seq_slots: Sequence[int], bucket: int) -> None:
        """Like `send`, for rows with drafts after their tokens; `bucket` counts tokens. Each padding token is a row."""
        self.samplings.update(seq_slots, [sampling_of(row) for row in rows])
        fields, size = self._host_fields[self._turn], self._block_size
        start = np.fromiter((row.start for row in rows), np.int64, len(rows))
        count = np.fromiter((row.num_queries for row in rows), np.int64, len(rows))
        end = np.cumsum(count)
        num_tokens = int(end[-1]) if len(rows) else 0
        row_of = np.repeat(np.arange(len(rows)), count)
        position = np.arange(num_tokens) + (start - end + count)[row_of]
        at = zip(row_of.tolist(), position.tolist(), strict=True)
        block = np.fromiter((rows[row].blocks[place // size] for row, place in at), np.int64, num_tokens)
        token = np.fromiter((token for row in rows for token in (*row.tokens, *row.drafts)), np.int64, num_tokens)
        self._fill(fields, "token", token, bucket, 0)
        self._fill(fields, "follows", (), bucket, -1)
        self._fill(fields, "seq_slot", np.fromiter(seq_slots, np.int64, len(rows)), bucket, 0)
        self._fill(fields, "start", start, bucket, 0)
        self._fill(fields, "length", start + count, bucket, 0)
        padding = np.arange(num_tokens, num_tokens + bucket + 1 - len(rows))
        fields["first"][: bucket + 1] = np.minimum(np.concatenate([end - count, padding]), bucket)
        self._fill_draws(fields, np.array(seq_slots, np.int64)[row_of], position, block, bucket)

    def _fill_draws(self, fields: dict[str, Any], seq_slot: Any, position: Any, block: Any, bucket: int) -> None:
        """Fills in the fields of each token, whose row has that sequence slot, and queues the copy."""
        size = self._block_size
        self._fill(fields, "position", position, bucket, 0)
        self._fill(fields, "slot", block * size + position % size, bucket, NOWHERE)
        self._fill(fields, "num_before", position + 1, bucket, 0)
        for name, _, padding in DRAW_FIELDS:
            self._fill(fields, name, self.samplings.field(name, seq_slot), bucket, padding)
        self._device.copy_(self._hosts[self._turn], non_blocking=True)
        self._turn = 1 - self._turn

    def _fill(self, fields: dict[str, Any], name: str, values: Any, bucket: int, padding: float) -> None:
        field = fields[name]
        field[: len(values)] = values
        field[len(values) : bucket] = padding


def sampling_of(row: Row) -> Sampling:
    assert row.sample is not None, "a decode row draws"
    return row.sample
