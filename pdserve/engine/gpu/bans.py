"""The tokens that a row may sample, as bits for the device: grammars and the bans of masks.py.

The bits are computed by applying masks.py, which defines these rules, to a row of zeros.
"""

# Shapes: V vocabulary, W words of 32 tokens.

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch

from pdserve.core.types import Sampling
from pdserve.engine.interface import Row
from pdserve.engine.masks import BANS, Draw, forbid, mask, may_ban


@final
class Bans:
    """Caches the bits of rows whose bans do not change, for up to `most_rows` rows."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int], most_rows: int) -> None:
        self.num_words = -(-vocab_size // 32)
        self._vocab_size, self._ends, self._most_rows = vocab_size, tuple(eos_token_ids), most_rows
        # By identity, with the sampling itself so that its identity is not reused. Hashing it could take longer.
        self._still: OrderedDict[tuple[int, bool], tuple[Sampling, Any]] = OrderedDict()

    def words(self, row: Row, allowed: bytes | memoryview | None) -> Any | None:
        """Bit t % 32 of word t // 32 is set if token t may be sampled, uint32 [W]; None if all may.

        `allowed`: the mask of the row's grammar, if it has one.
        """
        sampling = row.sample
        assert sampling is not None
        if not may_ban(sampling):  # the usual case
            return None if allowed is None else self._padded(np.frombuffer(allowed, np.uint8))
        # If a row's last token is not known yet, only the number of tokens may be used.
        history = row.history if row.follows is None else range(row.start + 1)
        draw = Draw(sampling, history, row.prompt_len, allowed)
        if not any(one.applies(draw) for one in BANS):
            return None if allowed is None else self._padded(np.frombuffer(allowed, np.uint8))
        if sampling.needs_history:
            return self._words(draw)
        key = id(sampling), draw.num_output < sampling.min_tokens
        if key not in self._still:
            self._still[key] = sampling, self._words(draw)
            if len(self._still) > self._most_rows:
                self._still.popitem(last=False)
        self._still.move_to_end(key)
        return self._still[key][1]

    def _words(self, draw: Draw) -> Any:
        allowed_1V = forbid(torch.zeros(1, self._vocab_size), [draw])
        left_1V = allowed_1V.clone()
        mask(left_1V, allowed_1V, {0: draw}, self._ends)
        return self._padded(np.packbits(left_1V[0].numpy() > -math.inf, bitorder="little"))

    def _padded(self, given: Any) -> Any:
        """Like masks.forbid: a shorter mask bans the remaining tokens, and extra bits of a longer one are ignored."""
        if len(given) == 4 * self.num_words:
            return given.view(np.uint32)
        words = np.zeros(self.num_words, np.uint32)
        count = min(len(given), 4 * self.num_words)
        words.view(np.uint8)[:count] = given[:count]
        return words
