"""The workers and clients of world.py."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pdserve.core.protocol import Load
from pdserve.core.types import Role
from router.state.interface import Command, Event, RequestArrived
from tests.unit.router.router_events import BLOCK

Key = tuple[str, int]


@dataclass(slots=True)
class Held:
    """One attempt on one worker."""

    output: int  # Output tokens of earlier attempts, and of this one.
    tokens: int
    is_local: bool = False
    stage: str = "waiting"  # decode: landing, running, ending; a sender: waiting, sending, ending.
    is_admitted: bool = False
    has_landed: bool = False
    granted_by: tuple[str, int] | None = None  # of a sender: decode worker and its generation, as the grant says


def grant_of(worker: Worker, attempt: int) -> bytes:
    """Opaque to the router."""
    return f"{worker.worker_id}/{worker.generation}/{attempt}".encode()


@dataclass(slots=True)
class Worker:
    worker_id: str
    role: Role
    generation: int = 1
    is_up: bool = True
    is_connected: bool = False
    is_frozen: bool = False
    is_draining: bool = False
    sends_kv: bool = False
    pulls_kv: bool = False
    weights: str = ""
    held: dict[Key, Held] = field(default_factory=dict)
    inbox: deque[Command] = field(default_factory=deque)
    outbox: deque[Event] = field(default_factory=deque)
    steps: int = 0

    def load(self) -> Load:
        used = sum(-(-one.tokens // BLOCK) for one in self.held.values())
        running = [one for one in self.held.values() if one.stage == "running"]
        return Load(
            worker_id=self.worker_id,
            steps=self.steps,
            free_blocks=max(64 - used, 0),
            running=len(running),
            waiting=len(self.held) - len(running),
            context_tokens=sum(one.tokens for one in running),
            is_draining=self.is_draining,
        )


@dataclass(slots=True)
class Client:
    request: RequestArrived
    length: int  # Number of output tokens of the right answer.
    heard: list[int] = field(default_factory=list)
    weights: str = ""  # that the first tokens named
    last_word: Command | None = None
    stop_after: int | None = None  # Number of output tokens after which the runtime finds a stop string.
