"""Runs tokenizers in threads. Chat templates, and tokenizers whose patterns may never end, run in child processes.

The threads have two queues, so that long texts neither delay short ones nor take their places. Each queue runs its
texts in order of arrival, and limits how many wait. The queue of long texts also limits the bytes of waiting requests,
because memory holds several copies of each. Each host or tenant has a share of both (pdserve/core/access/shares.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar, final

from pdserve.core.access.shares import BYTES_WEIGHT, COUNT_WEIGHT, Shares
from pdserve.core.errors import InternalError, InvalidRequest, ModelError, Overloaded
from pdserve.isolated.child import CRASHED, TOO_LONG
from pdserve.isolated.process import ChildProcess
from pdserve.text.chat import TOY_TEMPLATES, TemplateSources
from pdserve.text.chat_encoder import ChatTokens, EncodedChat, RenderedChat
from pdserve.text.child import ids_of, load_message, to_bytes, to_text
from pdserve.text.stops import ReasoningState
from pdserve.text.template_facts import MODULE, TemplateFacts, facts_of, not_loaded
from pdserve.text.tokenizer import Tokenizer
from pdserve.v1 import inference_pb2
from router.service.text.child_pool import Children, LoadFailed, More, Purpose
from router.service.text.fair_queue import ANONYMOUS, ClientKey, QueueLimits

LONG_CHARS: Final = 16_384  # takes some milliseconds
LONG_BYTES: Final = 2**17  # size of the whole request
MAX_WAITING: Final = 512  # texts in a lane
MAX_WAITING_BYTES: Final = 16 * 2**20  # in the lane of long texts
RETRY_S: Final = 0.5
STUCK_S: Final = 60.0  # no text takes so long

Result = TypeVar("Result")


@final
class TokenizerThreads:
    def __init__(self) -> None:
        self._short = _Lane("short", 2)
        self._long = _Lane("long", 1)

    async def run(
        self, num_chars: int, num_bytes: int, work: Callable[[], Result], client: ClientKey = ANONYMOUS
    ) -> Result:
        """Runs `work` on a text of `num_chars`, for a request of `num_bytes`. Raises Overloaded if too many wait."""
        is_long = num_chars > LONG_CHARS or num_bytes > LONG_BYTES
        lane = self._long if is_long else self._short
        if is_long and lane.bytes.total and not lane.bytes.fits(client.host, num_bytes):
            raise Overloaded(
                f"requests of {lane.bytes.total} bytes wait to be tokenized, of {MAX_WAITING_BYTES} at most", RETRY_S
            )
        if not lane.items.fits(client.host, 1):
            raise Overloaded(
                f"{lane.items.total} {lane.name} texts wait to be tokenized, of {MAX_WAITING} at most", RETRY_S
            )
        return await lane.run(client.host, num_bytes, work)

    @property
    def can_work(self) -> bool:
        """Whether no queue has all of its threads in texts that do not end."""
        return not any(lane.is_stuck for lane in (self._short, self._long))

    def close(self) -> None:
        for lane in (self._short, self._long):
            lane.close()


@final
class _Lane:
    def __init__(self, name: str, num_threads: int) -> None:
        self.name = name
        self.items, self.bytes = Shares(MAX_WAITING, COUNT_WEIGHT), Shares(MAX_WAITING_BYTES, BYTES_WEIGHT)
        self._num_threads = num_threads
        self._running: set[_Task[Any]] = set()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=f"tokenize-{name}")

    async def run(self, host: str, num_bytes: int, work: Callable[[], Result]) -> Result:
        self.items.add(host, 1)
        self.bytes.add(host, num_bytes)
        task = _Task(work, self._running)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, task)
        finally:
            # If the caller disconnects, the queue keeps the task until its turn, but not the text.
            task.work = None
            self.items.add(host, -1)
            self.bytes.add(host, -num_bytes)

    @property
    def is_stuck(self) -> bool:
        late_s = time.monotonic() - STUCK_S
        return sum(one.began_s < late_s for one in list(self._running)) >= self._num_threads

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


@final
class _Task(Generic[Result]):
    def __init__(self, work: Callable[[], Result], running: set[_Task[Any]]) -> None:
        self.work: Callable[[], Result] | None = work
        self.began_s = 0.0
        self._running = running

    def __call__(self) -> Result:
        work = self.work
        if work is None:
            raise CancelledError
        self.began_s = time.monotonic()
        self._running.add(self)
        try:
            return work()
        finally:
            self._running.discard(self)


# --- child processes ------------------------------------------------------------------------------------------
# Each runs pdserve/text/child.py.

# A small chat takes 0.002 s in a new process, and a longer one has more time, as below. A chat waits for this much work
# of each new client whose chat came before it.
QUICK_CPU_S: Final = 0.01
SLOW_CPU_S: Final = 1.0
WALL_S: Final = 4.0
QUICK_BATCH: Final = 16
# More time for a long request, in addition to both.
RENDERED_BYTES_PER_S: Final = 2**21
ENCODED_BYTES_PER_S: Final = 2**18
MEMORY_PER_BYTE: Final = 400  # of a text that is encoded
MAX_CHILDREN: Final = 4
RESTART_S: Final = 1.0  # between two attempts to start a child

QUEUE: Final = QueueLimits(
    items="chats and texts", most=MAX_WAITING, of_host=MAX_WAITING, of_client=MAX_WAITING, size=MAX_WAITING_BYTES
)


@final
@dataclass(frozen=True, slots=True)
class GivenChat:
    chat: inference_pb2.ChatPrompt
    has_special_tokens: bool
    add_generation_prompt: bool

    def message(self, do: str) -> dict[str, Any]:
        return {
            "do": do,
            "chat": self.chat.SerializeToString(),
            "has_special_tokens": self.has_special_tokens,
            "add_generation_prompt": self.add_generation_prompt,
        }


@contextlib.contextmanager
def launching_child(templates: TemplateSources | None) -> Iterator[ChildProcess | None]:
    """Starts the quick child beside other work, if one will be needed. It ends if that work fails.

    It ends with the thread that starts it."""
    if templates is None or templates is TOY_TEMPLATES:
        yield None
        return
    child = ChildProcess(MODULE)
    with contextlib.suppress(OSError):  # load() tries again, and names the reason
        child.launch()
    try:
        yield child
    except BaseException:
        child.end()
        raise


@final
class TextChildren:
    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: TemplateSources | None,
        folder: str,
        quick: ChildProcess | None = None,
    ) -> None:
        """`folder` is the tokenizer's, if it may not encode in this process."""
        self.facts = TemplateFacts()
        """Known after load(), and after the first chat."""
        # The toy's template is known to compile, so that its child starts with the first chat.
        self._is_needed = not (templates is None or templates is TOY_TEMPLATES) or not tokenizer.is_linear
        sources = [] if templates is None else [one for one in (templates.default, templates.tool_use) if one]
        self.tokens = ChatTokens(tokenizer, sources)
        self._load: Mapping[str, Any] = load_message(
            templates,
            control_tokens=list(self.tokens.control_tokens),
            nonce=self.tokens.names.nonce,
            folder=None if tokenizer.is_linear else folder,
        )
        self._children = Children(
            Purpose(
                module=MODULE,
                does="apply a chat template or to tokenize",
                num_slow=max(2, min(MAX_CHILDREN, os.cpu_count() or 1) - 1),
                quick_cpu_s=QUICK_CPU_S,
                slow_cpu_s=SLOW_CPU_S,
                wall_s=WALL_S,
                queue=QUEUE,
                quick_batch=QUICK_BATCH,
            ),
            quick,
            self._loaded,
        )

    @property
    def can_work(self) -> bool:
        return self._children.can_work

    async def load(self) -> None:
        """Starts the quick child. Raises ModelError if the templates or the tokenizer cannot be read."""
        if not self._is_needed:
            return
        try:
            await self._children.warm(self._load)
        except LoadFailed as error:
            raise ModelError(*error.reason) from None
        except InternalError as error:
            raise not_loaded(error.__cause__, self._load) from None

    async def keep_warm(self) -> None:
        """Starts the quick child, also after a failed start: no request may come while the health check fails."""
        while self._is_needed:
            with contextlib.suppress(InternalError, LoadFailed):  # logged, and seen in can_work
                await self._children.warm(self._load)
            await asyncio.sleep(RESTART_S)

    async def render(self, chat: GivenChat, num_bytes: int, client: ClientKey) -> RenderedChat:
        """Raises InvalidRequest, ModelError and Overloaded."""
        answer = await self._ask("chat_template", chat.message("render"), num_bytes, client)
        return RenderedChat(to_text(answer["marked"]), ReasoningState(answer["reasoning"]))

    async def encode_chat(
        self, chat: GivenChat, keep: int | None, max_chars: int | None, num_bytes: int, client: ClientKey
    ) -> EncodedChat | int:
        """The number of characters if there are more than `max_chars`."""
        message = chat.message("chat") | {"keep": keep, "max_chars": max_chars}
        answer = await self._ask("tokenizer.json", message, num_bytes, client)
        if "num_chars" in answer:
            return int(answer["num_chars"])
        return EncodedChat(ids_of(answer["ids"]), ReasoningState(answer["reasoning"]))

    async def encode_text(
        self, text: str, keep: int | None, num_bytes: int, client: ClientKey, *, has_special_tokens: bool
    ) -> list[int]:
        message = {"do": "text", "text": to_bytes(text), "keep": keep, "has_special_tokens": has_special_tokens}
        return ids_of((await self._ask("tokenizer.json", message, num_bytes, client))["ids"])

    async def bad_words(self, words: Sequence[str], client: ClientKey) -> list[tuple[int, ...]]:
        num_bytes = sum(len(one.encode()) for one in words)
        answer = await self._ask("tokenizer.json", {"do": "bad_words", "words": list(words)}, num_bytes, client)
        return [tuple(one) for one in answer["ids"]]

    async def close(self) -> None:
        await self._children.close()

    def _loaded(self, answer: Mapping[str, Any]) -> None:
        self.facts = facts_of(answer)

    async def _ask(self, part: str, message: dict[str, Any], num_bytes: int, client: ClientKey) -> dict[str, Any]:
        is_render = message["do"] == "render"
        is_long = num_bytes > (LONG_BYTES if is_render else LONG_CHARS)
        more = (
            More(num_bytes / RENDERED_BYTES_PER_S)
            if is_render
            else More(num_bytes / ENCODED_BYTES_PER_S, num_bytes * MEMORY_PER_BYTE)
        )
        try:
            answer = await self._children.ask(self._load, message, num_bytes, client, is_long=is_long, more=more)
        except LoadFailed as error:
            raise ModelError(*error.reason) from None
        if "error" in answer:
            kind, field, seen, expected = answer["error"]
            raise (ModelError if kind == "model" else InvalidRequest)(field, seen, expected)
        if answer.get("ended") == CRASHED and not is_render:
            # The library panics when a pattern has been tried ten million times at one place.
            raise ModelError(part, "a pattern that fails", "a text that its patterns read")
        if answer.get("ended") == CRASHED:
            raise InternalError("the process that applies chat templates and tokenizes failed")
        if answer.get("ended") == TOO_LONG:
            raise ModelError(
                part, "no end within its time", f"an end within {SLOW_CPU_S + more.time_s:.1f} s of CPU time"
            )
        if "ended" in answer:
            raise ModelError(part, "too much memory", "a prompt that needs less memory")
        return answer
