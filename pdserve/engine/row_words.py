"""Encodes the rows of a step as numbers for the follower ranks. Pure.

Histories, sampling and grammars are needed only by the leader and not sent. Each row carries whether it samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from pdserve.core.types import Sampling
from pdserve.engine.interface import Row

_FIELDS: Final = 7
_DRAWS: Final = Sampling(temperature=0.0, max_tokens=1)


def to_words(rows: Sequence[Row]) -> list[int]:
    words: list[int] = []
    for row in rows:
        lists = (row.tokens, row.blocks, row.drafts, row.targets)
        words += (*map(len, lists), row.start, row.num_top, row.sample is not None)
        for one in lists:
            words += one
    return words


def from_words(words: Sequence[int]) -> list[Row]:
    """Rows that compute the same states and logits as the rows passed to `to_words`."""
    rows: list[Row] = []
    left = iter(words)
    while fields := list(islice(left, _FIELDS)):
        tokens, blocks, drafts, targets = (_take(left, count) for count in fields[:4])
        start, num_top, is_drawing = fields[4:]
        rows.append(
            Row(
                tokens=tokens,
                start=start,
                blocks=blocks,
                sample=_DRAWS if is_drawing else None,
                drafts=drafts,
                targets=targets,
                num_top=num_top,
            )
        )
    return rows


def _take(left: Iterator[int], count: int) -> list[int]:
    return list(islice(left, count))
