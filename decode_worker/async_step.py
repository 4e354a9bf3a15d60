"""Asynchronous scheduling: plans the next step before the results of the previous one are read. Pure.

The device then always has queued work, and the host handles tokens while it computes. Only plain decode steps are
asynchronous: each row's input token is the one that the previous step samples, which the engine knows before this
process does.

The forward pass needs only that token. Sampling may need its value: a grammar or bad words depend on it. The engine
reports those rows (`Flight.unsampled`). They are sampled after the previous step was read (`Step.known_rows`), while
the device computes the forward pass.

A text may end with a token that has not been read yet. The next step then computes a row for it whose result is
ignored. That row still writes KV, so the blocks of an ended sequence are freed only after that step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from decode_worker.decode_sequence import DecodeSequence
from decode_worker.step import Continuation, DecodeStep, places_in
from pdserve.core.blocks import BlockAllocator
from pdserve.core.effects import StepAccount
from pdserve.engine.interface import NEW_ROW


def step_after(
    step: DecodeStep,
    running: Sequence[DecodeSequence],
    blocks: BlockAllocator,
    *,
    number: int,
    block_size: int,
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
        if starts[index] == len(sequence.blocks) * block_size:
            short.append(sequence)
    decoding = list(running)
    if leaving:
        staying = [index for index in range(len(running)) if index not in leaving]
        decoding = [running[index] for index in staying]
        places, starts = [places[index] for index in staying], [starts[index] for index in staying]
    if list(places).count(NEW_ROW) == len(places):
        return None
    fresh = blocks.allocate(len(short))
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
        block_size=block_size,
        number=number,
        continuation=Continuation(before=step.number, places=places, starts=starts, is_async=True),
    )


@final
class DeferredFree:
    """Blocks of ended sequences, held while a launched step may write into them."""

    def __init__(self, blocks: BlockAllocator) -> None:
        self._blocks = blocks
        self._launched: list[tuple[DecodeStep, list[list[int]]]] = []  # oldest first

    @property
    def held(self) -> list[list[int]]:
        return [blocks for _, lists in self._launched for blocks in lists]

    def launched(self, step: DecodeStep) -> None:
        self._launched.append((step, []))

    def ended(self, step: DecodeStep) -> None:
        """Frees the blocks that waited for this step, which no longer writes."""
        for index, (one, lists) in enumerate(self._launched):
            if one is step:
                del self._launched[index]
                for blocks in lists:
                    self._blocks.release(blocks)
                return

    def release(self, sequence: DecodeSequence) -> None:
        """Frees the sequence's blocks now, or after the last launched step with a row of the sequence."""
        for step, lists in reversed(self._launched):
            if any(one is sequence for one, _ in step.shares()):
                lists.append(sequence.blocks)
                break
        else:
            self._blocks.release(sequence.blocks)
        sequence.blocks = []
