"""Which requests are turns of one conversation, and what is learned of a tenant's conversations. Pure.

A session is what the client says (`session_id`, within its tenant). Without that it is one conversation, known by its
prefix. A conversation is a chain of requests, each of whose prompts extends the one before: the last full block of the
earlier prompt is among the blocks of the later one. Without a name, a block with which another conversation's prompt
begins, or that ends different prompts, tells nothing: it is part of a shared text, such as a system prompt. A session
with a name may have several, such as those of subagents.

Per tenant, and per class of conversations (by their number of turns), the router learns how long the pauses between
turns are, how much the prompts grow, and how many conversations go on. From that it predicts until when the prefix of a
conversation is used again, if it is likely to go on at all. A client's own hint is used instead, as long as most of
its tenant's hints come true, and only for as many tokens as the tenant's part of all KV memory. The learned figures are
in turns.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from router.state.interface import RequestArrived
from router.state.turns import KEPT, LEAST_SEEN, MAX_PACED_TURNS, ReuseModel, Task, class_of, turns_ahead

MAX_SCAN: Final = 4096  # last blocks of a prompt among which the end of an earlier prompt is searched
MAX_HASHES: Final = 64  # kept of one conversation
MAX_WORKERS: Final = 16  # likewise
MINOR_SHARE: Final = 4  # conversations that are over or had one turn keep one of so many places
FEW_HINTS: Final = 2.0  # that may be broken in addition to those that came true

#: Whether the client has named it, and its id. A client may choose an id that the router has made for another session.
SessionKey = tuple[bool, str]


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    tenant: str
    session_id: str  # the client's, or made of the prefix
    is_named: bool  # by the client
    began_s: float
    used_s: float
    serial: int = 0  # larger: used more recently
    turns: int = 0
    conversations: dict[int, Conversation] = field(default_factory=dict)  # the least recently used first
    task: Task | None = None  # the last one

    @property
    def is_running(self) -> bool:
        return any(one.running for one in self.conversations.values())

    @property
    def key(self) -> SessionKey:
        return self.is_named, self.session_id


@dataclass(slots=True, kw_only=True, eq=False)
class Conversation:
    number: int
    session: Session
    began_s: float
    tail: bytes = b""  # hash of the last full block of its last prompt; empty: it has none
    passed: bytes = b""  # an earlier tail that its prompt begins with, or one that it shares with another prompt
    hashes: tuple[bytes, ...] = ()  # every `stride`-th of its full blocks, and the last one
    stride: int = 1
    num_blocks: int = 0
    prompt_tokens: int = 0
    turns: int = 0
    running: int = 0
    used_s: float = 0.0
    ended_s: float | None = None  # end of its last turn; None: before the first end
    reuse_within_s: float | None = None  # as workers were told with its last turn
    hint_s: float | None = None  # of its client, while it may still come true
    held_tokens: int = 0  # charged to the tenant's part while a believed hint is open
    is_served: bool = False  # a request of its last turn was
    is_retried: bool = False  # no request of its last turn was served, so the next one is the same turn
    has_gone_idle: bool = False  # and was counted as ended, unless `is_retried`
    is_active: bool = False  # and counted as such
    is_dropped: bool = False
    is_ending: bool = False  # its session was ended while it ran
    workers: dict[str, None] = field(default_factory=dict)  # that had its requests, the last used one last

    def take_prompt(self, hashes: Sequence[bytes], num_tokens: int) -> None:
        """It takes the place of the prompt before."""
        self.tail = hashes[-1] if hashes else b""
        self.num_blocks = len(hashes)
        self.stride = 1 << max(-(-len(hashes) // MAX_HASHES) - 1, 0).bit_length()  # so that some are common
        self.hashes = _sampled(hashes, self.stride)
        self.prompt_tokens = num_tokens

    @property
    def until_s(self) -> float | None:
        """When its next turn should have come; None: it runs, or nothing is predicted."""
        if self.running or self.ended_s is None or not self.reuse_within_s:
            return None
        return self.ended_s + self.reuse_within_s

    @property
    def is_over(self) -> bool:
        """By the client's word, or because it has paused for long."""
        return not self.running and (self.has_gone_idle or self.reuse_within_s == 0.0)

    def placed_on(self, worker_ids: Iterable[str]) -> None:
        for worker_id in worker_ids:
            self.workers.pop(worker_id, None)
            self.workers[worker_id] = None
        while len(self.workers) > MAX_WORKERS:
            del self.workers[next(iter(self.workers))]

    def shared_blocks(self, other: Conversation) -> int:
        """At most so many leading blocks are also those of the other one; exact if both have every hash."""
        step = max(self.stride, other.stride)
        most = min(self.num_blocks, other.num_blocks)
        mine, theirs = (one.hashes[step // one.stride - 1 :: step // one.stride] for one in (self, other))
        differ = range(most // step)
        count = bisect_left(differ, True, key=lambda at: mine[at] != theirs[at])
        return min((count + 1) * step - 1, most)

    def cached_blocks(self, num_hashes: int) -> int:
        """Leading blocks of a worker that has so many leading ones of `hashes`."""
        return min(num_hashes * self.stride, self.num_blocks)


@dataclass(slots=True, eq=False)
class Tenant:
    sessions: dict[SessionKey, Session] = field(default_factory=dict)
    tails: dict[bytes, Conversation] = field(default_factory=dict)  # of sessions without a name
    passed: Counter[bytes] = field(default_factory=Counter)  # of its conversations
    conversations: OrderedDict[int, Conversation] = field(default_factory=OrderedDict)
    minor: OrderedDict[int, Conversation] = field(default_factory=OrderedDict)  # those that leave first, in this order
    models: dict[int, ReuseModel] = field(default_factory=dict)
    num_active: int = 0  # conversations that are not over
    held_tokens: int = 0  # of its conversations with an open hint
    kept_hints: float = 0.0
    broken_hints: float = 0.0

    @property
    def is_believed(self) -> bool:
        """Whether most of its hints come true, or few are known."""
        return self.broken_hints <= self.kept_hints + FEW_HINTS

    def sort(self, conversation: Conversation) -> None:
        """After it was used, or has ended."""
        if conversation.is_over or conversation.turns == 1:
            self.minor[conversation.number] = conversation
            self.minor.move_to_end(conversation.number, last=not conversation.is_over)
        else:
            self.minor.pop(conversation.number, None)

    @property
    def least(self) -> Conversation:
        """The one that leaves first."""
        is_crowd = MINOR_SHARE * len(self.minor) > len(self.conversations)
        return next(iter((self.minor if is_crowd else self.conversations).values()))

    def judge_hint(self, *, is_kept: bool) -> None:
        self.kept_hints = KEPT * self.kept_hints + (1.0 if is_kept else 0.0)
        self.broken_hints = KEPT * self.broken_hints + (0.0 if is_kept else 1.0)

    def model(self, turns: int) -> ReuseModel:
        found = self.models.get(class_of(turns))
        if found is None:
            found = self.models[class_of(turns)] = ReuseModel()
        return found

    def best_model(self, turns: int) -> ReuseModel:
        """That of the class, or of all conversations if it knows too little."""
        found = self.model(turns)
        return found if found.seen >= LEAST_SEEN else self.model(0)

    def turns_from(self, turn: int, own: Conversation | None, session: Session | None) -> float | None:
        """Expected number of turns of conversation `own` from its turn number `turn` on, or of another one of `session`
        that goes on for longer. None: too little is known."""
        if self.model(0).seen < LEAST_SEEN:
            return None
        ahead, held = turns_ahead(self.best_model), () if session is None else session.conversations.values()
        turns = (turn, *(one.turns for one in held if one is not own and not one.is_over))
        return max(ahead[min(one, MAX_PACED_TURNS)] for one in turns)

    def learn(self, turns: int, pause_s: float | None, growth_tokens: int = 0) -> None:
        """`pause_s` None: the conversation has ended."""
        for model in (self.model(turns), self.model(0)):
            if pause_s is None:
                model.ended()
            else:
                model.continued(pause_s, growth_tokens)

    def find(self, facts: RequestArrived) -> Conversation | None:
        """The one of which the request is a turn."""
        tails = self.tails
        if facts.session_id:
            session = self.sessions.get((True, facts.session_id))
            if session is None:
                return None
            tails = {one.tail: one for one in session.conversations.values()}
        if not tails:
            return None
        for one in reversed(facts.block_hashes[-MAX_SCAN:]):
            if one in tails:
                found = tails[one]
                return found if found.session.is_named or self._is_turn(found, facts) else None
        return tails.get(b"")  # of a named session, whose earlier prompt had no full block

    def _is_turn(self, found: Conversation, facts: RequestArrived) -> bool:
        """Whether the prompt, which begins with the blocks of that conversation, belongs to it. The last of these may
        be within a text with which many prompts begin."""
        growth, is_longer = facts.num_prompt_tokens - found.prompt_tokens, facts.block_hashes[-1] != found.tail
        if not is_longer and not growth:
            return True  # most likely the same prompt
        if found.tail in self.passed:
            return False
        if not is_longer and (growth < 0 or found.running):
            self.pass_by(found)
            return False
        return True

    def pass_by(self, conversation: Conversation) -> None:
        """Other prompts that begin with its tail are not turns of it."""
        if not conversation.passed:
            conversation.passed = conversation.tail
            self.passed[conversation.tail] += 1


def _sampled(hashes: Sequence[bytes], stride: int) -> tuple[bytes, ...]:
    if not hashes:
        return ()
    found = tuple(hashes[stride - 1 :: stride])
    return found if len(hashes) % stride == 0 else (*found, hashes[-1])
