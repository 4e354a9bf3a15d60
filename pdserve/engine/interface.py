"""What a worker asks of an engine. Pure: the torch engine and the toy both answer to it.

An engine keeps no request between calls: each row of a step brings its tokens, where they stand in the
sequence, and the blocks that hold its KV. So preemption, migration and recovery need nothing from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Protocol, final, overload

from pdserve.core.types import Sampling, TokenOut

# Told how many layers, from the first, have stored the KV of every token of the step that runs.
OnLayer = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Facts of a loaded model that others plan with."""

    model: str  # name of the folder
    weights_hash: str  # of the config and of the weights' headers, sizes and samples; part of the fingerprint
    dtype: str
    layout: str  # names the KV layout, such as "block-major.v1"
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    block_size: int  # tokens per KV block
    num_blocks: int
    block_bytes: int  # bytes of one block over all layers, keys and values
    kv_dtype: str  # of the stored keys and values
    kv_layers: int  # of the model
    kv_heads: int  # of the model, too
    kv_head_dim: int
    tp_degree: int = 1  # ranks that share the heads, where each has a pool of its own
    tp_rank: int = 0  # this one's number
    num_layers: int = 1  # equal runs of bytes in a block, filled in order; 1: a block cannot be divided


PENDING: Final = -1  # in a row's tokens: what the step before draws, which only the engine knows yet


@dataclass(slots=True, kw_only=True)
class Row:
    """One sequence's share of a step.

    `tokens` are computed at positions start, start+1, ...; KV of positions < start is already in `blocks`.
    `blocks` covers start + len(tokens) positions. When `sample` is set, the token at position
    start + len(tokens) is drawn; `history` (all token ids up to there, prompt first) and `prompt_len`
    feed the penalties and min_tokens, and may be empty when the row does not sample.

    `drafts` are guesses of the tokens at positions start + len(tokens), ..., only for a row that samples; `blocks`
    covers them too. The engine computes them after `tokens`, draws at each position with that position's noise, and
    keeps what it has drawn up to the first that is not the guess. KV past the kept ones is garbage, which the next
    rows of the sequence overwrite.

    `targets` are the prompt tokens that follow tokens[0], tokens[1], ..., for a row whose prompt is to be scored: each
    gets its logprob and those of the `num_top` most likely tokens in its place.

    `follows`, of a row whose one token is PENDING: the index of the row in the step before that draws it. Only the
    first `start` tokens of its history count, which lack that one: a row whose sampling needs it is sampled later
    (`Flight.unsampled`). A row with penalties must have been a row of the step before, with the same list as its
    history.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    sample: Sampling | None = None
    history: Sequence[int] = field(default_factory=tuple)
    prompt_len: int = 0
    drafts: Sequence[int] = ()
    targets: Sequence[int] = ()
    num_top: int = 0
    follows: int | None = None

    @property
    def num_queries(self) -> int:
        """Positions that the step computes."""
        return len(self.tokens) + len(self.drafts)

    @property
    def num_draws(self) -> int:
        """Positions that the step draws at, if every guess is right."""
        return 0 if self.sample is None else 1 + len(self.drafts)


NEW_ROW: Final = -1  # among places: the row continues none; a number, since places go to the device


@final
class ChainedRows(Sequence[Row]):
    """Rows of one token each, made when they are read. An engine that keeps arrays of its last step reads only those
    that are new.

    Row i continues row `places[i]` of the step numbered `before`: the same sequence, sampling, history and list of
    blocks, one position later, and its token is the one which that row drew. NEW_ROW: it continues none.
    `is_ahead`: the step before still runs, so the tokens of rows that continue it are PENDING.
    """

    def __init__(
        self, make: Callable[[int], Row], places: Sequence[int], *, number: int, before: int, is_ahead: bool
    ) -> None:
        self._make = make
        self.places, self.number, self.before, self.is_ahead = places, number, before, is_ahead

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return [self._make(each) for each in range(len(self))[index]]
        return self._make(range(len(self))[index])

    def __iter__(self) -> Iterator[Row]:
        return map(self._make, range(len(self)))

    def __len__(self) -> int:
        return len(self.places)


@dataclass(frozen=True, slots=True)
class RowOut:
    """What a row of a step has given.

    `drawn`: the tokens at positions start + len(tokens) and on: one, and one more for each accepted draft; none
    where the row does not sample. `scored`: the row's targets with their logprobs.
    `failed`: why the request itself lets no token be drawn; it cannot go on, here or elsewhere.
    """

    drawn: tuple[TokenOut, ...] = ()
    scored: tuple[TokenOut, ...] = ()
    failed: str | None = None


@final
class PlainOuts(Sequence[RowOut]):
    """Outputs of a step in which each row drew one token and has nothing else to report: kept as the token ids."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids

    @overload
    def __getitem__(self, index: int) -> RowOut: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RowOut]: ...
    def __getitem__(self, index: int | slice) -> RowOut | Sequence[RowOut]:
        if isinstance(index, slice):
            return PlainOuts(self.token_ids[index])
        return plain_out(self.token_ids[index])

    def __iter__(self) -> Iterator[RowOut]:
        return map(plain_out, self.token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)


