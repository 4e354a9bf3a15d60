"""The work of one decode step, and of one that is planned before the results of the previous one are read. Pure.

The engine's rows are created on demand. The simulator has no engine and never creates rows. This saves time, because
the rows of a long prompt copy its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import final

from decode_worker.decode_sequence import DecodeSequence, DecodeStage
from pdserve.core.attempt import AttemptKey
from pdserve.core.effects import StepAccount
from pdserve.core.kv.cache import KvCache
from pdserve.engine.interface import NEW_ROW, PENDING, ContinuedRows, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """How the rows of a plain decode step continue the rows of step number `before` (see ContinuedRows)."""

    before: int
    places: Sequence[int]  # for each sequence of `decoding`, its row in the earlier step
    starts: Sequence[int]  # the position that each sequence of `decoding` computes
    is_async: bool


@final
class KnownRows(Mapping[int, Row]):
    """Rows by number, built on access. An engine that keeps grammar states of the rows accesses none."""

    def __init__(self, rows: dict[int, DecodeSequence], block_size: int) -> None:
        self._rows, self._block_size = rows, block_size

    def __getitem__(self, index: int) -> Row:
        return self._rows[index].row(1, self._block_size)

    def __contains__(self, index: object) -> bool:
        return index in self._rows

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


@dataclass(kw_only=True)  # no slots, because of cached_property
class DecodeStep:
    """Each sequence of `decoding` computes one position and its drafts. Each of `prefilling` computes prompt
    positions."""

    decoding: list[DecodeSequence]
    drafts: list[list[int]] | None  # one list for each sequence of `decoding`
    prefilling: list[tuple[DecodeSequence, int]]
    account: StepAccount
    block_size: int
    number: int
    continuation: Continuation | None = None

    @property
    def is_empty(self) -> bool:
        return not self.decoding and not self.prefilling

    @property
    def is_plain(self) -> bool:
        """Whether it has only decode rows of one token each."""
        return bool(self.decoding) and not self.prefilling and self.drafts is None

    def shares(self) -> Iterator[tuple[DecodeSequence, int]]:
        """Each sequence with the number of its computed positions, without drafts, in the order of `rows`."""
        for sequence in self.decoding:
            yield sequence, 1
        yield from self.prefilling

    @property
    def keys(self) -> list[AttemptKey]:
        return [sequence.key for sequence, _ in self.shares()]

    def rows_again(self) -> list[Row | None]:
        """The rows, built again after all earlier tokens are known; None for ended sequences."""
        again: list[Row | None] = []
        for sequence, count in self.shares():
            is_here = sequence.stage is DecodeStage.RUNNING and bool(sequence.blocks)
            again.append(sequence.row(count, self.block_size) if is_here else None)
        return again

    def known_rows(self, indexes: Iterable[int]) -> KnownRows:
        """The rows of `decoding` at `indexes`, in an asynchronous step, built after the previous step was read. Their
        histories contain the tokens that were pending. Ended sequences are missing."""
        assert self.continuation is not None
        starts, known = self.continuation.starts, dict[int, DecodeSequence]()
        for index in indexes:
            sequence, start = self.decoding[index], starts[index]
            is_here = sequence.stage is DecodeStage.RUNNING and sequence.blocks
            if is_here and sequence.computed == start == len(sequence.tokens) - 1:
                known[index] = sequence
        return KnownRows(known, self.block_size)

    @cached_property
    def rows(self) -> Sequence[Row]:
        """The engine's rows. They are built at the first access, which must come before any change of the sequences."""
        size = self.block_size
        if self.continuation is not None:
            continuation = self.continuation
            return ContinuedRows(
                self._continued,
                continuation.places,
                number=self.number,
                before=continuation.before,
                is_async=continuation.is_async,
            )
        if self.drafts is None:
            rows = [sequence.row(1, size) for sequence in self.decoding]
        else:
            rows = [sequence.row(1, size, each) for sequence, each in zip(self.decoding, self.drafts, strict=True)]
        rows += [sequence.row(count, size) for sequence, count in self.prefilling]
        return rows

    def _continued(self, index: int) -> Row:
        assert self.continuation is not None
        sequence, start, place = self.decoding[index], self.continuation.starts[index], self.continuation.places[index]
        is_pending = self.continuation.is_async and place != NEW_ROW
        return Row(
            tokens=(PENDING,) if is_pending else sequence.tokens[start : start + 1],
            start=start,
            blocks=sequence.blocks,
            sample=sequence.attempt.sampling,
            history=sequence.tokens,
            prompt_len=sequence.prompt_len,
            follows=place if is_pending else None,
            adapter=sequence.attempt.adapter,
        )


