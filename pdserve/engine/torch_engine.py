"""The engine of real models: owns weights and KV pool, computes steps.

A step checks the rows, packs them into one batch, computes the hidden states, samples the rows that need a token, and
scores the prompts whose logprobs were asked for.
"""

# Shapes: U tokens whose final state is read, B sampled positions, C positions that are scored together, E hidden size,
#         V vocabulary, K most likely tokens.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final, final

import torch
from torch import Tensor

from pdserve.core.types import TokenOut
from pdserve.engine.interface import EngineSpec, OnLayer, Row, RowOut, kept
from pdserve.engine.memory.plan import MemoryPlan
from pdserve.engine.memory.pool import TorchPool
from pdserve.engine.model.attention import AttentionBackend, MakeAttention
from pdserve.engine.model.batch import pack
from pdserve.engine.model.decoder import Decoder
from pdserve.engine.rows import check_rows
from pdserve.engine.sampling.grammars import Grammars, RowMasks
from pdserve.engine.sampling.sampler import Draw, sample

MAX_LOGITS: Final = 2**24  # of a prompt at a time: for a chunk of 2048 tokens, 128k logits each would be 1 GB


@final
class TorchEngine:
    def __init__(
        self,
        spec: EngineSpec,
        model: Decoder,
        pool: TorchPool,
        grammars: Grammars,
        make_attention: MakeAttention,
        most_short: int,
        hidden: Callable[[AttentionBackend], Tensor] | None = None,
    ) -> None:
        """`make_attention` makes the device's attention for a batch; rows of up to `most_short` queries are short.

        `hidden` computes `model.hidden` in another way.
        """
        self.grammars = grammars
        self.spec = spec
        self.pool = pool
        self.model = model
        self._device = pool.tensor.device
        self._reports_layers = spec.num_layers > 1
        self._make_attention = make_attention
        self._most_short = most_short
        self._hidden = hidden or model.hidden
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
            outs = sample_rows(rows, logits_BV, self.grammars, self.spec.eos_token_ids)
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
        batch = pack(rows, self.spec.block_size, self._device, self._most_short)
        return self._hidden(self._make_attention(batch, on_layer if self._reports_layers else None))

    def close(self) -> None:
        """Nothing to free: weights and pool end with their last reader."""


def sample_rows(
    rows: Sequence[Row], logits_BV: Tensor, grammars: Grammars, eos_token_ids: tuple[int, ...]
) -> list[RowOut]:
    """`logits_BV`: float32, `num_samples` of each row, in the order of the rows."""
    masks_of = grammars.masks_of(rows)
    draws = [draw for index, row in enumerate(rows) for draw in _draws_of(row, masks_of.get(index))]
    sampled = iter(sample(logits_BV, draws, eos_token_ids))
    return [row_out(row, list(islice(sampled, row.num_samples)), masks_of.get(index)) for index, row in enumerate(rows)]


def _draws_of(row: Row, masks: RowMasks | None) -> list[Draw]:
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


def score(
    project: Callable[[Tensor], Tensor], x_UE: Tensor, targets: Sequence[int], num_top: int, vocab_size: int
) -> tuple[TokenOut, ...]:
    """Logprobs of the prompt's own tokens, each given the tokens before it, a few positions at a time.

    `targets[t]` is the token that follows position t; `project` turns hidden states into float32 logits.
    """
    scored: list[TokenOut] = []
    size = max(1, MAX_LOGITS // vocab_size)
    for first in range(0, len(targets), size):
        target_C = torch.tensor(targets[first : first + size], device=x_UE.device)
        logits_CV = project(x_UE[first : first + len(target_C)])
        norm_C1 = logits_CV.logsumexp(dim=-1, keepdim=True)
        target_C1 = logits_CV.gather(1, target_C[:, None])
        own_C, ranks = (target_C1 - norm_C1)[:, 0], ((logits_CV > target_C1).sum(dim=-1) + 1).tolist()
        top_CK = logits_CV.topk(min(num_top, vocab_size), dim=-1)
        ids, values = top_CK.indices.tolist(), (top_CK.values - norm_C1).tolist()
        for token_id, own, rank, top_ids, top_values in zip(
            target_C.tolist(), own_C.tolist(), ranks, ids, values, strict=True
        ):
            top = tuple(zip(top_ids, top_values, strict=True))
            scored.append(TokenOut(token_id=token_id, logprob=own, top=top, rank=rank))
    return tuple(scored)
