"""Sessions: which requests are turns of one conversation, and when the next turn is expected. Pure.

A session is what the client says (`session_id`, within its tenant). Without that it is one conversation, known by its
prefix. A conversation is a chain of requests, each of whose prompts extends the one before: the last full block of the
earlier prompt is among the blocks of the later one. Without a name, a block with which another conversation's prompt
begins, or that ends different prompts, tells nothing: it is part of a shared text, such as a system prompt. A session
with a name may have several, such as those of subagents.

Per tenant, and per class of conversations (by their number of turns), the router learns how long the pauses between
turns are, how much the prompts grow, and how many conversations go on. From that it predicts until when the prefix of a
conversation is used again, if it is likely to go on at all. A client's own hint is used instead, as long as most of
its tenant's hints come true, and only for as many tokens as the tenant's part of all KV memory.

A session may have a task: turns with one deadline. Its rules, and all that is learned, are in turns.py.

All tables are bounded. Of the tenant that has the most conversations, one leaves that is over or had one turn only, if
these are a quarter. What leaves so teaches nothing, because nobody knows whether it would go on. Nothing that a tenant
says or does changes what is predicted for another one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, final

from pdserve.core.durations import Alarms
from pdserve.core.results import CachedPrefix, ConversationView, SessionView
from pdserve.core.types import Slo
from router.state.interface import RequestArrived
from router.state.turns import (
    IDLE_S,
    KEPT,
    LEAST_SEEN,
    MAX_PACED_TURNS,
    Expected,
    ReuseModel,
    Task,
    class_of,
    paced,
    turns_ahead,
)

MAX_CONVERSATIONS: Final = 8192  # of all tenants
MAX_OF_TENANT: Final = 1024
MAX_OF_SESSION: Final = 16
MAX_TENANTS: Final = 1024  # whose learned pauses are kept without a conversation
MAX_SCAN: Final = 4096  # last blocks of a prompt among which the end of an earlier prompt is searched
MAX_HASHES: Final = 64  # kept of one conversation
MAX_WORKERS: Final = 16  # likewise
MINOR_SHARE: Final = 4  # conversations that are over or had one turn keep one of so many places
FEW_HINTS: Final = 2.0  # that may be broken in addition to those that came true

# --- sessions -------------------------------------------------------------------------------------------------

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
class _Tenant:
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


@final
class Sessions:
    def __init__(self, counters: Counter[str] | None = None) -> None:
        """Ends of tasks are counted in `counters`, as `task_` and their state."""
        self._counters: Counter[str] = Counter() if counters is None else counters
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # the least recently used first
        self._sessions: OrderedDict[tuple[str, SessionKey], Session] = OrderedDict()  # likewise
        self._conversations: OrderedDict[int, Conversation] = OrderedDict()  # likewise
        self._alarms: Alarms[int] = Alarms()  # of pauses: the end of a hint, then that of IDLE_S
        self._serial = 0
        self._num_tasks = 0  # that are running
        self._num_active = 0  # tenants with a conversation that is not over
        self._of_size: list[dict[str, None]] = [{}]  # names of tenants, by the number of their conversations

    def __len__(self) -> int:
        return len(self._sessions)

    def arrived(self, facts: RequestArrived, kv_tokens: int, now_s: float) -> Conversation | None:
        """The conversation of which the request is a turn; None: it has neither a name nor a full block.
        `kv_tokens`: that all workers can hold."""
        self.advance(now_s)
        if not facts.session_id and not facts.block_hashes:
            return None
        tenant = self._tenants.get(facts.tenant)
        if tenant is None:
            tenant = self._tenants[facts.tenant] = _Tenant()
        self._tenants.move_to_end(facts.tenant)
        conversation = self._find(tenant, facts)
        if conversation is None:
            conversation = self._begin(tenant, facts, now_s)
        else:
            self._continue(tenant, conversation, facts, now_s)
        self._extend(tenant, conversation, facts, now_s)
        conversation.reuse_within_s = self._expected_s(tenant, conversation, facts, kv_tokens)
        self._take_task(tenant, conversation, facts, now_s)
        self._trim(tenant, conversation)
        return conversation

    def targets(
        self,
        facts: RequestArrived,
        stated: frozenset[str],
        expected: Callable[[float | None, float], Expected],
        now_s: float,
    ) -> Slo:
        """Those of a request that is about to arrive, which states the ones in `stated`. `expected` is asked with the
        expected number of turns and the mean pause if the request belongs to a task."""
        if facts.slo_task_s is None and not self._num_tasks:
            return facts.slo
        tenant = self._tenants.get(facts.tenant)
        conversation = None if tenant is None else self._find(tenant, facts)
        named = tenant.sessions.get((True, facts.session_id)) if tenant is not None else None
        session = named if conversation is None else conversation.session
        task = session.task if session is not None and session.task is not None and session.task.is_running else None
        slo_s = facts.slo_task_s if task is None or facts.slo_task_s is not None else task.slo_s
        if slo_s is None or not (facts.session_id or facts.block_hashes):
            return facts.slo
        left_s = slo_s if task is None else task.began_s + slo_s - now_s
        turns, pause_s = None, 0.0
        if tenant is not None:
            turn = 1 if conversation is None else conversation.turns + 1
            turns, pause_s = tenant.turns_from(turn, conversation, session), tenant.best_model(turn).pause_s
        return paced(facts.slo, stated, left_s, expected(turns, pause_s))

    def ended(self, conversation: Conversation, now_s: float, *, is_served: bool) -> tuple[bytes, ...]:
        """A request of it has ended; `is_served`: with tokens. Returns hashes of its own blocks, in order, if its
        session was ended meanwhile."""
        self.advance(now_s)
        conversation.running -= 1
        if conversation.is_dropped:
            return ()
        conversation.is_served = conversation.is_served or is_served
        self._serve_task(conversation, now_s, is_served=is_served)
        if conversation.running:
            return ()
        conversation.is_retried = not conversation.is_served
        conversation.ended_s = conversation.used_s = conversation.session.used_s = now_s
        if conversation.is_ending:
            self._gone_idle(conversation)
            return self._own_hashes(conversation)
        if conversation.reuse_within_s == 0.0 and conversation.is_served:
            self._gone_idle(conversation)
            return ()
        wait_s = IDLE_S if conversation.hint_s is None else conversation.hint_s
        self._alarms.set(conversation.number, now_s + wait_s)
        return ()

    def find(self, tenant: str, session_id: str) -> Session | None:
        """The session that its client has named so, or else the one that `page` lists so."""
        named = self._sessions.get((tenant, (True, session_id)))
        return named or self._sessions.get((tenant, (False, session_id)))

    def end(self, session: Session, now_s: float) -> list[tuple[Conversation, tuple[bytes, ...]]]:
        """Its client expects no further turn. Returns its conversations that do not run and were not ended before, with
        hashes of their own blocks, in order; `ended` returns those of the others."""
        self.advance(now_s)
        over: list[Conversation] = []
        for one in session.conversations.values():
            if one.running:
                one.is_ending = True
            elif one.reuse_within_s != 0.0 or not one.is_over:
                over.append(one)
            self._let_go(one)
            one.reuse_within_s = 0.0
        for one in over:
            self._gone_idle(one)
        if session.task is not None and session.task.is_running:
            session.task.is_last = True
            if not session.is_running:
                self._end_task(session)
        return [(one, self._own_hashes(one)) for one in over]

    def _own_hashes(self, conversation: Conversation) -> tuple[bytes, ...]:
        """Of its blocks after those that other sessions of the tenant may have too, unless these were ended."""
        shared = 0
        for other in self._tenants[conversation.session.tenant].conversations.values():
            if other.session is not conversation.session and not (other.is_over and other.reuse_within_s == 0.0):
                shared = max(shared, conversation.shared_blocks(other))
        is_any = shared < conversation.num_blocks
        return conversation.hashes[shared // conversation.stride :] if is_any else ()

    def growth_tokens(self, conversation: Conversation) -> float:
        """Expected growth of its prompt until the next turn."""
        return self._tenants[conversation.session.tenant].best_model(conversation.turns).growth_tokens

    def page(self, tenant: str | None, after: int, most: int) -> Iterator[Session]:
        """Sessions of the tenant (None: of all), the most recently used first, from those with a serial below `after`
        on; 0: from the first."""
        found = (
            one
            for one in reversed(self._sessions.values())
            if (not after or one.serial < after) and (tenant is None or one.tenant == tenant)
        )
        return islice(found, most)

    def view(
        self,
        session: Session,
        cached: Mapping[int, Mapping[str, int]],
        block_size_of: Callable[[str], int],
        origin_s: float,
    ) -> SessionView:
        """`cached`: by the conversation's number, how many leading ones of its `hashes` each worker has. `origin_s` is
        added to all times."""
        rows = []
        for one in session.conversations.values():
            workers = sorted(cached.get(one.number, {}).items())
            rows.append(
                ConversationView(
                    turns=one.turns,
                    running=one.running,
                    prompt_tokens=one.prompt_tokens,
                    growth_tokens=0.0 if one.is_dropped else self.growth_tokens(one),
                    used_at_s=one.used_s + origin_s,
                    until_s=None if one.until_s is None else one.until_s + origin_s,
                    is_over=one.is_over,
                    is_cached_known=one.number in cached,
                    cached=tuple(
                        CachedPrefix(worker_id=name, tokens=one.cached_blocks(num_hashes) * block_size_of(name))
                        for name, num_hashes in workers
                    ),
                )
            )
        return SessionView(
            session_id=session.session_id,
            tenant=session.tenant,
            is_named=session.is_named,
            turns=session.turns,
            began_at_s=session.began_s + origin_s,
            used_at_s=session.used_s + origin_s,
            conversations=tuple(rows),
            cursor=session.serial,
            task=None if session.task is None else session.task.view(origin_s),
        )

    def check(self) -> None:
        """Raises AssertionError unless the tables agree."""
        assert len(self._conversations) <= MAX_CONVERSATIONS, "conversations are not bounded"
        by_session = [one for session in self._sessions.values() for one in session.conversations.values()]
        by_tenant = [one for tenant in self._tenants.values() for one in tenant.conversations.values()]
        assert {*by_session} == {*by_tenant} == {*self._conversations.values()}, "a conversation is in some tables only"
        assert all(number in self._conversations for number in self._alarms), "an alarm outlives its conversation"
        active = [tenant for tenant in self._tenants.values() if tenant.num_active]
        assert len(active) == self._num_active, f"{self._num_active} tenants counted, {len(active)} active"
        for tenant in self._tenants.values():
            held = sum(one.held_tokens for one in tenant.conversations.values())
            assert tenant.minor.items() <= tenant.conversations.items(), "one that leaves first has left"
            passed = Counter(one.passed for one in tenant.conversations.values() if one.passed)
            assert {**passed} == {**tenant.passed}, "tails that were passed"
            num_active = sum(one.is_active for one in tenant.conversations.values())
            assert num_active == tenant.num_active, f"{tenant.num_active} conversations counted, {num_active} active"
            assert held == tenant.held_tokens, f"{tenant.held_tokens} tokens counted, {held} held"
            assert len(tenant.conversations) <= MAX_OF_TENANT, "conversations of a tenant are not bounded"
            assert {*tenant.tails.values()} <= {*tenant.conversations.values()}, "a tail outlives its conversation"
        tasks = [one.task for one in self._sessions.values() if one.task is not None and one.task.is_running]
        assert len(tasks) == self._num_tasks, f"{self._num_tasks} tasks counted, {len(tasks)} running"
        sizes = {name: len(tenant.conversations) for name, tenant in self._tenants.items() if tenant.conversations}
        assert {name: size for size, names in enumerate(self._of_size) for name in names} == sizes, "sizes of tenants"
        for one in by_session:
            assert one.running >= 0, "a request ended twice"
            assert one.is_active or not one.running, "a conversation that runs is over"
            assert not (one.is_active and one.has_gone_idle), "a conversation that has gone idle is active"
            assert len(one.session.conversations) <= MAX_OF_SESSION

    # ------------------------------------------------------------------------------------------------------------

    def _find(self, tenant: _Tenant, facts: RequestArrived) -> Conversation | None:
        tails = tenant.tails
        if facts.session_id:
            session = tenant.sessions.get((True, facts.session_id))
            if session is None:
                return None
            tails = {one.tail: one for one in session.conversations.values()}
        if not tails:
            return None
        for one in reversed(facts.block_hashes[-MAX_SCAN:]):
            if one in tails:
                found = tails[one]
                return found if found.session.is_named or self._is_turn(tenant, found, facts) else None
        return tails.get(b"")  # of a named session, whose earlier prompt had no full block

    def _is_turn(self, tenant: _Tenant, found: Conversation, facts: RequestArrived) -> bool:
        """Whether the prompt, which begins with the blocks of that conversation, belongs to it. The last of these may
        be within a text with which many prompts begin."""
        growth, is_longer = facts.num_prompt_tokens - found.prompt_tokens, facts.block_hashes[-1] != found.tail
        if not is_longer and not growth:
            return True  # most likely the same prompt
        if found.tail in tenant.passed:
            return False
        if not is_longer and (growth < 0 or found.running):
            self._pass(tenant, found)
            return False
        return True

    def _pass(self, tenant: _Tenant, conversation: Conversation) -> None:
        """Other prompts that begin with its tail are not turns of it."""
        if not conversation.passed:
            conversation.passed = conversation.tail
            tenant.passed[conversation.tail] += 1

    def _begin(self, tenant: _Tenant, facts: RequestArrived, now_s: float) -> Conversation:
        self._serial += 1
        name = facts.session_id or f"~{facts.block_hashes[0].hex()[:8]}-{self._serial}"
        is_named = bool(facts.session_id)
        key = (is_named, name)
        session = tenant.sessions.get(key)
        if session is None:
            session = Session(tenant=facts.tenant, session_id=name, is_named=is_named, began_s=now_s, used_s=now_s)
            tenant.sessions[key] = self._sessions[facts.tenant, key] = session
        conversation = Conversation(number=self._serial, session=session, began_s=now_s)
        self._resized(facts.tenant, len(tenant.conversations), 1)
        session.conversations[conversation.number] = conversation
        tenant.conversations[conversation.number] = conversation
        self._conversations[conversation.number] = conversation
        self._count_turn(conversation)
        return conversation

    def _continue(self, tenant: _Tenant, conversation: Conversation, facts: RequestArrived, now_s: float) -> None:
        self._alarms.clear(conversation.number)
        if conversation.running or conversation.ended_s is None:
            return  # another answer to the same prompt, or a branch
        if conversation.is_retried:
            conversation.has_gone_idle = False  # it was not counted as ended
            return
        if conversation.has_gone_idle:
            conversation.has_gone_idle = False
            for model in (tenant.model(conversation.turns), tenant.model(0)):
                model.revived()
        if conversation.hint_s is not None:
            tenant.judge_hint(is_kept=True)
        growth = facts.num_prompt_tokens - conversation.prompt_tokens
        if not growth and facts.block_hashes[-1:] == (conversation.tail,):
            return  # the same prompt again
        # Later tails are within what the model has answered, which differs.
        if not conversation.session.is_named and facts.block_hashes[-1] != conversation.tail:
            self._pass(tenant, conversation)
        tenant.learn(conversation.turns, now_s - conversation.ended_s, growth)
        self._count_turn(conversation)

    def _count_turn(self, conversation: Conversation) -> None:
        conversation.turns += 1
        conversation.session.turns += 1
        if (task := conversation.session.task) is not None and task.is_running:
            task.turns += 1
        conversation.is_served = False

    def _extend(self, tenant: _Tenant, conversation: Conversation, facts: RequestArrived, now_s: float) -> None:
        """The request's prompt takes the place of the one before, and the session becomes the last used."""
        session, hashes = conversation.session, facts.block_hashes
        if not session.is_named:
            if tenant.tails.get(conversation.tail) is conversation:
                del tenant.tails[conversation.tail]
            tenant.tails[hashes[-1]] = conversation
        conversation.tail = hashes[-1] if hashes else b""
        conversation.num_blocks = len(hashes)
        conversation.stride = 1 << max(-(-len(hashes) // MAX_HASHES) - 1, 0).bit_length()  # so that some are common
        conversation.hashes = _sampled(hashes, conversation.stride)
        conversation.prompt_tokens = facts.num_prompt_tokens
        conversation.running += 1
        conversation.is_ending = False
        self._set_active(conversation, is_active=True)
        conversation.used_s = session.used_s = now_s
        self._serial += 1
        session.serial = self._serial
        self._sessions.move_to_end((session.tenant, session.key))
        session.conversations[conversation.number] = session.conversations.pop(conversation.number)
        for table in (tenant.conversations, self._conversations):
            table.move_to_end(conversation.number)
        tenant.sort(conversation)

    def _expected_s(
        self, tenant: _Tenant, conversation: Conversation, facts: RequestArrived, kv_tokens: int
    ) -> float | None:
        self._let_go(conversation)
        hint_s, tokens = facts.reuse_within_s, facts.num_prompt_tokens
        if hint_s == 0.0:
            return 0.0  # it costs no other tenant anything
        conversation.hint_s = hint_s
        is_within_part = tenant.held_tokens + tokens <= kv_tokens // self._num_active
        if hint_s is not None and tenant.is_believed and is_within_part:
            conversation.held_tokens = tokens
            tenant.held_tokens += tokens
            return hint_s
        return tenant.best_model(conversation.turns).within_s()

    def _let_go(self, conversation: Conversation) -> None:
        """Its hint is no longer open."""
        self._tenants[conversation.session.tenant].held_tokens -= conversation.held_tokens
        conversation.held_tokens, conversation.hint_s = 0, None

    def _take_task(self, tenant: _Tenant, conversation: Conversation, facts: RequestArrived, now_s: float) -> None:
        """The request is a turn of its session's task, if there is one."""
        session, task = conversation.session, conversation.session.task
        if task is None or not task.is_running:
            if facts.slo_task_s is None:
                return
            self._num_tasks += 1
            task = session.task = Task(began_s=now_s, slo_s=facts.slo_task_s, slo=facts.slo)
        elif facts.slo_task_s is not None:
            task.slo_s = facts.slo_task_s
        task.slo, task.is_last = facts.slo, False
        turns = tenant.turns_from(conversation.turns, conversation, session)
        task.turns_left = None if turns is None else turns - 1.0

    def _serve_task(self, conversation: Conversation, now_s: float, *, is_served: bool) -> None:
        session, task = conversation.session, conversation.session.task
        if task is None or not task.is_running:
            return
        task.served_s = now_s if is_served else None
        task.is_last |= is_served and conversation.reuse_within_s == 0.0
        if task.is_last and not session.is_running:
            self._end_task(session)

    def _end_task(self, session: Session, *, is_known: bool = True) -> None:
        if session.task is not None and session.task.is_running:
            session.task.end(is_known=is_known)
            self._num_tasks -= 1
            self._counters[f"task_{session.task.state}"] += 1

    def _gone_idle(self, conversation: Conversation) -> None:
        self._alarms.clear(conversation.number)
        if conversation.has_gone_idle:
            return
        conversation.has_gone_idle = True
        tenant = self._tenants[conversation.session.tenant]
        if not conversation.is_retried:
            tenant.learn(conversation.turns, None)
        tenant.sort(conversation)
        self._set_active(conversation, is_active=False)

    def _set_active(self, conversation: Conversation, *, is_active: bool) -> None:
        if conversation.is_active == is_active:
            return
        conversation.is_active = is_active
        tenant = self._tenants[conversation.session.tenant]
        self._num_active -= bool(tenant.num_active)
        tenant.num_active += 1 if is_active else -1
        self._num_active += bool(tenant.num_active)

    def advance(self, now_s: float) -> None:
        """Handles pauses that have become long by now."""
        while (number := self._alarms.pop_due(now_s)) is not None:
            conversation = self._conversations[number]
            ended_s = conversation.ended_s
            assert ended_s is not None, "only pauses have an alarm"
            if conversation.hint_s is not None:
                self._tenants[conversation.session.tenant].judge_hint(is_kept=False)
                self._let_go(conversation)
            if now_s < ended_s + IDLE_S:
                self._alarms.set(number, ended_s + IDLE_S)
            else:
                self._gone_idle(conversation)
                session = conversation.session
                if now_s >= session.used_s + IDLE_S and not session.is_running:
                    self._end_task(session)

    def _trim(self, tenant: _Tenant, newest: Conversation) -> None:
        """Drops conversations over the limits, but not the newest."""
        many = newest.session.conversations.values()
        if len(many) > MAX_OF_SESSION:
            others = [one for one in many if one is not newest]
            self._drop(next((one for one in others if one.is_over or one.turns == 1), others[0]))
        if len(tenant.conversations) > MAX_OF_TENANT:
            self._drop(tenant.least)
        if len(self._conversations) > MAX_CONVERSATIONS:
            least = self._tenants[next(iter(self._of_size[-1]))].least
            self._drop(next(iter(self._conversations.values())) if least is newest else least)
        if len(self._tenants) > MAX_TENANTS:
            name, oldest = next(iter(self._tenants.items()))
            if oldest.conversations:
                self._tenants.move_to_end(name)
            else:
                del self._tenants[name]

    def _resized(self, tenant: str, size: int, change: int) -> None:
        """The number of its conversations changes."""
        if size:
            del self._of_size[size][tenant]
        if size + change == len(self._of_size):
            self._of_size.append({})
        if size + change:
            self._of_size[size + change][tenant] = None
        while len(self._of_size) > 1 and not self._of_size[-1]:
            self._of_size.pop()

    def _drop(self, conversation: Conversation) -> None:
        session = conversation.session
        tenant = self._tenants[session.tenant]
        self._let_go(conversation)
        self._alarms.clear(conversation.number)
        conversation.is_dropped = True
        self._set_active(conversation, is_active=False)
        if tenant.tails.get(conversation.tail) is conversation:
            del tenant.tails[conversation.tail]
        del session.conversations[conversation.number]
        self._resized(session.tenant, len(tenant.conversations), -1)
        del tenant.conversations[conversation.number]
        tenant.minor.pop(conversation.number, None)
        if conversation.passed:
            tenant.passed[conversation.passed] -= 1
            if not tenant.passed[conversation.passed]:
                del tenant.passed[conversation.passed]
        del self._conversations[conversation.number]
        if not session.conversations:
            self._end_task(session, is_known=False)
            del tenant.sessions[session.key]
            del self._sessions[session.tenant, session.key]


def _sampled(hashes: Sequence[bytes], stride: int) -> tuple[bytes, ...]:
    if not hashes:
        return ()
    found = tuple(hashes[stride - 1 :: stride])
    return found if len(hashes) % stride == 0 else (*found, hashes[-1])
