"""The engine of real models: owns weights and KV pool, computes steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import final

import torch
from torch import Tensor

from pdserve.core.types import TokenOut
from pdserve.engine.batch import Batch, ChunkKernel, RowKernel, pack
from pdserve.engine.grammars import Grammars, RowMasks
from pdserve.engine.interface import EngineSpec, OnLayer, Row, RowOut, kept
from pdserve.engine.memory_plan import MemoryPlan
from pdserve.engine.mixing import AttentionBackend, EagerMixer
from pdserve.engine.model import Decoder
from pdserve.engine.pool import TorchPool
from pdserve.engine.rows import check_rows
from pdserve.engine.sampling import Draw, sample
from pdserve.engine.scoring import score

Mixing = Callable[[Batch, OnLayer | None], AttentionBackend]

log = logging.getLogger(__name__)


@final
class TorchEngine:
    def __init__(
        self,
        spec: EngineSpec,
        model: Decoder,
        pool: TorchPool,
        windows: Sequence[int | None],
        grammars: Grammars,
        kernel: RowKernel | None,
        mixing: Mixing | None = None,
        chunk_kernel: ChunkKernel | None = None,
    ) -> None:
        """`kernel` computes rows of few queries, `chunk_kernel` all others; `mixing` makes a device's own mixer for a
        batch."""
        self.grammars = grammars
        self.spec = spec
        self.pool = pool
        self.model = model
        self._windows = tuple(dict.fromkeys(windows))
        self._device = pool.tensor.device
        self._reports_layers = spec.num_layers > 1
        self._kernel = kernel
        self._chunk_kernel = chunk_kernel
        self._mixing = mixing
        self.memory: MemoryPlan | None = None

    @torch.inference_mode()
    def step(self, rows: Sequence[Row], on_layer: OnLayer | None = None) -> list[RowOut]:
        check_rows(self.spec, rows)
        if not rows:
            return []
        x_UE = self._states(rows, on_layer)
        num_samples = sum(row.num_samples for row in rows)
        outs = [RowOut()] * len(rows)
        if num_samples:
            logits_BV = self.model.logits(x_UE[:num_samples])
            masks_of = self.grammars.masks_of(rows)
            draws = [draw for index, row in enumerate(rows) for draw in draws_of(row, masks_of.get(index))]
            sampled = iter(sample(logits_BV, draws, self.spec.eos_token_ids))
            outs = [
                row_out(row, list(islice(sampled, row.num_samples)), masks_of.get(index))
                for index, row in enumerate(rows)
            ]
        first = num_samples
        for index, row in enumerate(rows):
            if row.targets:
                scored = score(self.model.logits, x_UE[first:], row.targets, row.num_top, self.spec.vocab_size)
                outs[index] = replace(outs[index], scored=scored)
                first += len(row.targets)
        if on_layer is not None and not self._reports_layers:
            on_layer(self.spec.num_layers)
        return outs

    @torch.inference_mode()
    def follow(self, rows: Sequence[Row]) -> None:
        """Takes part in a step whose tokens another rank samples: computes the same states and logits, in the same
        order."""
        x_UE = self._states(rows)
        first = sum(row.num_samples for row in rows)
        if first:
            self.model.logits(x_UE[:first])
        for row in rows:
            if row.targets:
                score(self.model.logits, x_UE[first:], row.targets, row.num_top, self.spec.vocab_size)
                first += len(row.targets)

    def _states(self, rows: Sequence[Row], on_layer: OnLayer | None = None) -> Tensor:
        batch = pack(rows, self._windows, self.spec.block_size, self._device, self._kernel, self._chunk_kernel)
        on_layer = on_layer if self._reports_layers else None
        if self._mixing is not None:
            return self.model.hidden(self._mixing(batch, on_layer))
        return self.model.hidden(EagerMixer(batch, self.pool, self.model.heads, on_layer))

    def close(self) -> None:
        """Nothing to free: weights and pool end with their last reader."""


def draws_of(row: Row, masks: RowMasks | None) -> list[Draw]:
    """The row's sampled token, and one after each of its drafts, as if that draft and the previous ones were
    accepted."""
    if row.sample is None:
        return []
    draws = []
    for count in range(len(row.drafts) + 1):
        history = [*row.history, *row.drafts[:count]] if count else row.history
        allowed = masks.masks[count] if masks is not None and count < len(masks.masks) else None
        draws.append(Draw(row.sample, history, row.prompt_len, allowed))
    return draws


def row_out(row: Row, sampled: Sequence[TokenOut], masks: RowMasks | None) -> RowOut:
    """The row's sampled tokens that are kept; with a grammar only those that had a mask."""
    if masks is None:
        return RowOut(kept(sampled, row.drafts))
    return RowOut(kept(sampled[: len(masks.masks)], row.drafts), failed=masks.failed)
