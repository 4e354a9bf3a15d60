"""Runs one exploration with all its checks, and prints a counterexample as a list of steps."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvtransfer.protocol.receive_transfers import ReplyToSender
from kvtransfer.protocol.send_transfers import Announce, Retract
from tests.unit.kvtransfer.model.checker import Event, Explored, Violated, explore
from tests.unit.kvtransfer.model.liveness import settle
from tests.unit.kvtransfer.model.wire import Chunk, Scenario
from tests.unit.kvtransfer.model.world import D, P, World


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    scenario: Scenario
    num_states: int
    num_steps: int
    num_local: int
    cpu_s: float
    ends: Counter[str]
    violated: Violated | None
    trail: list[Event]

    def story(self) -> str:
        """The counterexample, with one step per line."""
        lines = [f"{number:3}. {told(event)}" for number, event in enumerate(self.trail, start=1)]
        return "\n".join([*lines, f"     violates {self.violated}"]) if self.violated else "no violation"


@contextmanager
def without_collection() -> Iterator[None]:
    """Disables garbage collection: states have no cycles, and collection would take a tenth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def run(scenario: Scenario, most: int = 10_000_000) -> Result:
    began_s = time.process_time()
    world = World(scenario)
    with without_collection():
        explored, trail = explore(world, most)
        violated, ends = explored.violated, _ends(world)
        if violated is None:
            violated, trail = _stuck(world, explored)
    return Result(
        scenario=scenario,
        num_states=len(explored.states),
        num_steps=explored.num_steps,
        num_local=len(world.decode.states) + len(world.prefill.states),
        cpu_s=time.process_time() - began_s,
        ends=ends,
        violated=violated,
        trail=trail,
    )


def _stuck(world: World, explored: Explored) -> tuple[Violated | None, list[Event]]:
    """The first state from which a side does not get all its blocks back without messages."""
    bad: dict[tuple[str, int], Violated] = {}
    for name, machine in ((D, world.decode), (P, world.prefill)):
        for local in range(len(machine.states)):
            try:
                settle(machine, local)
            except Violated as violated:
                bad[name, local] = violated
    for number, state in enumerate(explored.states if bad else ()):
        for name, local in ((D, state.d), (P, state.p)):
            if (name, local) in bad:
                found = bad[name, local]
                return found, [*explored.trail(number), *((name, *event) for event in found.trail)]
    return None, []


def _ends(world: World) -> Counter[str]:
    """The ends of transfers that the exploration has reached, with the number of local states or steps of each."""
    ends: Counter[str] = Counter()
    for state in range(len(world.decode.states)):
        for order in world.decode.copy(state).orders.values():
            ends.update(f"D: {outcome.value}" for outcome in order.said)
    ends.update(f"P: {output[2].value}" for output in world.prefill.outputs() if output[0] == "ended")
    return ends


def told(event: Event) -> str:
    """One step in words."""
    match event:
        case ("D", "grant"):
            return "D grants the next transfer, on the blocks that are free"
        case ("D", "hear", number, message):
            return f"D hears {message_told(message)} on connection {number}"
        case ("D", "go on", number):
            return f"D's thread of connection {number} goes on: enters, writes and leaves, or settles"
        case ("D", "thread ends", number):
            return f"D's thread of connection {number} ends; what was on its way to it is lost"
        case ("P", "start", transfer, _):
            return f"P gets the grant of transfer {transfer}"
        case ("P", "push", transfer):
            return f"P computes and pushes the next block of transfer {transfer}"
        case ("P", "take"):
            return "P takes a chunk and its checksum"
        case ("P", "send"):
            return "P reads the chunk's blocks and sends them"
        case ("P", "dial"):
            return "P connects"
        case ("P", "cut"):
            return "P's connection breaks"
        case ("P", "hear", message):
            return f"P hears {message_told(message)}"
        case (side, "time passes"):
            return f"time passes on {side} until its next alarm"
        case (side, "abort", transfer):
            return f"the owner on {side} gives transfer {transfer} up"
        case (side, "free", transfer):
            return f"the owner on {side} frees the committed blocks of transfer {transfer}"
        case (side, "restart"):
            return f"{side} dies and starts anew"
        case ("-", "duplicates", source, target):
            return f"the next message on connection {source} comes again on connection {target}"
        case ("-", "corrupts", number):
            return f"the next chunk on connection {number} is corrupted"
        case ("-", "repeats the answer", number):
            return f"the next answer on connection {number} is repeated"
    raise AssertionError(event)


def message_told(message: object) -> str:
    match message:
        case Announce(tag):
            return f"ANNOUNCE of transfer {tag.generation}"
        case Retract(tag):
            return f"RETRACT of transfer {tag.generation}"
        case Chunk():
            return f"block {message.first} of transfer {message.origin}{', the last' if message.is_last else ''}"
        case ReplyToSender(_, tag, is_verified):
            return f"{'DONE' if is_verified else 'REFUSE'} of transfer {tag.generation}"
    raise AssertionError(message)
