"""The interface between a worker and an engine. Pure; implemented by the torch engine, the toy engine, and engines of
other distributions (docs/engine.md).

An engine keeps no request between calls: each row of a step contains its tokens, their position in the sequence, and
the blocks of its KV. So preemption, migration and recovery need nothing from the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Protocol, final, overload, runtime_checkable

from pdserve.core.adapters import Adapter
from pdserve.core.types import Sampling, TokenOut

# Called with the number of layers, from the first, that have stored the KV of every token of the current step.
OnLayer = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Facts of a loaded model."""

    model: str  # name of the folder
    weights_hash: str  # hash of the config and of the weights' headers, sizes and samples; part of the fingerprint
    dtype: str
    layout: str  # names the KV layout: "block-major.v1", or "opaque.NAME" of an engine that is not ours
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    block_size: int  # tokens per KV block
    num_blocks: int
    block_bytes: int  # bytes of one block over all layers, keys and values
    kv_dtype: str  # dtype of the stored keys and values
    kv_layers: int  # of the model
    kv_heads: int  # of the model, too
    kv_head_dim: int
    tp_degree: int = 1  # ranks that share the heads, if each has its own pool
    tp_rank: int = 0  # number of this rank
    num_layers: int = 1  # equal runs of bytes in a block, filled in order; 1: a block cannot be divided


PENDING: Final = -1  # in a row's tokens: the token that the previous step samples, not yet known to the caller


