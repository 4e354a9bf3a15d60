"""Short functions for the expected commands of a request `a`."""

from __future__ import annotations

from pdserve.core.attempt import AttemptKey
from pdserve.core.protocol import Admit, Cancel, Prefill, Reserve
from pdserve.core.types import TokenOut
from router.state.interface import Command, EmitTokens, FailRequest
from tests.unit.router.given import grant


def reserve(
    attempt: int = 1,
    worker_id: str = "d0",
    output: tuple[int, ...] = (),
    *,
    is_local: bool = False,
    waited_s: float = 0.0,
) -> Reserve:
    key = AttemptKey(worker_id, "a", attempt)
    return Reserve(key=key, is_local=is_local, output_token_ids=output, waited_s=waited_s)


def prefill(
    attempt: int = 1,
    worker_id: str = "p0",
    output: tuple[int, ...] = (),
    decode: str = "d0",
    waited_s: float = 0.0,
) -> Prefill:
    return Prefill(
        key=AttemptKey(worker_id, "a", attempt),
        grant=grant("a", attempt, decode),
        output_token_ids=output,
        waited_s=waited_s,
    )


def cancel(worker_id: str, attempt: int = 1) -> Cancel:
    return Cancel(key=AttemptKey(worker_id, "a", attempt))


def emit(index: int, *token_ids: int) -> EmitTokens:
    tokens = tuple(TokenOut(token_id=one) for one in token_ids)
    return EmitTokens(request_id="a", first_index=index, tokens=tokens)


def admit(token_id: int = 100, attempt: int = 1, worker_id: str = "d0") -> Admit:
    return Admit(key=AttemptKey(worker_id, "a", attempt), first_token_id=token_id)


def only(commands: list[Command]) -> Command:
    (one,) = commands
    return one


def failure(commands: list[Command]) -> FailRequest:
    one = commands[0]
    assert isinstance(one, FailRequest), commands
    return one
