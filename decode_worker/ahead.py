"""One step ahead: the next step is launched before the draws of the one before are read. Pure.

So the device finds its next work waiting, and what the host does with tokens costs no step. Only plain decoding goes
ahead: each row's token is the one that the step before draws for it, which the engine knows and we do not yet.

A text may end with a token that is not read yet; its row in the step ahead is computed for nothing, and what that
draws is passed over. It still writes KV, so the blocks of whoever leaves are lent on until the step has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from decode_worker.resident import Resident
from decode_worker.step import Step
from pdserve.core.blocks import BlockAllocator
from pdserve.core.effects import StepAccount


def step_after(
    step: Step, running: Sequence[Resident], blocks: BlockAllocator, *, block_size: int, max_batch: int
) -> Step | None:
    """The step that follows `step`, which runs; None where it must wait for what that draws.

    It waits where anybody reads a prompt or needs the last token on the host, and where memory is short: a
    preemption is decided on tokens that are known.
    """
    if step.reading or step.drafts is not None or len(running) > max_batch:
        return None
    rows_of = {id(resident): index for index, resident in enumerate(step.decoding)}
    decoding: list[Resident] = []
    follows: list[int | None] = []
    for resident in running:
        index, num_tokens = rows_of.get(id(resident)), len(resident.tokens)
        if num_tokens - resident.computed != 1:
            return None
        if index is not None:
            if resident.attempt.sampling.needs_history:
                return None
            if num_tokens + 1 >= resident.ends_at:
                continue  # this draw is its last
        decoding.append(resident)
        follows.append(index)
    if not any(index is not None for index in follows) or not _extend(decoding, follows, blocks, block_size):
        return None
    computed = sum(each.computed + (index is not None) for each, index in zip(decoding, follows, strict=True))
    account = StepAccount(
        decode_rows=len(decoding),
        context_tokens=computed,
        prefill_tokens=0,
        prefill_token_context=0.0,
        draft_tokens=0,
    )
    return Step(decoding=decoding, drafts=None, reading=[], account=account, block_size=block_size, follows=follows)


def _extend(
    decoding: Sequence[Resident], follows: Sequence[int | None], blocks: BlockAllocator, block_size: int
) -> bool:
    """Gives each row a block for the position that it computes; nothing changes where there are too few."""
    short = [
        each
        for each, index in zip(decoding, follows, strict=True)
        if each.computed + (index is not None) == len(each.blocks) * block_size
    ]
    fresh = blocks.allocate(len(short))
    if fresh is None:
        return False
    for each, block in zip(short, fresh, strict=True):
        each.blocks.append(block)
    return True


@final
class Lending:
    """Blocks of sequences that have left, held while a launched step may write into them."""

    def __init__(self, blocks: BlockAllocator) -> None:
        self._blocks = blocks
        self._launched: list[tuple[Step, list[list[int]]]] = []  # the oldest first

    @property
    def lent(self) -> list[list[int]]:
        return [blocks for _, lists in self._launched for blocks in lists]

    def launched(self, step: Step) -> None:
        self._launched.append((step, []))

    def ended(self, step: Step) -> None:
        """Nothing is written for the step any more. A step that was never launched lends nothing."""
        for index, (one, lists) in enumerate(self._launched):
            if one is step:
                del self._launched[index]
                for blocks in lists:
                    self._blocks.release(blocks)
                return

    def release(self, resident: Resident) -> None:
        """Gives the resident's blocks back, or lends them to the last launched step that has a row of it."""
        for step, lists in reversed(self._launched):
            if any(one is resident for one, _ in step.shares()):
                lists.append(resident.blocks)
                break
        else:
            self._blocks.release(resident.blocks)
        resident.blocks = []
