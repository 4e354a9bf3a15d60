"""What a tenant may use, and what separates tenants: quotas, rates of calls, labels of metrics, salts of the prefix
cache. Pure.

Quotas limit tokens per minute and answers in progress. Routers of one launcher share the counts
(router/service/router_group.py); other routers count on their own.

A tenant's token bucket has room for the tokens of BURST_S seconds, and fills evenly. A call needs its prompt tokens
and, for each answer, RESERVED_TOKENS of output (or `max_tokens`, if that is less). It is admitted if the bucket has as
many tokens, or if the bucket is full. The tokens are taken from the bucket at once. Further output tokens are taken as
they are generated, so the level may fall below zero. At the end of an answer, reserved tokens that it did not generate
are returned. All tokens are returned for an answer that the cluster rejected or failed before its first token.

An answer is in progress until no worker holds memory for it. So a client gains nothing by cancelling and calling again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from hashlib import blake2b
from typing import Final, final

from pdserve.core.access.key_file import DEFAULT_TENANT, RESERVED_NAMES, Tenant
from pdserve.core.access.proof import ClusterSecret
from pdserve.core.durations import clamped_s
from pdserve.core.errors import InvalidRequest, Overloaded, QuotaExceeded
from pdserve.core.protocol import Load
from router.state.interface import Event, TimePassed, WorkerForgotten, WorkerLost

RESERVED_TOKENS: Final = 256
# Short, because a tenant may use a full bucket at once and delay other tenants (docs/benchmarks/scheduling.md#tenants).
# A call that needs more than a full bucket is admitted, and the tenant waits longer afterwards.
BURST_S: Final = 1.0
WEIGHT: Final = 0.2  # weight of the last answer in the mean duration
FIRST_RETRY_S: Final = 1.0  # retry time before the first answer has ended
RETRY_S: Final = (0.05, 30.0)  # shortest and longest retry time for answers in progress


class TenantCounts:
    """The counts of one tenant. They are read and changed in a `with` block, because routers may share them. A block
    raises Overloaded, before it begins, if they cannot be had now."""

    __slots__ = ("at_s", "level", "others", "running")

    def __init__(self) -> None:
        self.level: float | None = None  # tokens in the bucket at `at_s`; None: it is full
        self.at_s = 0.0
        self.running = 0  # answers in progress of this router
        self.others = 0  # answers in progress of the routers that share the counts

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def defer(self, tokens: float) -> None:
        """After a block could not begin: the next one adds `tokens` to the bucket, and has the new `running`."""


@final
class QuotaAccount:
    """The current usage of one tenant. Methods whose docstring says so are called in a `with` block of `counts`."""

    __slots__ = ("burst_s", "counts", "mean_s", "tenant")

    def __init__(self, tenant: Tenant, burst_s: float, counts: TenantCounts) -> None:
        self.tenant, self.burst_s, self.counts = tenant, burst_s, counts
        self.mean_s: float | None = None  # duration of an answer

    @property
    def most(self) -> float:
        """Tokens that the bucket can hold; 0 without a limit."""
        return (self.tenant.tokens_per_minute or 0) * self.burst_s / 60.0

    def refill(self, now_s: float) -> float:
        """Returns the level of the bucket. In a block."""
        counts, limit = self.counts, self.tenant.tokens_per_minute
        if limit is not None:
            level = self.most if counts.level is None else counts.level
            counts.level = min(level + max(now_s - counts.at_s, 0.0) * limit / 60.0, self.most)
        counts.at_s = max(counts.at_s, now_s)
        return counts.level or 0.0

    def change(self, tenant: Tenant, now_s: float) -> None:
        """Applies the limits of a new key file. In a block."""
        if tenant != self.tenant:
            self.refill(now_s)
            self.tenant = tenant
            if tenant.tokens_per_minute is None:
                self.counts.level = None
            self.refill(now_s)

    def check_answers(self, count: int) -> None:
        """Raises InvalidRequest if the quota never allows a call with so many answers."""
        name, most = self.tenant.name, self.tenant.max_concurrent
        if most is not None and count > most:
            raise InvalidRequest("n", f"{count} answers", f"at most {most}, the quota max_concurrent of tenant {name}")

    def take_slots(self, count: int) -> None:
        """In a block. Raises QuotaExceeded."""
        name, most, running = self.tenant.name, self.tenant.max_concurrent, self.counts.running + self.counts.others
        if most is not None and running + count > most:
            retry_s = FIRST_RETRY_S if self.mean_s is None else clamped_s(self.mean_s / most, *RETRY_S)
            message = f"max_concurrent of tenant {name}: {running} of {most} answers are in progress"
            raise QuotaExceeded("max_concurrent", f"{message}; retry in {retry_s:.2f} s", retry_s)
        self.counts.running += count

    def check_tokens(self, count: int, now_s: float) -> None:
        """In a block. Raises QuotaExceeded if the bucket has fewer tokens."""
        limit = self.tenant.tokens_per_minute
        if limit is None:
            return
        level = self.refill(now_s)
        missing = min(float(count), self.most) - level
        if missing > 0.0:
            retry_s = missing * 60.0 / limit
            left = max(int(level), 0)
            message = (
                f"tokens_per_minute of tenant {self.tenant.name}, which is {limit}: {left} tokens are left, and the "
                f"request needs {count}; retry in {retry_s:.2f} s"
            )
            raise QuotaExceeded("tokens_per_minute", message, retry_s)

    def add(self, tokens: int) -> None:
        if tokens and self.tenant.tokens_per_minute is not None:
            try:
                with self.counts:
                    self.put(tokens)
            except Overloaded:
                self.counts.defer(tokens)

    def put(self, tokens: int) -> None:
        """In a block."""
        if self.tenant.tokens_per_minute is not None:
            level = self.most if self.counts.level is None else self.counts.level
            self.counts.level = min(level + tokens, self.most)

    def freed(self, count: int, seconds: float | None) -> None:
        if count:
            self.counts.running -= count
            try:
                with self.counts:
                    pass
            except Overloaded:
                self.counts.defer(0)
        assert self.counts.running >= 0, f"tenant {self.tenant.name} has a negative number of answers in progress"
        if seconds is not None:
            self.mean_s = seconds if self.mean_s is None else self.mean_s + WEIGHT * (seconds - self.mean_s)


@final
class AnswerClaim:
    """What one answer uses of its tenant's quotas."""

    __slots__ = ("_account", "_began_s", "_emitted", "_has_ended", "_has_slot", "_prompt", "_reserved")

    def __init__(self, account: QuotaAccount, prompt_tokens: int, reserved: int, now_s: float) -> None:
        self._account, self._began_s = account, now_s
        self._prompt, self._reserved = prompt_tokens, reserved
        self._emitted = 0
        self._has_ended, self._has_slot = False, True

    @property
    def tenant(self) -> str:
        return self._account.tenant.name

    def emitted(self, num_tokens: int) -> None:
        over = max(self._emitted, self._reserved)
        self._emitted += num_tokens
        self._account.add(over - max(self._emitted, self._reserved))

    def end(self, *, is_free: bool) -> None:
        """Ends the answer. With `is_free`, nothing is charged if no token was generated. Idempotent."""
        if self._has_ended:
            return
        self._has_ended = True
        self._account.add(max(self._reserved - self._emitted, 0))
        if is_free and not self._emitted:
            self._account.add(self._prompt)

    def release(self, now_s: float) -> None:
        """Frees the answer's slot, when no worker holds memory for it. Idempotent."""
        if self._has_slot:
            self._has_slot = False
            self._account.freed(1, now_s - self._began_s)


