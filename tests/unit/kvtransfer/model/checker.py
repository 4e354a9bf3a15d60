"""A small explicit-state model checker; it searches breadth first, so the first violation has a shortest trace.

Sides are deterministic machines around the product's own tables. The reaction to each (local state, event) is computed
once and cached, because the product of the sides has many times more states than each side.
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from tests.unit.kvtransfer.model.canonical import canonical

Event = tuple[Any, ...]
Output = tuple[Any, ...]


class Violated(Exception):
    """An invariant does not hold; `invariant` is its key in `invariants.INVARIANTS`."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant, self.what = invariant, what
        self.trail: list[Event] = []  # Steps after the state that the exploration has reached.


class Side(Protocol):
    """`react` changes the side and returns its outputs; None if the event cannot happen now."""

    def react(self, event: Event) -> list[Output] | None: ...

    def alone(self) -> Iterator[Event]:
        """Events that the side may cause by itself; some may turn out to be impossible."""
        ...

    def given_up(self) -> Iterator[Event]:
        """Events that count as faults: aborts and accidents."""
        ...


Reaction = tuple[int, tuple[Output, ...]]
Menu = list[tuple[Event, "Reaction | Violated"]]


@dataclass
class Machine:
    """The numbered local states of one side, and all reactions seen so far."""

    states: list[bytes] = field(default_factory=list)
    _ids: dict[Hashable, int] = field(default_factory=dict)
    _reactions: dict[tuple[int, Event], Reaction | Violated | None] = field(default_factory=dict)
    _alone: dict[int, Menu] = field(default_factory=dict)
    _given_up: dict[int, Menu] = field(default_factory=dict)

    def add(self, side: Side) -> int:
        key = canonical(side)
        found = self._ids.get(key)
        if found is None:
            found = self._ids[key] = len(self.states)
            self.states.append(pickle.dumps(side, pickle.HIGHEST_PROTOCOL))
        return found

    def copy(self, state: int) -> Any:
        return pickle.loads(self.states[state])  # noqa: S301 - our own bytes

    def react(self, state: int, event: Event) -> Reaction | None:
        """The cached reaction. Raises Violated each time if the reaction does."""
        key = state, event
        try:
            reaction = self._reactions[key]
        except KeyError:
            reaction = self._reactions[key] = self._compute(state, event)
        if isinstance(reaction, Violated):
            raise reaction
        return reaction

    def alone(self, state: int) -> Menu:
        """Events that need no other side, computed once for each state."""
        found = self._alone.get(state)
        if found is None:
            side: Side = self.copy(state)
            found = self._alone[state] = self._menu(state, side.alone())
        return found

    def given_up(self, state: int) -> Menu:
        """Like `alone`, for events that count as faults."""
        found = self._given_up.get(state)
        if found is None:
            side: Side = self.copy(state)
            found = self._given_up[state] = self._menu(state, side.given_up())
        return found

    def _menu(self, state: int, events: Iterator[Event]) -> Menu:
        menu: Menu = []
        for event in events:
            try:
                reaction = self.react(state, event)
            except Violated as violated:
                menu.append((event, violated))
            else:
                if reaction is not None:
                    menu.append((event, reaction))
        return menu

    def _compute(self, state: int, event: Event) -> Reaction | Violated | None:
        side: Side = self.copy(state)
        try:
            outputs = side.react(event)
        except Violated as violated:
            return violated
        except Exception as error:  # Any exception of the tables is a counterexample, and must not end the checker.
            return Violated("no crash", f"{type(error).__name__}: {error}")
        return None if outputs is None else (self.add(side), tuple(outputs))

    def outputs(self) -> Iterator[Output]:
        """All outputs of the side in any state."""
        for reaction in self._reactions.values():
            if isinstance(reaction, tuple):
                yield from reaction[1]


ROOT: Final = -1


class World(Protocol):
    """`steps` yields (event, the state after it) or (event, the invariant that it violates)."""

    def initial(self) -> Hashable: ...

    def steps(self, state: Any) -> Iterator[tuple[Event, Hashable | Violated]]: ...


@dataclass
class Explored:
    states: list[Any]
    parents: list[int]
    events: list[Event]
    num_steps: int = 0
    violated: Violated | None = None

    def trail(self, state: int) -> list[Event]:
        events: list[Event] = []
        while self.parents[state] != ROOT:
            events.append(self.events[state])
            state = self.parents[state]
        return events[::-1]


def explore(world: World, most: int) -> tuple[Explored, list[Event]]:
    """All reachable states, or the shortest trail to a violation. Raises OverflowError beyond `most` states."""
    start = world.initial()
    seen: dict[Any, int] = {start: 0}
    explored = Explored([start], [ROOT], [()])
    at = 0
    while at < len(explored.states):
        for event, after in world.steps(explored.states[at]):
            explored.num_steps += 1
            if isinstance(after, Violated):
                explored.violated = after
                return explored, [*explored.trail(at), event]
            number = len(explored.states)
            if seen.setdefault(after, number) == number:
                explored.states.append(after)
                explored.parents.append(at)
                explored.events.append(event)
        at += 1
        if len(explored.states) > most:
            raise OverflowError(f"more than {most} states")
    return explored, []
