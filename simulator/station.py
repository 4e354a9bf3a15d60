"""The place of a worker and its successors: its speed, its statistics and its current instance. Pure."""

from __future__ import annotations

import math
import random
from typing import final

from pdserve.core.types import Role
from router.events import WorkerLost
from simulator.decoder import DecodeMachine
from simulator.machine import Environment, Machine
from simulator.model import WorkerFault, WorkerFaultKind, WorkerShape
from simulator.prefiller import PrefillMachine
from simulator.speed import Speed
from simulator.tally import Tally


@final
class Station:
    def __init__(self, env: Environment, shape: WorkerShape, number: int) -> None:
        config = env.config
        self._env, self._shape = env, shape
        self._speed = Speed(shape, config.noise, random.Random(config.seed * 1_000_003 + number))
        self.tally = Tally(shape)
        self.machine: Machine | None = None
        self.num_lives = 0

    def start(self) -> None:
        self.num_lives += 1
        kind = PrefillMachine if self._shape.role is Role.PREFILL else DecodeMachine
        self.machine = kind(self._env, self._shape, self._speed, self.tally, str(self.num_lives))
        self.machine.connect()

    def inject(self, fault: WorkerFault) -> None:
        machine, agenda = self.machine, self._env.agenda
        match fault.kind:
            case WorkerFaultKind.DIE:
                if machine is None:
                    return
                self.machine = None
                machine.die()
                lost = WorkerLost(worker_id=self._shape.worker_id, reason="it died")
                for router in range(self._env.config.num_routers):
                    machine.send_event(router, lost)
                if fault.for_s < math.inf:
                    agenda.after(fault.for_s, self.start)
            case WorkerFaultKind.SLOW:
                self._turn(fault.factor, begins=True)
                if fault.for_s < math.inf:
                    agenda.after(fault.for_s, self._turn, fault.factor, False)
            case WorkerFaultKind.STALL:
                if machine is not None:
                    machine.stall(fault.for_s)

    def _turn(self, factor: float, begins: bool) -> None:
        if self.machine is not None:
            self.machine.change_speed()
        if begins:
            self._speed.factors.append(factor)
        else:
            self._speed.factors.remove(factor)

    def finish(self) -> None:
        """The statistics up to now."""
        if self.machine is not None:
            self.machine.update_tally()