@final
class CallClaim:
    """What one call uses of its tenant's quotas, until its answers have begun."""

    __slots__ = ("_account", "_claims", "_num_taken", "_slots")

    def __init__(self, account: QuotaAccount) -> None:
        self._account = account
        self._slots = 1  # one for the call itself
        self._claims: list[AnswerClaim] = []
        self._num_taken = 0

    def admit(self, prompt_tokens: int, max_tokens: Sequence[int], now_s: float) -> None:
        """Takes the quotas of an answer for each of `max_tokens`. Raises QuotaExceeded, and InvalidRequest for more
        answers than may ever be in progress."""
        account, more = self._account, len(max_tokens) - self._slots
        reserved = [min(one, RESERVED_TOKENS) for one in max_tokens]
        cost = prompt_tokens + sum(reserved)
        account.check_answers(len(max_tokens))
        with account.counts:
            account.check_tokens(cost, now_s)
            account.take_slots(more)
            account.put(-cost)
        self._slots = 0
        self._claims = [
            AnswerClaim(account, prompt_tokens if index == 0 else 0, one, now_s) for index, one in enumerate(reserved)
        ]

    def take(self) -> AnswerClaim:
        """Returns the claim of the next answer. The caller must end and release it."""
        self._num_taken += 1
        return self._claims[self._num_taken - 1]

    def close(self, now_s: float) -> None:
        """Gives back everything that no answer has taken. Idempotent."""
        self._account.freed(self._slots, None)
        self._slots = 0
        for one in self._claims[self._num_taken :]:
            one.end(is_free=True)
            one.release(now_s)
        self._num_taken = len(self._claims)


