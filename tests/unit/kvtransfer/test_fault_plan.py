"""Plans that assign faults to transfers."""

from __future__ import annotations

from collections import Counter

import pytest

from kvtransfer.faults.plan import OF_FRAMES, OF_WRITES, FaultKind, FaultPlan, Where, parse
from kvtransfer.protocol.frames import tag_of
from pdserve.core.errors import ConfigError
from pdserve.core.kv.kv_shape import TransferKey

TAGS = [tag_of(TransferKey(transfer_id=f"t{n}", attempt=1, generation=n)) for n in range(2000)]


def test_a_fault_plan_depends_on_its_seed() -> None:
    one, again, other = FaultPlan(seed=1, share=0.5), FaultPlan(seed=1, share=0.5), FaultPlan(seed=2, share=0.5)
    faults = [one.fault_of(tag) for tag in TAGS]
    assert [again.fault_of(tag) for tag in reversed(TAGS)] == faults[::-1]
    assert [other.fault_of(tag) for tag in TAGS] != faults


def test_faults_have_the_requested_frequencies() -> None:
    plan = FaultPlan(seed=3, share=0.25, longest_s=2.0, weights={FaultKind.DROP: 3.0, FaultKind.KILL: 1.0})
    faults = [fault for tag in TAGS if (fault := plan.fault_of(tag)) is not None]
    kinds = Counter(fault.kind for fault in faults)
    assert 400 < len(faults) < 600
    assert set(kinds) == {FaultKind.DROP, FaultKind.KILL}
    assert 2.0 < kinds[FaultKind.DROP] / kinds[FaultKind.KILL] < 4.5
    assert all(0.0 < fault.for_s <= 2.0 and 0.0 <= fault.at < 1.0 for fault in faults)
    assert not any(plan.fault_of(tag) for tag in TAGS for plan in [FaultPlan(share=0.0)])


def test_a_fault_happens_only_where_it_can() -> None:
    plan = FaultPlan(seed=4, share=1.0, weights=dict.fromkeys(FaultKind, 1.0))
    seen = {(fault.kind, fault.where) for tag in TAGS if (fault := plan.fault_of(tag)) is not None}
    expected = {(kind, Where.SENT) for kind in FaultKind}
    expected |= {(kind, Where.ANSWERED) for kind in OF_FRAMES} | {(kind, Where.WRITTEN) for kind in OF_WRITES}
    assert seen == expected


def test_a_plan_is_read_from_one_line() -> None:
    plan = parse("seed=7, share=0.2,longest_s=1.5,drop=2,kill=0.5")
    assert (plan.seed, plan.share, plan.longest_s) == (7, 0.2, 1.5)
    assert dict(plan.weights) == {FaultKind.DROP: 2.0, FaultKind.KILL: 0.5}
    assert set(parse("seed=7").weights) == set(OF_FRAMES), "no process dies unless it is asked for"


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "inject_faults"),
        ("drop", "inject_faults"),
        ("drop=often", "inject_faults"),
        ("explode=1", "inject_faults"),
        ("share=2", "share"),
        ("share=nan", "share"),
        ("longest_s=0", "longest_s"),
        ("drop=-1,kill=2", "weights"),
        ("drop=0", "weights"),
        ("seed=inf", "seed"),
    ],
)
def test_an_invalid_fault_plan_is_rejected(text: str, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert caught.value.field == field


def test_faults_occur_in_early_and_late_frames() -> None:
    plan = FaultPlan(seed=4, share=1.0, weights=dict.fromkeys(FaultKind, 1.0))
    frames: dict[Where, Counter[int]] = {where: Counter() for where in Where}
    for tag in TAGS:
        fault = plan.fault_of(tag)
        assert fault is not None
        frames[fault.where][fault.nth] += 1
    sent = frames.pop(Where.SENT)
    assert set(sent) == {0, 1, 2, 3}, "a sender announces, and then sends its chunks"
    assert sent[1] == max(sent.values()), "its first chunk meets most"
    assert all(set(one) == {0, 1} for one in frames.values())
