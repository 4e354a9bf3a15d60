"""Every simulated worker of a test ends without a used block."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.cluster.world import World


@pytest.fixture(autouse=True)
def no_block_is_used_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks each world when its result is taken, except runs that were stopped early."""
    taken = World.result

    def result(world: World) -> Any:
        done = taken(world)
        world.check()
        if world._is_over() and not world._is_stopped and not world._num_open:
            for machine in world.machines():
                blocks = machine.blocks
                assert machine.is_idle, f"{machine.shape.worker_id} holds an attempt for no request"
                assert blocks.num_free + blocks.num_evictable == blocks.num_blocks, (
                    f"{machine.shape.worker_id} uses a block after the last request"
                )
        return done

    monkeypatch.setattr(World, "result", result)
