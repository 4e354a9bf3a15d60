"""Child processes for work that may never end (pdserve/isolated): grammars, chat templates, patterns of tokenizers.

All work first gets a little CPU time of one quick child. What takes longer goes to the slow children, with the full
limit. So quick work never waits for slow work, and both queues are fair among clients. The event loop never blocks. The
quick child of texts takes several messages at once: otherwise it would answer one in each turn of the event loop, which
takes long when it is needed most.
GrammarCheck uses the pool for grammars; router/service/text/tokenizing.py uses it for texts.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import logging
import os
import signal
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, final

from pdserve.core.errors import InternalError, InvalidRequest, Overloaded
from pdserve.core.grammar import Grammar
from pdserve.isolated.child import LATE, TOO_LONG
from pdserve.isolated.process import ChildEnded, ChildProcess
from router.service.model import ModelFacts
from router.service.text.fair_queue import ANONYMOUS, ClientKey, FairQueue, QueueLimits

BATCH_BYTES: Final = 2**15  # of messages that are sent together; pipes hold twice as many
HANGING: Final = 2.0  # multiple of the wall time after which the process itself is assumed to hang

Result = TypeVar("Result")

log = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Purpose:
    """What the children of a pool do."""

    module: str
    does: str  # as in "this machine is too busy to ..."
    num_slow: int
    quick_cpu_s: float
    slow_cpu_s: float
    wall_s: float
    queue: QueueLimits
    quick_batch: int = 1  # messages that the quick child is sent together; each may take quick_cpu_s


class LoadFailed(Exception):
    """The child has refused its first message."""

    def __init__(self, reason: Any) -> None:
        super().__init__(reason)
        self.reason = reason


@final
@dataclass(frozen=True, slots=True)
class More:
    """In addition to the limits, for work on a large message."""

    time_s: float = 0.0
    memory_bytes: int = 0


NO_MORE: Final = More()


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    load: Mapping[str, Any]
    message: Mapping[str, Any]
    more: More
    client: ClientKey
    size: int
    answer: asyncio.Future[dict[str, Any]]


@final
class Children:
    def __init__(
        self,
        purpose: Purpose,
        quick: ChildProcess | None = None,
        on_loaded: Callable[[dict[str, Any]], None] = lambda loaded: None,
    ) -> None:
        """`quick` may have been launched. `on_loaded` takes the first answer of each child."""
        self._purpose = purpose
        quick = ChildProcess(purpose.module) if quick is None else quick
        slow = [ChildProcess(purpose.module) for _ in range(purpose.num_slow)]
        self.pools = (
            ChildPool(purpose, [quick], purpose.quick_cpu_s, on_loaded, purpose.quick_batch),
            ChildPool(purpose, slow, purpose.slow_cpu_s, on_loaded),
        )

    @property
    def can_work(self) -> bool:
        return all(pool.can_work for pool in self.pools)

    async def ask(
        self,
        load: Mapping[str, Any],
        message: Mapping[str, Any],
        size: int,
        client: ClientKey,
        *,
        is_long: bool = False,
        more: More = NO_MORE,
    ) -> dict[str, Any]:
        """The child's answer, or {"ended": ...} (pdserve/isolated/child.py) if the work exceeded its CPU or memory.

        Raises Overloaded if too many wait, and for each failure that the work did not cause; LoadFailed.
        """
        answer: dict[str, Any] = {}
        for pool in self.pools[1:] if is_long else self.pools:
            answer = await pool.ask(load, message, size, client, more)
            if answer.get("ended") == LATE:
                raise self._busy()
            if answer.get("ended") != TOO_LONG:
                break
        return answer

    async def warm(self, load: Mapping[str, Any]) -> None:
        """Starts the quick child, so that the first work does not wait for it."""
        await self.pools[0].warm(load)

    async def close(self) -> None:
        for pool in self.pools:
            await pool.close()

    def _busy(self) -> Overloaded:
        return Overloaded(f"this machine is too busy to {self._purpose.does}", self._purpose.wall_s)


@final
class ChildPool:
    """A process is started when it is first needed, and after it was ended."""

    def __init__(
        self,
        purpose: Purpose,
        children: list[ChildProcess],
        cpu_s: float,
        on_loaded: Callable[[dict[str, Any]], None],
        most_at_once: int = 1,
    ) -> None:
        """`most_at_once`: messages that a child is sent together."""
        self.children = children
        self._purpose, self._cpu_s, self._on_loaded = purpose, cpu_s, on_loaded
        self._most_at_once = most_at_once
        self._idle = list(reversed(self.children))
        self._queue: FairQueue[_Asked] = FairQueue(purpose.queue)
        self._serving: set[asyncio.Task[None]] = set()
        self._has_failed = False  # the last start of a process
        self._began_s: dict[ChildProcess, float] = {}

    @property
    def can_work(self) -> bool:
        """Whether a child can be started, and not every one is busy beyond its time."""
        late_s = time.monotonic() - HANGING * self._purpose.wall_s
        is_stuck = not self._idle and all(self._began_s.get(one, late_s) < late_s for one in self.children)
        return not self._has_failed and not is_stuck

    async def ask(
        self, load: Mapping[str, Any], message: Mapping[str, Any], size: int, client: ClientKey, more: More = NO_MORE
    ) -> dict[str, Any]:
        """Raises Overloaded and LoadFailed."""
        asked = _Asked(load, message, more, client, size, asyncio.get_running_loop().create_future())
        self._queue.put(asked, client, size, self._purpose.wall_s)
        self._dispatch()
        return await asked.answer

    async def warm(self, load: Mapping[str, Any]) -> None:
        if self._idle and not self._idle[-1].is_started:
            child = self._idle.pop()
            try:
                await self._start(child, load)
            finally:
                self._idle.append(child)
                self._dispatch()

    async def close(self) -> None:
        while (taken := self._queue.take(0.0)) is not None:
            taken[0].answer.cancel()
        serving = list(self._serving)
        for task in serving:
            task.cancel()
        if serving:
            await asyncio.wait(serving)
        for child in self.children:
            child.end()
            await child.wait_until_ended()

    def _dispatch(self) -> None:
        while self._idle and (batch := self._next_batch()):
            task = asyncio.create_task(self._serve(self._idle.pop(), batch), name="child")
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    def _next_batch(self) -> deque[_Asked]:
        batch: deque[_Asked] = deque()
        num_bytes = 0
        while len(batch) < self._most_at_once and num_bytes < BATCH_BYTES:
            if (taken := self._queue.take(time.monotonic())) is None:
                break
            asked, client = taken
            if asked.answer.done():  # the caller no longer waits
                self._queue.forget(client)
                continue
            batch.append(asked)
            num_bytes += asked.size
        return batch

    async def _serve(self, child: ChildProcess, batch: deque[_Asked]) -> None:
        """If the child ends, the rest of the batch gets a new one."""
        began_s = self._began_s[child] = time.monotonic()
        try:
            while batch:
                try:
                    await self._send(child, batch)
                except Exception as error:  # any error is passed to the callers
                    # A child that had ended before costs one message. A child that does not start costs all.
                    for _ in range(1 if isinstance(error, Overloaded) else len(batch)):
                        self._queue.forget(batch[0].client)
                        _fail(batch.popleft(), copy.copy(error))
                    continue
                while batch and child.is_started:
                    asked = batch[0]
                    try:
                        answer = await self._receive(child, asked)
                        if not asked.answer.done():
                            asked.answer.set_result(answer)
                    except Exception as error:  # as above
                        _fail(asked, error)
                    now_s = self._began_s[child] = time.monotonic()
                    self._queue.charge(batch.popleft().client, now_s - began_s, now_s)
                    began_s = now_s
        finally:
            for asked in batch:
                self._queue.forget(asked.client)
                asked.answer.cancel()
            del self._began_s[child]
            self._idle.append(child)
            self._dispatch()

    async def _send(self, child: ChildProcess, batch: Sequence[_Asked]) -> None:
        if not child.is_started:
            await self._start(child, batch[0].load)
        messages = [
            {
                **one.message,
                "cpu_s": self._cpu_s + one.more.time_s,
                "wall_s": self._purpose.wall_s + one.more.time_s,
                "more_bytes": one.more.memory_bytes,
            }
            for one in batch
        ]
        await self._within(child, child.send(messages), max(one.more.time_s for one in batch))

    async def _receive(self, child: ChildProcess, asked: _Asked) -> dict[str, Any]:
        answer = await self._within(child, child.receive(), asked.more.time_s)
        if answer.get("ended") == -signal.SIGKILL:
            child.end()  # its messages may be out of step
            raise self._killed()
        return answer

    async def _within(self, child: ChildProcess, work: Awaitable[Result], more_s: float) -> Result:
        """Ends a child that fails or hangs."""
        try:
            async with asyncio.timeout(HANGING * (self._purpose.wall_s + more_s)):
                return await work
        except TimeoutError:
            child.end()
            raise Overloaded(f"this machine is too busy to {self._purpose.does}", self._purpose.wall_s) from None
        except ChildEnded:
            child.end()
            raise self._killed() from None
        except BaseException:
            child.end()
            raise

    async def _start(self, child: ChildProcess, load: Mapping[str, Any]) -> None:
        try:
            loaded = await child.start(load)
        except (ChildEnded, TimeoutError, OSError) as error:
            self._note_failure("a child process did not start", error)
            raise InternalError(f"the process to {self._purpose.does} did not start") from error
        if loaded["failed"] is not None:
            self._note_failure("a child process cannot load", loaded["failed"])
            raise LoadFailed(loaded["failed"])
        self._has_failed = False
        self._on_loaded(loaded)
        log.info("a child process is up", extra={"purpose": self._purpose.does, "pid": child.pid})

    def _note_failure(self, what: str, cause: object) -> None:
        """Logs the first of several in a row, because a start is tried again for each request."""
        if not self._has_failed:
            log.error(what, extra={"purpose": self._purpose.does, "cause": str(cause)})
        self._has_failed = True

    def _killed(self) -> Overloaded:
        return Overloaded(f"the process to {self._purpose.does} was killed", self._purpose.wall_s)


def _fail(asked: _Asked, error: Exception) -> None:
    if not asked.answer.done():
        asked.answer.set_exception(error)


# --- grammars -------------------------------------------------------------------------------------------------
# Checks grammars in child processes, and caches the results.
#
# Failures that the grammar did not cause raise Overloaded and are not cached: a killed process, too many waiting
# grammars, or no answer within CHECK_S. A slow grammar reaches its CPU limit before CHECK_S, unless the machine is too
# busy.

CHECK_S: Final = 2.0
QUICK_CPU_S: Final = 0.05
SLOW_CPU_S: Final = 0.5  # twice the limit of an admitted grammar (pdserve/structured/checker.py)
MAX_CHECKERS: Final = 4  # each process has a copy of the vocabulary
MAX_REMEMBERED: Final = 4096
QUEUE: Final = QueueLimits(items="grammars", most=256, of_host=128, of_client=16, size=64 * 2**20)
TOO_LONG_TO_COMPILE: Final = "it takes too long to compile"
TOO_LARGE: Final = "it takes too much memory to compile"
EXPECTED: Final = "a grammar that compiles and can be met"


@final
class GrammarCheck:
    def __init__(self, model: Path | None, check_s: float = CHECK_S) -> None:
        """`model` is the model's folder. If it is None, every grammar is rejected."""
        self._model = model
        self.children = Children(
            Purpose(
                module="pdserve.structured.checker",
                does="compile a grammar",
                num_slow=max(1, min(MAX_CHECKERS, os.cpu_count() or 1) - 1),
                quick_cpu_s=QUICK_CPU_S,
                slow_cpu_s=SLOW_CPU_S,
                wall_s=check_s,
                queue=QUEUE,
            )
        )
        self._reasons: OrderedDict[bytes, str | None] = OrderedDict()  # None: admitted
        self._asked: dict[bytes, asyncio.Task[str | None]] = {}

    async def check(self, grammar: Grammar, model: ModelFacts, client: ClientKey = ANONYMOUS) -> None:
        """Raises InvalidRequest with the reason, and Overloaded if too many grammars wait."""
        if self._model is None:
            raise InvalidRequest(grammar.field, "a grammar", "no grammar: this model does not support them")
        name = f"{grammar.kind.value}:{model.has_older_grammars:d}:{grammar.text}"
        key = hashlib.sha256(name.encode()).digest()
        if key in self._reasons:
            self._reasons.move_to_end(key)
            reason = self._reasons[key]
        else:
            task = self._asked.get(key)
            if task is None:
                task = self._asked[key] = asyncio.create_task(self._ask(key, grammar, model, client), name="grammar")
            reason = await asyncio.shield(task)  # it continues if the caller disconnects
        if reason is not None:
            raise InvalidRequest(grammar.field, f"one that cannot be used ({reason})", EXPECTED)

    async def close(self) -> None:
        """Ends the processes and the waiting checks."""
        asked = list(self._asked.values())
        for task in asked:
            task.cancel()
        if asked:
            await asyncio.wait(asked)
        await self.children.close()

    async def _ask(self, key: bytes, grammar: Grammar, model: ModelFacts, client: ClientKey) -> str | None:
        try:
            reason = self._reasons[key] = await self._reason(grammar, model, client)
        finally:
            del self._asked[key]
        while len(self._reasons) > MAX_REMEMBERED:
            self._reasons.popitem(last=False)
        return reason

    async def _reason(self, grammar: Grammar, model: ModelFacts, client: ClientKey) -> str | None:
        load = {"model": str(self._model), "vocab_size": model.vocab_size, "eos": list(model.eos_token_ids)}
        message = {"kind": grammar.kind.value, "text": grammar.text, "for_older": model.has_older_grammars}
        try:
            answer = await self.children.ask(load, message, len(grammar.text), client)
        except LoadFailed as error:
            raise InvalidRequest("structured_output", "a grammar", f"none: {error}") from None
        if "ended" in answer:
            return TOO_LONG_TO_COMPILE if answer["ended"] == TOO_LONG else TOO_LARGE
        rejected: str | None = answer["rejected"]
        return rejected