@lru_cache(maxsize=1 << 16)
def plain_out(token_id: int) -> RowOut:
    """Output of a row that draws one token and asks for nothing else. Texts draw the same tokens again and again."""
    return RowOut((TokenOut(token_id=token_id),))


def kept(drawn: Sequence[TokenOut], drafts: Sequence[int]) -> tuple[TokenOut, ...]:
    """What counts of the draws at a row's positions: up to the first that is not the guess.

    A draw behind a wrong guess was made after a text that is not the sequence's.
    """
    for index, (token, draft) in enumerate(zip(drawn, drafts, strict=False)):
        if token.token_id != draft:
            return tuple(drawn[: index + 1])
    return tuple(drawn)


class KvPool(Protocol):
    """Memory of all KV blocks; block b is bytes [b * block_bytes, (b + 1) * block_bytes)."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def is_on_host(self) -> bool:
        """False: on a device, and `buffer` raises."""
        ...

    @property
    def buffer(self) -> memoryview:
        """The whole pool as writable bytes (host pools only)."""
        ...

    @property
    def descriptor(self) -> int | None:
        """A sealed memory file that holds `buffer` from its first byte; None: other processes cannot map the pool."""
        ...


class Flight(Protocol):
    """A step that was launched."""

    @property
    def unsampled(self) -> Sequence[int]:
        """Rows whose forward pass was launched and whose sampling was not: it needs tokens that are not known yet."""
        ...

    def sample(self, rows: Mapping[int, Row]) -> None:
        """Launches the sampling of the unsampled rows. Their histories now hold the tokens that they follow.

        Called once if any rows are unsampled: after the step before was waited for, before the next launch, and before
        `wait`. Sequences that have ended are missing from `rows`; their outputs mean nothing. Does not wait.
        """
        ...

    def wait(self) -> Sequence[RowOut]:
        """What `Engine.step` would have returned; each flight is waited for once, in the order of launching.

        Raises what the step raised.
        """
        ...


class Engine(Protocol):
    @property
    def spec(self) -> EngineSpec: ...

    @property
    def pool(self) -> KvPool: ...

    def step(self, rows: Sequence[Row], on_layer: OnLayer | None = None) -> Sequence[RowOut]:
        """Computes all rows, prefill chunks and decode rows mixed, and writes their KV.

        Returns one entry per row. A drawn token depends on the row alone (its tokens, sampling, seed and position),
        never on the other rows, the slot, the blocks' numbers, the worker or the drafts.

        `on_layer` is called on this thread with 1, 2, .. spec.num_layers, each once those layers' bytes of every block
        that the rows write are what they will be after the step. On a device they need only be queued on the default
        stream: an event that is recorded there during the call comes after them. It may be called late, never early,
        and is not called again where a step fails. It must not raise.
        """
        ...

    def close(self) -> None: ...


class AheadEngine(Engine, Protocol):
    """An engine that takes the next step while one is computed: at most two are launched and not waited for."""

    def launch(self, rows: Sequence[Row], after: Flight | None) -> Flight:
        """Begins a step and returns. `after`: the step before, still running, whose draws rows may follow."""
        ...
