"""Block tables on the device equal those of the host when sequences start, grow, end and change."""

from __future__ import annotations

import random

import pytest

from pdserve.core.errors import InternalError
from pdserve.engine.gpu.kernels.fixed_shapes import SIZES, buckets_for, choose
from pdserve.engine.gpu.plain_rows import TableMirror


@pytest.mark.parametrize("seed", range(20))
def test_the_device_has_every_table_of_a_step(seed: int) -> None:
    rng = random.Random(seed)
    num_seq_slots, num_pages = 6, 8
    device = [-1] * (num_seq_slots * num_pages)
    mirror = TableMirror(num_seq_slots, num_pages)
    live: list[list[int]] = []
    for _ in range(200):
        for table in live:
            if rng.random() < 0.3 and len(table) < num_pages:
                table.append(rng.randrange(1000))
        if rng.random() < 0.3 and len(live) < 4:
            live.append([rng.randrange(1000) for _ in range(rng.randrange(1, 5))])
        if live and rng.random() < 0.2:
            live.pop(rng.randrange(len(live)))
        if live and rng.random() < 0.1:  # Changed in the middle, which callers should not do.
            rng.choice(live)[0] = rng.randrange(1000)
        chosen = rng.sample(live, rng.randrange(len(live) + 1))
        update = mirror.update(chosen)
        for at, block in zip(update.at, update.block, strict=True):
            device[at] = block
        assert len(set(update.seq_slots)) == len(chosen)
        for seq_slot, table in zip(update.seq_slots, chosen, strict=True):
            assert device[seq_slot * num_pages :][: len(table)] == table


def test_only_what_was_added_is_sent() -> None:
    mirror = TableMirror(2, 4)
    table = [7, 8]
    first = mirror.update([table])
    assert first.block == [7, 8]
    assert mirror.update([table]).block == []
    table.append(9)
    assert mirror.update([table]).at == [first.seq_slots[0] * 4 + 2]


def test_more_sequences_than_slots_are_rejected() -> None:
    mirror = TableMirror(2, 4)
    with pytest.raises(InternalError, match="a table has 4"):
        mirror.update([[1, 2, 3, 4, 5]])
    with pytest.raises(InternalError, match="sequence slots"):
        mirror.update([[1], [2], [3]])
    shared = [1, 2]
    with pytest.raises(InternalError, match="share"):
        mirror.update([shared, shared])


def test_buckets_have_little_padding() -> None:
    buckets = buckets_for(200)
    assert buckets[-1] == 200
    assert list(buckets) == sorted(set(buckets))
    for num_rows in range(1, 201):
        bucket = choose(buckets, num_rows)
        assert bucket is not None
        assert num_rows <= bucket
        assert num_rows <= 16 or bucket - num_rows < bucket / 3
    assert choose(buckets, 201) is None
    assert buckets_for(1) == (1,)
    assert buckets_for(SIZES[-1])[-1] == SIZES[-1]
