"""Launched steps of the graph engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, final

from pdserve.core.errors import InternalError
from pdserve.core.types import TokenOut
from pdserve.engine.gpu.resample import NO_EXTRAS, Extras
from pdserve.engine.grammars import Moves
from pdserve.engine.interface import PlainOuts, Row, RowOut
from pdserve.engine.matchers import RowMasks
from pdserve.engine.torch_engine import row_out


@dataclass(frozen=True, slots=True)
class Sampled:
    """Results of a step that are being copied to the host."""

    host: tuple[Any, Any]  # tokens and logprobs
    event: Any | None  # event after which they are there; None without a device
    extras: Extras


@final
class GraphFlight:
    """A step whose results are being copied to the host, or whose forward pass runs before its sampling is launched."""

    def __init__(
        self,
        count: int,
        sampled: Sampled | Callable[[Mapping[int, Row]], Sampled],
        *,
        drafted: list[Row] | None = None,
        wants: list[int | None] | None = None,
        unsampled: Sequence[int] = (),
    ) -> None:
        """`count` sampled tokens. `drafted`: the rows of a step with drafts. `wants`: the requested logprobs of each
        sampled token, if any row requests some. `sampled`: the function that samples the unsampled rows, if there are
        any."""
        self.has_drafts = drafted is not None
        self.unsampled = unsampled
        self._token_ids: list[int] = []  # once it was waited for
        self._count, self._drafted, self._wants = count, drafted, wants
        self._sampled = sampled

    def moves(self, places: list[int]) -> Moves:
        """For rows of the next step, by their places in this one: the cursors of their grammars, if any, and the tokens
        that they have sampled. Called after `wait`."""
        extras = self._sampled.extras if isinstance(self._sampled, Sampled) else NO_EXTRAS
        token_ids = [self._token_ids[place] for place in places]
        if places == extras.bound:  # nearly every step
            return extras.cursors, token_ids
        cursor_of = dict(zip(extras.bound, extras.cursors, strict=True))
        return [cursor_of.get(place) for place in places], token_ids

    def sample(self, rows: Mapping[int, Row]) -> None:
        assert not isinstance(self._sampled, Sampled), "it was sampled before"
        self._sampled = self._sampled(rows)
        self.unsampled = ()

    def wait(self) -> Sequence[RowOut]:
        sampled = self._sampled
        if not isinstance(sampled, Sampled):
            raise InternalError(f"{len(self.unsampled)} rows were not sampled before they are waited for")
        if sampled.event is not None:
            sampled.event.synchronize()
        tokens = self._token_ids = sampled.host[0][: self._count].tolist()
        extras, masks_of = sampled.extras, sampled.extras.masks_of
        is_plain = self._drafted is None and self._wants is None
        if is_plain and not any(masks.failed or not masks.masks for masks in masks_of.values()):  # the usual case
            return PlainOuts(tokens)
        wants = self._wants or [None] * self._count
        logprobs = sampled.host[1][: self._count].tolist()
        outs = [
            TokenOut(token_id=token, logprob=logprob if wanted is not None else None)
            for token, logprob, wanted in zip(tokens, logprobs, wants, strict=True)
        ]
        for at in extras.top_of:
            outs[at] = replace(outs[at], top=extras.top(at, wants[at] or 0))
        left = iter(outs)
        if self._drafted is None:
            return [_out(one, masks_of.get(index)) for index, one in enumerate(outs)]
        return [
            row_out(row, list(islice(left, row.num_queries)), masks_of.get(index))
            for index, row in enumerate(self._drafted)
        ]


def _out(token: TokenOut, masks: RowMasks | None) -> RowOut:
    """For a row without drafts. With a grammar, its token is valid only if it had a mask."""
    if masks is None:
        return RowOut((token,))
    return RowOut((token,) if masks.masks else (), failed=masks.failed)


@final
class DoneFlight:
    """A step that was computed at launch."""

    unsampled: Sequence[int] = ()

    def __init__(self, outs: list[RowOut]) -> None:
        self._outs = outs

    def sample(self, rows: Mapping[int, Row]) -> None:
        raise InternalError("every row of the step was sampled when it was launched")

    def wait(self) -> list[RowOut]:
        return self._outs
