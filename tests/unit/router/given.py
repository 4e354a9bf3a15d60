"""Short methods that pass events to a router, one attempt at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pdserve.core.attempt import AttemptKey, FailureKind, RefusalReason
from pdserve.core.protocol import (
    AttemptFailed,
    FirstToken,
    Granted,
    Load,
    Refused,
    Released,
    TokenRow,
    TokensArrived,
    TransferEnded,
)
from pdserve.core.types import FinishReason, Role, TokenOut
from router.state.interface import ClientLeft, Command, Event, RouterSettings, TimePassed, WakeAt, WorkerLost
from router.state.lifecycle import Stage
from router.state.state import RouterState
from tests.unit.router.router_events import arrival, hello


def grant(request_id: str = "a", attempt: int = 1, worker_id: str = "d0") -> bytes:
    """A grant, which is opaque to the router and different for each attempt."""
    return f"{worker_id}/{request_id}/{attempt}".encode()


class Given:
    """Every method passes one event to the router and returns its commands, except WakeAt."""

    def __init__(self, settings: RouterSettings) -> None:
        self.state = RouterState(settings)
        self.now_s = 0.0

    def submit(self, event: Event) -> list[Command]:
        commands = self.state.handle(event, self.now_s)
        self.state.check()
        return [one for one in commands if not isinstance(one, WakeAt)]

    def at(self, now_s: float) -> list[Command]:
        """Advances the time. Workers send messages meanwhile, so none becomes silent."""
        commands: list[Command] = []
        while self.now_s < now_s:
            self.now_s = min(self.now_s + 1.0, now_s)
            for worker in self.state.snapshot().workers:
                if worker.is_connected:
                    commands += self.submit(Load(worker_id=worker.worker_id, steps=1, free_blocks=64))
        return commands + self.submit(TimePassed())

    def connect_prefill(self, worker_id: str, **facts: Any) -> list[Command]:
        return self.submit(hello(worker_id, Role.PREFILL, **facts))

    def connect_decode(self, worker_id: str, **facts: Any) -> list[Command]:
        return self.submit(hello(worker_id, Role.DECODE, **facts))

    def lost(self, worker_id: str) -> list[Command]:
        return self.submit(WorkerLost(worker_id=worker_id))

    def arrives(self, request_id: str = "a", **facts: Any) -> list[Command]:
        return self.submit(arrival(request_id, **facts))

    def granted(self, attempt: int = 1, worker_id: str = "d0", request_id: str = "a") -> list[Command]:
        held = grant(request_id, attempt, worker_id)
        return self.submit(Granted(key=AttemptKey(worker_id, request_id, attempt), grant=held))

    def seated(self, attempt: int = 1, worker_id: str = "d0", request_id: str = "a") -> list[Command]:
        return self.submit(Granted(key=AttemptKey(worker_id, request_id, attempt)))

    def refused(
        self,
        worker_id: str,
        attempt: int = 1,
        reason: RefusalReason = RefusalReason.INBOX_FULL,
        retry_after_s: float = 0.1,
        request_id: str = "a",
    ) -> list[Command]:
        return self.submit(
            Refused(key=AttemptKey(worker_id, request_id, attempt), reason=reason, retry_after_s=retry_after_s)
        )

    def first(
        self,
        token_id: int = 100,
        attempt: int = 1,
        worker_id: str = "p0",
        finish: FinishReason | None = None,
        request_id: str = "a",
    ) -> list[Command]:
        return self.submit(
            FirstToken(
                key=AttemptKey(worker_id, request_id, attempt),
                token=TokenOut(token_id=token_id),
                finish=finish,
                queue_s=0.01,
                prefill_s=0.2,
                cached_tokens=16,
            )
        )

    def committed(
        self, is_committed: bool = True, attempt: int = 1, worker_id: str = "d0", request_id: str = "a"
    ) -> list[Command]:
        return self.submit(
            TransferEnded(
                key=AttemptKey(worker_id, request_id, attempt),
                is_committed=is_committed,
                transfer_s=0.05,
                busy_s=0.04,
                num_bytes=4096,
                error="" if is_committed else "checksum",
            )
        )

    def tokens(
        self,
        index: int,
        token_ids: Sequence[int],
        attempt: int = 1,
        worker_id: str = "d0",
        finish: FinishReason | None = None,
        request_id: str = "a",
    ) -> list[Command]:
        row = TokenRow(
            key=AttemptKey(worker_id, request_id, attempt),
            output_index=index,
            tokens=tuple(TokenOut(token_id=one) for one in token_ids),
            finish=finish,
            decode_s=0.7 if finish else 0.0,
        )
        return self.submit(TokensArrived(worker_id=worker_id, rows=(row,)))

    def failed(
        self, worker_id: str, kind: FailureKind, attempt: int = 1, message: str = "broken", request_id: str = "a"
    ) -> list[Command]:
        return self.submit(AttemptFailed(key=AttemptKey(worker_id, request_id, attempt), kind=kind, message=message))

    def released(self, worker_id: str, attempt: int = 1, request_id: str = "a") -> list[Command]:
        return self.submit(Released(key=AttemptKey(worker_id, request_id, attempt)))

    def leaves(self, request_id: str = "a") -> list[Command]:
        return self.submit(ClientLeft(request_id=request_id))

    def heard(self, worker_id: str) -> list[Command]:
        return self.submit(Load(worker_id=worker_id, steps=1, free_blocks=64))

    # -- up to a stage, on p0 and d0 -----------------------------------------------------------------------------

    def reserving(self) -> None:
        self.arrives()

    def prefilling(self) -> None:
        self.arrives()
        self.granted()

    def landed(self) -> None:
        self.prefilling()
        self.committed()

    def moving(self) -> None:
        self.prefilling()
        self.first(100)

    def decoding(self) -> None:
        self.moving()
        self.committed()


#: How to bring `a` to each stage.
STAGES: dict[Stage, Callable[[Given], None]] = {
    Stage.RESERVING: Given.reserving,
    Stage.PREFILLING: Given.prefilling,
    Stage.MOVING: Given.moving,
    Stage.LANDED: Given.landed,
    Stage.DECODING: Given.decoding,
}