@dataclass(slots=True, kw_only=True)
class Row:
    """One sequence's share of a step.

    `tokens` are computed at positions start, start+1, ...; KV of positions < start is already in `blocks`. `blocks`
    covers start + len(tokens) positions. If `sample` is set, the token at position start + len(tokens) is sampled.
    `history` (all token ids up to there, prompt first) and `prompt_len` are used for penalties and min_tokens, and may
    be empty if the row does not sample.

    `drafts` are predictions of the tokens at positions start + len(tokens), ..., only for a row that samples; `blocks`
    covers them too. The engine computes them after `tokens`, samples at each position with that position's noise, and
    keeps the sampled tokens up to the first that differs from its draft. KV of later positions is invalid, and the next
    rows of the sequence overwrite it.

    `targets` are the prompt tokens that follow tokens[0], tokens[1], ..., for a row whose prompt is scored: each gets
    its logprob and those of the `num_top` most likely tokens at its position.

    `follows`, for a row whose one token is PENDING: the index of the row in the previous step that samples it. Only the
    first `start` tokens of its history are valid, without the pending one, so a row whose sampling needs that token is
    sampled later (`Flight.unsampled`). A row with penalties must have been a row of the previous step, with the same
    list as its history.

    `adapter`: fingerprint of the LoRA adapter, loaded before, that computes the row. Empty: the model alone.
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
    adapter: str = ""

    @property
    def num_queries(self) -> int:
        """Positions that the step computes."""
        return len(self.tokens) + len(self.drafts)

    @property
    def num_samples(self) -> int:
        """Positions at which the step samples, if every draft is accepted."""
        return 0 if self.sample is None else 1 + len(self.drafts)


NEW_ROW: Final = -1  # in places: the row continues none; a number, because places are copied to the device


@final
class ContinuedRows(Sequence[Row]):
    """Rows of one token each, created when they are read. An engine that keeps arrays of its last step reads only the
    new ones.

    Row i continues row `places[i]` of step number `before`: the same sequence, sampling, history and list of blocks,
    one position later, with the token that that row sampled. NEW_ROW: it continues none. `is_async`: the previous step
    still runs, so the tokens of the rows that continue it are PENDING.
    """

    def __init__(
        self, make: Callable[[int], Row], places: Sequence[int], *, number: int, before: int, is_async: bool
    ) -> None:
        self._make = make
        self.places, self.number, self.before, self.is_async = places, number, before, is_async

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
    """The output of one row of a step.

    `sampled`: the sampled tokens from position start + len(tokens) on: one, and one more for each accepted draft; none
    if the row does not sample. `scored`: the row's targets with their logprobs. `failed`: why no token can be sampled
    for this request, here or on another worker.
    """

    sampled: tuple[TokenOut, ...] = ()
    scored: tuple[TokenOut, ...] = ()
    failed: str | None = None


@final
class PlainOuts(Sequence[RowOut]):
    """Outputs of a step in which each row sampled one token and has nothing else to report: stored as token ids."""

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
    """The output of a row with one sampled token and nothing else, cached because the same tokens recur."""
    return RowOut((TokenOut(token_id=token_id),))


def compacted(outs: Sequence[RowOut]) -> PlainOuts | None:
    """PlainOuts with the same content; None if a row reports anything but one sampled token."""
    token_ids: list[int] = []
    for out in outs:
        if len(out.sampled) != 1 or out.scored or out.failed is not None:
            return None
        token = out.sampled[0]
        if token.logprob is not None or token.top or token.rank is not None:
            return None
        token_ids.append(token.token_id)
    return PlainOuts(token_ids)


def kept(sampled: Sequence[TokenOut], drafts: Sequence[int]) -> tuple[TokenOut, ...]:
    """The sampled tokens of a row that are kept: up to the first that differs from its draft.

    Tokens after a rejected draft were sampled for a text that is not the sequence's.
    """
    for index, (token, draft) in enumerate(zip(sampled, drafts, strict=False)):
        if token.token_id != draft:
            return tuple(sampled[: index + 1])
    return tuple(sampled)


class KvPool(Protocol):
    """Memory of all KV blocks. `runs_per_block` says where block b is:

    1: bytes [b * block_bytes, (b + 1) * block_bytes), one run over all layers.
    spec.kv_layers: one run for each layer, of run_bytes = block_bytes / runs_per_block; that of layer l begins at
    (l * num_blocks + b) * run_bytes. Not with int8 or fp8, whose scales follow the values of all layers, and not on a
    device, where a block is moved as one run.

    A transfer sends the runs of a block one after the other, so pools of both kinds can exchange blocks.
    """

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def runs_per_block(self) -> int: ...

    @property
    def is_on_host(self) -> bool:
        """False: the pool is on a device, and `buffer` raises."""
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
        """Rows whose forward pass was launched, but whose sampling was not, because it needs tokens that are not known
        yet."""
        ...

    def sample(self, rows: Mapping[int, Row]) -> None:
        """Launches the sampling of the unsampled rows. Their histories now contain the tokens that they follow.

        Called once if any rows are unsampled: after the previous step was waited for, before the next launch, and
        before `wait`. Sequences that have ended are missing from `rows`, and their outputs are undefined. Does not
        block.
        """
        ...

    def wait(self) -> Sequence[RowOut]:
        """Returns what `Engine.step` would have returned. Each flight is waited for once, in the order of launching.

        Raises the step's error.
        """
        ...


class Engine(Protocol):
    @property
    def spec(self) -> EngineSpec: ...

    @property
    def pool(self) -> KvPool: ...

    def step(self, rows: Sequence[Row], on_layer: OnLayer | None = None) -> Sequence[RowOut]:
        """Computes all rows, prefill chunks and decode rows mixed, and writes their KV.

        Returns one entry per row. A sampled token depends only on its row (its tokens, sampling, seed and position),
        not on other rows, the slot, block numbers, the worker or the drafts.

        `on_layer` is called on this thread with 1, 2, .. spec.num_layers, each after those layers' bytes of every block
        that the rows write are final. On a device it is enough that they are queued on the default stream: an event
        recorded there during the call comes after them. It may be called late but never early, and is not called again
        if a step fails. It must not raise.

        The same rows again write the same bytes, and no others in between, because what `on_layer` reported may still
        be read. Only rounding may differ, if the step has other rows (docs/engine.md, deterministic mode).
        """
        ...

    def close(self) -> None: ...


class AsyncEngine(Engine, Protocol):
    """An engine with asynchronous scheduling: it accepts the next step while one is running.

    At most two steps may be launched and not waited for.
    """

    def launch(self, rows: Sequence[Row], after: Flight | None) -> Flight:
        """Begins a step and returns. `after`: the previous step, still running, whose sampled tokens rows may
        follow."""
        ...


@runtime_checkable
class AdapterEngine(Engine, Protocol):
    """An engine that computes rows with LoRA adapters. Both methods run between two steps, on the engine's thread."""

    def load_adapter(self, adapter: Adapter) -> None:
        """Raises ModelError if the adapter does not fit the model or the limits, or its folder has changed since it was
        read, and changes nothing then. A loaded fingerprint stays as it is."""
        ...

    def unload_adapter(self, fingerprint: str) -> None:
        """No later row has this adapter. It may be loaded again. One that is not loaded is no error."""
        ...
