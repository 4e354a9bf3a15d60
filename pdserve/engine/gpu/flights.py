"""Steps of the graph engine that were launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, final

from pdserve.core.types import TokenOut
from pdserve.engine.gpu.redraw import Extras
from pdserve.engine.grammars import RowMasks
from pdserve.engine.interface import PlainOuts, Row, RowOut
from pdserve.engine.torch_engine import row_out


@final
class GraphFlight:
    """A step whose draws are on their way to the host."""

    def __init__(
        self,
        count: int,
        host: tuple[Any, Any],
        extras: Extras,
        event: Any | None,
        *,
        drafted: list[Row] | None,
        wants: list[int | None] | None,
    ) -> None:
        """`count` draws. `drafted`: the rows, of a step with drafts; `wants`: of a step in which some row's sampling
        asks for logprobs, what each draw's asks for."""
        self.has_drafts = drafted is not None
        self._count, self._drafted, self._wants = count, drafted, wants
        self._host, self._extras, self._event = host, extras, event

    def wait(self) -> Sequence[RowOut]:
        if self._event is not None:
            self._event.synchronize()
        tokens = self._host[0][: self._count].tolist()
        extras, masks_of = self._extras, self._extras.masks_of
        is_plain = self._drafted is None and self._wants is None
        if is_plain and not any(masks.failed or not masks.masks for masks in masks_of.values()):  # nearly every step
            return PlainOuts(tokens)
        wants = self._wants or [None] * self._count
        logprobs = self._host[1][: self._count].tolist()
        drawn = [
            TokenOut(token_id=token, logprob=logprob if wanted is not None else None)
            for token, logprob, wanted in zip(tokens, logprobs, wants, strict=True)
        ]
        for at in extras.top_of:
            drawn[at] = replace(drawn[at], top=extras.top(at, wants[at] or 0))
        left = iter(drawn)
        if self._drafted is None:
            return [_out(one, masks_of.get(index)) for index, one in enumerate(drawn)]
        return [
            row_out(row, list(islice(left, row.num_queries)), masks_of.get(index))
            for index, row in enumerate(self._drafted)
        ]


def _out(token: TokenOut, masks: RowMasks | None) -> RowOut:
    """Of a row without drafts; under a grammar its draw counts only if it had a mask."""
    if masks is None:
        return RowOut((token,))
    return RowOut((token,) if masks.masks else (), failed=masks.failed)


@final
class DoneFlight:
    """A step that was computed when it was launched."""

    def __init__(self, outs: list[RowOut]) -> None:
        self._outs = outs

    def wait(self) -> list[RowOut]:
        return self._outs
