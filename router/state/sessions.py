"""Sessions: which requests are turns of one conversation, and when the next turn is expected. Pure.

Which requests belong to one conversation, and what is learned of a tenant's conversations, is in conversations.py. A
session may have a task: turns with one deadline. Its rules are in turns.py.

All tables are bounded. Of the tenant that has the most conversations, one leaves that is over or had one turn only, if
these are a quarter. What leaves so teaches nothing, because nobody knows whether it would go on. Nothing that a tenant
says or does changes what is predicted for another one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Final, final

from pdserve.core.durations import Alarms
from pdserve.core.results import CachedPrefix, ConversationView, SessionView
from pdserve.core.types import Slo
from router.state.conversations import Conversation, Session, SessionKey, Tenant
from router.state.interface import RequestArrived
from router.state.turns import IDLE_S, Expected, Task, paced

MAX_CONVERSATIONS: Final = 8192  # of all tenants
MAX_OF_TENANT: Final = 1024
MAX_OF_SESSION: Final = 16
MAX_TENANTS: Final = 1024  # whose learned pauses are kept without a conversation


@final
class Sessions:
    def __init__(self, counters: Counter[str] | None = None) -> None:
        """Ends of tasks are counted in `counters`, as `task_` and their state."""
        self._counters: Counter[str] = Counter() if counters is None else counters
        self._tenants: OrderedDict[str, Tenant] = OrderedDict()  # the least recently used first
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
            tenant = self._tenants[facts.tenant] = Tenant()
        self._tenants.move_to_end(facts.tenant)
        conversation = tenant.find(facts)
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
        conversation = None if tenant is None else tenant.find(facts)
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

    def _begin(self, tenant: Tenant, facts: RequestArrived, now_s: float) -> Conversation:
        self._advance_serial(now_s)
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

    def _advance_serial(self, now_s: float) -> None:
        """To the time in microseconds, so that the serials of all routers of a host have one order. Two of them have
        the same one only if they place requests in the same microsecond."""
        self._serial = max(self._serial + 1, int(now_s * 1e6))

    def _continue(self, tenant: Tenant, conversation: Conversation, facts: RequestArrived, now_s: float) -> None:
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
            tenant.pass_by(conversation)
        tenant.learn(conversation.turns, now_s - conversation.ended_s, growth)
        self._count_turn(conversation)

    def _count_turn(self, conversation: Conversation) -> None:
        conversation.turns += 1
        conversation.session.turns += 1
        if (task := conversation.session.task) is not None and task.is_running:
            task.turns += 1
        conversation.is_served = False

    def _extend(self, tenant: Tenant, conversation: Conversation, facts: RequestArrived, now_s: float) -> None:
        """The request's prompt takes the place of the one before, and the session becomes the last used."""
        session, hashes = conversation.session, facts.block_hashes
        if not session.is_named:
            if tenant.tails.get(conversation.tail) is conversation:
                del tenant.tails[conversation.tail]
            tenant.tails[hashes[-1]] = conversation
        conversation.take_prompt(hashes, facts.num_prompt_tokens)
        conversation.running += 1
        conversation.is_ending = False
        self._set_active(conversation, is_active=True)
        conversation.used_s = session.used_s = now_s
        self._advance_serial(now_s)
        session.serial = self._serial
        self._sessions.move_to_end((session.tenant, session.key))
        session.conversations[conversation.number] = session.conversations.pop(conversation.number)
        for table in (tenant.conversations, self._conversations):
            table.move_to_end(conversation.number)
        tenant.sort(conversation)

    def _expected_s(
        self, tenant: Tenant, conversation: Conversation, facts: RequestArrived, kv_tokens: int
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

    def _take_task(self, tenant: Tenant, conversation: Conversation, facts: RequestArrived, now_s: float) -> None:
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

    def _trim(self, tenant: Tenant, newest: Conversation) -> None:
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
