"""What the driver of Ray does with actors and placement groups, and the errors of Ray. Imports no ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from pdserve.config import WorkerConfig
from pdserve.launch.spec import Resources
from pdserve.launch.with_ray import ActorHealth, WantedWorker


class RayTrouble(Exception):
    """Ray does not do what was asked, for example because its control plane is lost."""


class ActorUnreachable(RayTrouble):
    """It is being started, perhaps again."""


class ActorGone(RayTrouble):
    """Ray has given it up, or it was killed."""


class NameTaken(RayTrouble):
    """An actor of that name exists, perhaps because Ray has not ended it yet."""


Bundles = tuple[Resources, ...]
Place = Any  # a placement group
Actor = Any
Call = Any


class ActorApi(Protocol):
    """What the driver does with Ray. Nothing waits. Everything may raise RayTrouble."""

    def bundles(self, config: WorkerConfig) -> Bundles:
        """What the worker needs: on its first node, then on each further one."""

    def nodes(self, config: WorkerConfig) -> Mapping[str, Resources]:
        """Those that a worker with that configuration may use."""

    def resources(self) -> tuple[Resources, Resources]:
        """Those that are free, and all."""

    def place(self, name: str, bundles: Bundles, strategy: str, node: str) -> Place:
        """On `node` if possible. Empty: Ray chooses. Asks Ray nothing yet, so it cannot fail."""

    def is_placed(self, place: Place) -> bool:
        """The first call asks Ray for the place."""

    def node_of(self, place: Place) -> str: ...

    def release(self, place: Place) -> None: ...

    def check(self, one: WantedWorker, place: Place) -> Call | None:
        """Begins the checks of the worker's node. Raises StartFailed."""

    def complaint(self, call: Call) -> str | None:
        """Their result, empty if the worker can start there; None: it is not known yet."""

    def create(self, one: WantedWorker, cluster: str, place: Place, bundles: Bundles) -> Actor:
        """`bundles`: those of `place`. Raises NameTaken."""

    def with_ranks(self, one: WantedWorker, place: Place, bundles: Bundles, before: Any) -> Any:
        """Starts the worker's ranks on other nodes; again if the address of the first rank is not as `before`."""

    def kill_ranks(self, ranks: Any) -> None: ...

    def ask(self, actor: Actor) -> Call: ...

    def answer(self, call: Call) -> ActorHealth | None:
        """None: not yet. Raises ActorUnreachable and ActorGone."""

    def drain(self, actor: Actor, limit_s: float) -> Call: ...

    def is_over(self, call: Call) -> bool:
        """Whether it has ended, in any way."""

    def kill(self, actor: Actor) -> None: ...