@final
class Quotas:
    def __init__(
        self, burst_s: float = BURST_S, counts_of: Callable[[str], TenantCounts] = lambda tenant: TenantCounts()
    ) -> None:
        self._burst_s = burst_s
        self._counts_of = counts_of
        self._accounts: dict[str, QuotaAccount] = {}

    def open(self, tenant: Tenant, now_s: float, *, least_tokens: int = 1) -> CallClaim:
        """Opens a claim for a call that needs at least `least_tokens`. Raises Overloaded.

        The caller closes the claim.
        """
        account = self._accounts.get(tenant.name)
        if account is None:
            counts = TenantCounts() if tenant == DEFAULT_TENANT else self._counts_of(tenant.name)
            account = self._accounts[tenant.name] = QuotaAccount(tenant, self._burst_s, counts)
        with account.counts:
            account.change(tenant, now_s)
            if least_tokens:
                account.check_tokens(least_tokens, now_s)  # before any work on the prompt
            account.take_slots(1)
        return CallClaim(account)

    def running(self, tenant: str) -> int:
        """The tenant's answers in progress that this router serves."""
        account = self._accounts.get(tenant)
        return 0 if account is None else account.counts.running

    def all_running(self) -> dict[str, int]:
        """The answers in progress of each tenant that has called."""
        return {name: account.counts.running for name, account in self._accounts.items()}

    def level(self, tenant: str, now_s: float) -> float | None:
        """Tokens in the tenant's bucket; None without a limit, or before its first call."""
        account = self._accounts.get(tenant)
        if account is None or account.tenant.tokens_per_minute is None:
            return None
        with account.counts:
            return account.refill(now_s)

    def forget_all_but(self, tenants: Collection[str]) -> None:
        """Drops tenants that were removed from the key file and have nothing in progress."""
        kept = self._accounts.items()
        self._accounts = {
            name: one for name, one in kept if name in tenants or one.counts.running or name == DEFAULT_TENANT.name
        }


# --- ended answers that still hold memory ---------------------------------------------------------------------
# They count as in progress until no worker holds memory for them.


