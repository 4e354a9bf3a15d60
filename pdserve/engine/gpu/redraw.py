"""Draws again, behind a graph, the rows that ask for more than it does: grammars, bans, bias, penalties, and tells of
the likeliest tokens.

The graph computes every row's logits and draws from them as they are. What few rows ask for beyond is launched kernel
by kernel while the graph runs, so the host's share of it (a grammar's mask, the launches) costs no time, and a batch
without such rows is not touched by it. Order and meaning are those of sampling.py. Nothing waits for the device.
"""

# Shapes: B rows of a bucket, S rows that are drawn again, R of them under bans, P with penalties, N biases, L rows
# whose logprobs are told, K likeliest tokens, V vocabulary, W words of 32 tokens.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from pdserve.engine.gpu.bans import Bans
from pdserve.engine.gpu.forbid import forbid
from pdserve.engine.gpu.inputs import sampling_of
from pdserve.engine.gpu.penalties import Penalties
from pdserve.engine.gpu.static import StaticDecode
from pdserve.engine.grammars import Grammars
from pdserve.engine.interface import Row


@dataclass(frozen=True, slots=True)
class Extras:
    """What the rows of a step have beside tokens and logprobs, by number of the row."""

    failed: dict[int, str] = field(default_factory=dict)  # why no token can be drawn
    top_of: dict[int, int] = field(default_factory=dict)  # the row of `tops`
    tops: tuple[Tensor, Tensor] | None = None  # token ids and logprobs [L, K] on the host, once the step has ended

    def top(self, row: int, count: int) -> tuple[tuple[int, float], ...]:
        if self.tops is None or row not in self.top_of:
            return ()
        at = self.top_of[row]
        token_K, logprob_K = (each[at, :count].tolist() for each in self.tops)
        return tuple(zip(token_K, logprob_K, strict=True))


NO_EXTRAS = Extras()


def asks_for_more(row: Row) -> bool:
    """Whether the row must be drawn again, or tells of likely tokens."""
    sampling = sampling_of(row)
    return bool(
        sampling.needs_history
        or sampling.is_penalised
        or sampling.logprobs
        or sampling.logit_bias
        or sampling.allowed_token_ids
        or row.start + 1 - row.prompt_len < sampling.min_tokens
    )


@final
class Redraw:
    def __init__(self, decode: StaticDecode, grammars: Grammars, eos_token_ids: Sequence[int]) -> None:
        self._decode, self._grammars = decode, grammars
        most_rows, vocab_size = decode.logits_BV.shape
        self._bans = Bans(vocab_size, eos_token_ids, 2 * most_rows)
        self._device = decode.logits_BV.device
        self._penalties = Penalties(vocab_size, most_rows, self._device)
        self._is_cuda = self._device.type == "cuda"

    def launch(self, rows: Sequence[Row], asking: Sequence[int]) -> Extras:
        """Behind the replay of `rows`, for those of them that ask for more."""
        masks_of = self._grammars.masks_of([rows[index] for index in asking])
        failed: dict[int, str] = {}
        words_of: dict[int, Any] = {}
        for number, index in enumerate(asking):
            masks = masks_of.get(number)
            if masks is not None and masks.failed is not None:
                failed[index] = masks.failed
                continue
            words = self._bans.words(rows[index], None if masks is None else masks.masks[0])
            if words is not None:
                words_of[index] = words
        again = []
        for index in asking:
            sampling = sampling_of(rows[index])
            if index in words_of or sampling.logit_bias or sampling.is_penalised:
                again.append(index)
        if again:
            self._draw(rows, again, words_of)
        return Extras(failed, *self._tell(rows, asking, set(again)))

    def _draw(self, rows: Sequence[Row], again: Sequence[int], words_of: dict[int, Any]) -> None:
        decode = self._decode
        row_S = self._send(again, torch.int64)
        logits_SV = decode.logits_BV.index_select(0, row_S)
        place = {index: at for at, index in enumerate(again)}
        if words_of:
            word_RW = torch.empty((len(words_of), self._bans.num_words), dtype=torch.int32, pin_memory=self._is_cuda)
            for at, words in enumerate(words_of.values()):
                word_RW[at].numpy()[:] = words.view("int32")
            row_R = self._send([place[index] for index in words_of], torch.int64)
            forbid(logits_SV, word_RW.to(self._device, non_blocking=True), row_R)
        size = logits_SV.shape[1]
        biases = [
            (place[index] * size + token, bias)
            for index in again
            for token, bias in sampling_of(rows[index]).logit_bias
        ]
        if biases:
            at_N = self._send([at for at, _ in biases], torch.int64)
            logits_SV.view(-1).index_add_(0, at_N, self._send([bias for _, bias in biases], torch.float32))
        penalised = [index for index in again if sampling_of(rows[index]).is_penalised]
        if penalised:
            row_P = self._send([place[index] for index in penalised], torch.int64)
            slot_P = self._penalties.apply([rows[index] for index in penalised], logits_SV, row_P)
        drawn_S, _ = decode.sampler.draw(logits_SV, decode.inputs.draws_of(row_S))
        if penalised:
            self._penalties.count(slot_P, drawn_S.index_select(0, row_P))
        decode.drawn_B.index_copy_(0, row_S, drawn_S)

    def _tell(
        self, rows: Sequence[Row], asking: Sequence[int], again: set[int]
    ) -> tuple[dict[int, int], tuple[Tensor, Tensor] | None]:
        """Logprobs of what was drawn again, and the likeliest tokens: of the model's logits, as they were."""
        counts = {index: sampling_of(rows[index]).logprobs for index in asking}
        told = [index for index in asking if counts[index] or (counts[index] == 0 and index in again)]
        if not told:
            return {}, None
        decode = self._decode
        row_L = self._send(told, torch.int64)
        logprob_LV = decode.logits_BV.index_select(0, row_L).log_softmax(dim=-1)
        drawn_L1 = decode.drawn_B.index_select(0, row_L)[:, None]
        decode.logprob_B.index_copy_(0, row_L, logprob_LV.gather(1, drawn_L1)[:, 0])
        most = min(max(counts[index] or 0 for index in told), logprob_LV.shape[1])
        if not most:
            return {}, None
        top_LK = logprob_LV.topk(most, dim=-1)
        tops = self._fetch(top_LK.indices), self._fetch(top_LK.values)
        return {index: at for at, index in enumerate(told)}, tops

    def _send(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, pin_memory=self._is_cuda).to(self._device, non_blocking=True)

    def _fetch(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._is_cuda)
        return host.copy_(tensor, non_blocking=True)
