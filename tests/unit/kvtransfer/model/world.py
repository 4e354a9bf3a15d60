"""Both sides, the connections between them and all faults, as a transition system.

Messages of one connection arrive in order, at any later time or never; connections are independent of each other. Each
fault uses up one of `Scenario.faults`; the passing of time uses up none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from kvtransfer.protocol.transport import SendOutcome
from tests.unit.kvtransfer.model.checker import Event, Machine, Output, Reaction, Violated
from tests.unit.kvtransfer.model.decode_side import DecodeSide
from tests.unit.kvtransfer.model.prefill_side import PrefillSide
from tests.unit.kvtransfer.model.wire import WRONG, Chunk, Scenario

D: Final = "D"
P: Final = "P"
NET: Final = "-"
_MOST_REPEATED: Final = 3


class Connection(NamedTuple):
    """A closed end reads and writes no more. The other end learns of it later, or never."""

    number: int
    to_d: tuple[Any, ...] = ()
    to_p: tuple[Any, ...] = ()
    is_p_open: bool = True
    is_d_open: bool = True


class State(NamedTuple):
    """`d` and `p` are numbers of local states."""

    d: int
    p: int
    connections: tuple[Connection, ...] = ()
    grants: tuple[tuple[int, int], ...] = ()  # (transfer, incarnation) of grants on their way to the prefill worker.
    verified: tuple[int, ...] = ()
    incarnation: int = 1
    num_connections: int = 0
    faults: int = 0


Step = tuple[Event, State | Violated]


class World:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.decode, self.prefill = Machine(), Machine()

    def initial(self) -> State:
        d = self.decode.add(DecodeSide.begun(self.scenario))
        return State(d, self.prefill.add(PrefillSide.begun(self.scenario)), faults=self.scenario.faults)

    def steps(self, state: State) -> Iterator[Step]:
        for event, reaction in self.decode.alone(state.d):
            yield (D, *event), self._after_d(state, event, reaction)
        for event, reaction in self.prefill.alone(state.p):
            yield (P, *event), self._after_p(state, event, reaction)
        yield from self._deliveries(state)
        if state.faults:
            for step in self._faults(state._replace(faults=state.faults - 1)):
                if step[0][1] in self.scenario.kinds:
                    yield step

    def _faults(self, paid: State) -> Iterator[Step]:
        for event, reaction in self.decode.given_up(paid.d):
            yield (D, *event), self._after_d(paid, event, reaction)
        for event, reaction in self.prefill.given_up(paid.p):
            yield (P, *event), self._after_p(paid, event, reaction)
        yield from self._faults_of_the_net(paid)

    def _deliveries(self, state: State) -> Iterator[Step]:
        for grant in state.grants:
            yield from self._try(P, state, ("start", *grant))
        for one in state.connections:
            if one.is_d_open:
                if one.to_d:
                    yield from self._try(D, state, ("hear", one.number, one.to_d[0]))
                if not one.is_p_open:
                    yield from self._try(D, state, ("thread ends", one.number))
            if one.is_p_open:
                if one.to_p:
                    yield from self._try(P, state, ("hear", one.to_p[0]))
                if not one.is_d_open:
                    yield from self._try(P, state, ("cut",))

    def _faults_of_the_net(self, paid: State) -> Iterator[Step]:
        for one in paid.connections:
            if one.is_p_open and one.is_d_open:
                yield from self._try(P, paid, ("cut",))
                yield from self._try(D, paid, ("thread ends", one.number))
            if one.to_d:
                message = one.to_d[0]
                for other in paid.connections:
                    if other.is_d_open:
                        again = other._replace(to_d=(*other.to_d, message))
                        yield (NET, "duplicates", one.number, other.number), _with(paid, again)
                if isinstance(message, Chunk):
                    bad = message._replace(payload=(WRONG, *message.payload[1:]))
                    yield (NET, "corrupts", one.number), _with(paid, one._replace(to_d=(bad, *one.to_d[1:])))
            if 0 < len(one.to_p) < _MOST_REPEATED:
                again = one._replace(to_p=(*one.to_p, one.to_p[0]))
                yield (NET, "repeats the answer", one.number), _with(paid, again)

    def _try(self, side: str, state: State, event: Event) -> Iterator[Step]:
        reaction: Reaction | Violated | None
        try:
            reaction = self.decode.react(state.d, event) if side == D else self.prefill.react(state.p, event)
        except Violated as violated:
            reaction = violated
        if reaction is not None:
            after = self._after_d if side == D else self._after_p
            yield (side, *event), after(state, event, reaction)

    def _after_d(self, state: State, event: Event, reaction: Reaction | Violated) -> State | Violated:
        if isinstance(reaction, Violated):
            return reaction
        after = State(reaction[0], *state[1:])
        if event[0] == "hear":
            one = _connection(state, event[1])
            after = _with(after, one._replace(to_d=one.to_d[1:]))
        elif event[0] == "thread ends":
            after = _with(after, _connection(state, event[1])._replace(is_d_open=False, to_d=()))
        elif event[0] == "restart":
            after = after._replace(incarnation=after.incarnation + 1)
            for one in after.connections:
                after = _with(after, one._replace(is_d_open=False, to_d=()))
        for output in reaction[1]:
            after = self._out_of_d(after, output)
        return after

    def _out_of_d(self, state: State, output: Output) -> State:
        match output:
            case ("grant", transfer):
                return state._replace(grants=(*state.grants, (transfer, state.incarnation)))
            case ("verified", transfer):
                return state._replace(verified=(*state.verified, transfer))
            case ("answer", writer, answer):
                one = _connection(state, writer)
                return _with(state, one._replace(to_p=(*one.to_p, answer))) if one.is_p_open else state
        raise AssertionError(output)

    def _after_p(self, state: State, event: Event, reaction: Reaction | Violated) -> State | Violated:
        if isinstance(reaction, Violated):
            return reaction
        outputs = reaction[1]
        after = State(state.d, reaction[0], *state[2:])
        if event[0] == "dial":
            # The process that has this address now did not make the grant.
            if outputs[0] != ("linked", state.incarnation):
                refused = self.prefill.react(state.p, ("cut",))
                assert refused is not None
                return self._after_p(state, ("cut",), refused)
            after = self._connected(after)
        one = next((one for one in after.connections if one.is_p_open), None)
        if event[0] == "start":
            after = after._replace(grants=tuple(grant for grant in after.grants if grant != event[1:]))
        elif event[0] == "hear" and one is not None:
            one = one._replace(to_p=one.to_p[1:])
        for output in outputs:
            match output:
                case ("send", message) if one is not None and one.is_d_open:
                    one = one._replace(to_d=(*one.to_d, message))
                case ("ended", transfer, SendOutcome.SENT) if transfer not in state.verified:
                    return Violated("sent means verified", f"transfer {transfer} is SENT, and was never VERIFIED")
        if one is None:
            return after
        if event[0] in ("cut", "restart"):
            one = one._replace(is_p_open=False, to_p=())
        return _with(after, one)

    def _connected(self, state: State) -> State:
        number = state.num_connections + 1
        accepted = self.decode.react(state.d, ("connect", number))
        assert accepted is not None
        connections = (*state.connections, Connection(number))
        return state._replace(d=accepted[0], num_connections=number, connections=connections)


def _connection(state: State, number: int) -> Connection:
    return next(one for one in state.connections if one.number == number)


def _with(state: State, changed: Connection) -> State:
    """The state with one connection changed. A connection is dropped once both ends are closed."""
    others = [changed if one.number == changed.number else one for one in state.connections]
    return state._replace(connections=tuple([one for one in others if one.is_p_open or one.is_d_open]))