def places_in(step: DecodeStep | None, decoding: Sequence[DecodeSequence]) -> Sequence[int]:
    """For each sequence of `decoding`, its position among the decode rows of `step`, or NEW_ROW."""
    if step is None:
        return [NEW_ROW] * len(decoding)
    if decoding == step.decoding:  # the most frequent case
        return range(len(decoding))
    place_of = {sequence: place for place, sequence in enumerate(step.decoding)}
    return [place_of.get(sequence, NEW_ROW) for sequence in decoding]


# --- asynchronous scheduling ----------------------------------------------------------------------------------
# The next step is planned before the results of the previous one are read. The device then always has queued work, and
# the host handles tokens while it computes. Only plain decode steps are asynchronous: each row's input token is the one
# that the previous step samples, which the engine knows before this process does.
#
# The forward pass needs only that token. Sampling may need its value: a grammar or bad words depend on it. The engine
# reports those rows (`Flight.unsampled`). They are sampled after the previous step was read (`Step.known_rows`), while
# the device computes the forward pass.
#
# A text may end with a token that has not been read yet. The next step then computes a row for it whose result is
# ignored. That row still writes KV, so the blocks of an ended sequence are freed only after that step.


def step_after(
    step: DecodeStep,
    running: Sequence[DecodeSequence],
    kv: KvCache,
    *,
    number: int,
    max_batch: int,
) -> DecodeStep | None:
    """The step after the running `step`; None if its plan must wait for the results of `step`.

    It must wait while a sequence prefills, and while memory is short, because preemption needs the sampled tokens.
    """
    if step.prefilling or step.drafts is not None or len(running) > max_batch:
        return None
    places = places_in(step, running)
    starts = [len(each.tokens) for each in running]
    # The remaining rows have a block for their next position, and more than one token left.
    unsure = [
        index
        for index, (sequence, start, place) in enumerate(zip(running, starts, places, strict=True))
        if start >= sequence.plain_until or place == NEW_ROW
    ]
    leaving: set[int] = set()
    short: list[DecodeSequence] = []
    for index in unsure:
        sequence, is_new = running[index], places[index] == NEW_ROW
        if sequence.remaining != 1:
            return None
        if is_new:
            starts[index] -= 1
        elif starts[index] + 1 >= sequence.ends_at:
            leaving.add(index)  # the running step samples the last token of this sequence
            continue
        if starts[index] == len(sequence.blocks) * kv.block_size:
            short.append(sequence)
    decoding = list(running)
    if leaving:
        staying = [index for index in range(len(running)) if index not in leaving]
        decoding = [running[index] for index in staying]
        places, starts = [places[index] for index in staying], [starts[index] for index in staying]
    if list(places).count(NEW_ROW) == len(places):
        return None
    fresh = kv.extend(len(short))
    if fresh is None:
        return None
    for sequence, block in zip(short, fresh, strict=True):
        sequence.blocks.append(block)
    account = StepAccount(
        decode_rows=len(decoding),
        context_tokens=sum(starts),
        prefill_tokens=0,
        prefill_token_context=0.0,
        draft_tokens=0,
    )
    return DecodeStep(
        decoding=decoding,
        drafts=None,
        prefilling=[],
        account=account,
        block_size=kv.block_size,
        number=number,
        continuation=Continuation(before=step.number, places=places, starts=starts, is_async=True),
    )


@final
class DeferredFree:
    """Blocks of ended sequences, held while a launched step may write into them."""

    def __init__(self, kv: KvCache) -> None:
        self._kv = kv
        #: Steps, oldest first, with the blocks that wait for them, and what frees those.
        self._launched: list[tuple[DecodeStep, list[tuple[list[int], Callable[[list[int]], None]]]]] = []

    @property
    def held(self) -> list[list[int]]:
        return [blocks for _, lists in self._launched for blocks, _ in lists]

    def launched(self, step: DecodeStep) -> None:
        self._launched.append((step, []))

    def ended(self, step: DecodeStep) -> None:
        """Frees the blocks that waited for this step, which no longer writes."""
        for index, (one, lists) in enumerate(self._launched):
            if one is step:
                del self._launched[index]
                for blocks, free in lists:
                    free(blocks)
                return

    def release(self, sequence: DecodeSequence) -> None:
        """The sequence has ended."""
        self._free(sequence, partial(self._kv.release, reuse_within_s=sequence.attempt.reuse_within_s))

    def give_back(self, sequence: DecodeSequence) -> None:
        """The sequence will need its blocks again, so this is not the end of a use of its text."""
        self._free(sequence, self._kv.give_back)

    def _free(self, sequence: DecodeSequence, free: Callable[[list[int]], None]) -> None:
        """Now, or after the last launched step with a row of the sequence."""
        for step, lists in reversed(self._launched):
            if any(one is sequence for one, _ in step.shares()):
                lists.append((sequence.blocks, free))
                break
        else:
            free(sequence.blocks)
        sequence.blocks = []
