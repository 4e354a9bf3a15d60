"""Every interleaving of two peers, one transfer and one reuse of its blocks, with faults at any step."""

from __future__ import annotations

import pytest

from tests.unit.kvtransfer.model.invariants import INVARIANTS
from tests.unit.kvtransfer.model.mutants import MUTANTS, Mutant
from tests.unit.kvtransfer.model.report import run
from tests.unit.kvtransfer.model.scenarios import EVERY_TIME, SLOW, scenario

pytestmark = pytest.mark.timeout(600)  # Half a minute of CPU time.
#: For each invariant, the error that is found first. The others take longer.
QUICK = (
    "drained is reported with an access open",
    "all checksums match",
    "the receiver knows no deadline",
    "the sender reads without an access",
    "an ended transfer stays in the sender's table",
    "sent when written",
    "a late chunk is asserted on",
)
ALL_ENDS = {"D: verified", "D: failed", "D: drained", "D: quarantined", "P: sent", "P: failed"}


@pytest.mark.parametrize("name", [*EVERY_TIME, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)])
def test_no_reachable_state_breaks_an_invariant(name: str) -> None:
    result = run((EVERY_TIME | SLOW)[name])
    assert result.violated is None, f"\n{result.story()}"
    assert set(result.ends) == ALL_ENDS, "the exploration has not seen what it is about"
    print(f"{name}: {result.num_states} states, {result.num_steps} steps, {result.cpu_s:.1f} s of CPU")


def test_without_faults_and_a_clock_a_transfer_can_only_succeed() -> None:
    result = run(scenario(blocks=2, faults=0, has_clock=False))
    assert set(result.ends) == {"D: verified", "P: sent"}


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(one, id=one.name, marks=() if one.name in QUICK else pytest.mark.slow) for one in MUTANTS],
)
def test_a_seeded_error_is_found_with_a_trail(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    result = run(mutant.scenario)
    assert result.violated is not None, f"not found in {result.num_states} states"
    assert result.violated.invariant == mutant.invariant, f"\n{result.story()}"
    assert result.trail
    print(result.story())


def test_every_invariant_is_broken_by_some_mutant() -> None:
    assert {mutant.invariant for mutant in MUTANTS if mutant.name in QUICK} == set(INVARIANTS)