@final
class PendingReleases:
    def __init__(self, knows: Callable[[str], bool]) -> None:
        """`knows(request_id)` is true until no worker holds memory for the request."""
        self._knows = knows
        self._claims: dict[str, AnswerClaim] = {}

    def ended(self, request_id: str, claim: AnswerClaim, now_s: float) -> None:
        """The request has ended."""
        former = self._claims.get(request_id)
        if former is not None:  # the id was reused before the release was noticed
            former.release(now_s)
        self._claims[request_id] = claim
        self._release((request_id,), now_s)

    def after(self, event: Event, now_s: float) -> None:
        """Called after the state has handled an event. A message about an attempt can free only its own request. The
        passing of time can free any request, because it ends the wait for workers that never answer."""
        if not self._claims:
            return
        key = getattr(event, "key", None)
        if key is not None:
            self._release((key.request_id,), now_s)
        elif isinstance(event, Load | WorkerLost | WorkerForgotten | TimePassed):
            self._release(list(self._claims), now_s)

    def _release(self, request_ids: Iterable[str], now_s: float) -> None:
        for request_id in request_ids:
            if request_id in self._claims and not self._knows(request_id):
                self._claims.pop(request_id).release(now_s)


# --- rates of calls -------------------------------------------------------------------------------------------
# Of calls that take no quota. The rate is the same for each caller.


@final
class CallRate:
    """A token bucket for each caller, which holds a token for each call."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s, self._burst = per_s, burst
        self._buckets: dict[str, tuple[float, float]] = {}  # tokens and when they were counted, the last one at the end

    def take(self, caller: str, now_s: float) -> float:
        """Takes a token, and returns 0. Without one, returns the seconds until there is one."""
        while self._buckets and now_s - next(iter(self._buckets.values()))[1] >= self._burst / self._per_s:
            del self._buckets[next(iter(self._buckets))]  # full again
        tokens, at_s = self._buckets.get(caller, (float(self._burst), now_s))
        tokens = min(tokens + (now_s - at_s) * self._per_s, float(self._burst))
        if tokens < 1.0:
            return (1.0 - tokens) / self._per_s
        self._buckets.pop(caller, None)
        self._buckets[caller] = (tokens - 1.0, now_s)
        return 0.0

    def __len__(self) -> int:
        """Buckets that are not known to be full."""
        return len(self._buckets)


# --- labels of metrics ----------------------------------------------------------------------------------------
# The number of values of the label `tenant` is limited, because each costs memory here and in Prometheus. The first
# tenants to call get labels of their own, for as long as the router runs; later ones share `other`.

DEFAULT_LABEL: Final = RESERVED_NAMES[0]
OTHER_LABEL: Final = RESERVED_NAMES[1]


@final
class BoundedLabels:
    def __init__(self, most: int) -> None:
        """The first `most` names, of tenants or models, get labels of their own, beside the default tenant."""
        self._most = most
        self._labelled: set[str] = set()

    def of(self, name: str) -> str:
        if not name:
            return DEFAULT_LABEL
        if name not in self._labelled:
            if len(self._labelled) >= self._most:
                return OTHER_LABEL
            self._labelled.add(name)
        return name


# --- salts of the prefix cache --------------------------------------------------------------------------------
# Requests with different salts never share a cached prefix.
#
# The salt is derived from the tenant and from the salt that the request itself may have. Without either, it is empty.
# An adapter's fingerprint is added, because its KV differs for equal tokens.
#
# The cluster's secret is the key of the derivation, so block hashes in Redis or in a recording cannot be compared with
# the hashes of a guessed prompt. All routers of a cluster compute the same salt.

MAX_SALT_CHARS: Final = 256


def cache_salt(secret: ClusterSecret | None, tenant: str, given: str | None, adapter: str = "") -> bytes:
    """32 bytes, or empty for a request of the default tenant without a salt and a LoRA adapter. `adapter`: its
    fingerprint. Raises InvalidRequest."""
    if given is not None and not 1 <= len(given) <= MAX_SALT_CHARS:
        raise InvalidRequest("cache_salt", f"{len(given)} characters", f"1 to {MAX_SALT_CHARS} characters")
    if not tenant and given is None:
        salt = b""
    else:
        assert secret is not None
        salt = secret.mac("cache salt", tenant, given or "")
    if not adapter:
        return salt
    # The inner salt has 0 or 32 bytes, so it ends where the fingerprint begins.
    return blake2b(salt + adapter.encode(), digest_size=32, person=b"pdserve.adapter").digest()
