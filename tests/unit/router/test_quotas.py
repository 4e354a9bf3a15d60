"""Token buckets and answers in progress: charges, refunds and retry times."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.access.key_file import DEFAULT_TENANT, Tenant
from pdserve.core.errors import InvalidRequest, QuotaExceeded
from router.service.tenants import RESERVED_TOKENS, AnswerClaim, CallClaim, CallRate, Quotas

ACME = Tenant(name="acme", tokens_per_minute=600, max_concurrent=3)  # ten tokens per second


def minute() -> Quotas:
    """Makes buckets that hold the tokens of a minute."""
    return Quotas(60.0)


def call(quotas: Quotas, prompt: int, *max_tokens: int, now_s: float = 0.0, tenant: Tenant = ACME) -> CallClaim:
    claim = quotas.open(tenant, now_s)
    try:
        claim.admit(prompt, max_tokens or (10,), now_s)
    except BaseException:
        claim.close(now_s)
        raise
    return claim


def level(quotas: Quotas, now_s: float = 0.0) -> float:
    found = quotas.level("acme", now_s)
    assert found is not None
    return found


def test_admission_charges_prompt_and_reserved_output() -> None:
    quotas = minute()
    call(quotas, 100, 50)
    assert level(quotas) == 600 - 150
    call(quotas, 100, 10_000)
    assert level(quotas) == 600 - 150 - 100 - RESERVED_TOKENS


def test_what_an_answer_does_not_generate_is_returned_at_its_end() -> None:
    quotas = minute()
    answer = call(quotas, 100, 50).take()
    answer.emitted(20)
    assert level(quotas) == 450
    answer.end(is_free=False)
    answer.end(is_free=False)
    assert level(quotas) == 480


def test_further_output_may_overdraw_the_bucket() -> None:
    quotas = minute()
    answer = call(quotas, 300, 4096).take()
    for _ in range(100):
        answer.emitted(10)
    assert level(quotas) == 600 - 300 - 1000
    answer.end(is_free=False)
    assert level(quotas) == -700
    with pytest.raises(QuotaExceeded) as caught:
        quotas.open(ACME, 0.0)
    assert caught.value.quota == "tokens_per_minute"
    assert caught.value.retry_after_s == pytest.approx(70.1)
    assert "tokens_per_minute of tenant acme, which is 600: 0 tokens are left" in caught.value.message
    assert "retry in 70.10 s" in caught.value.message
    quotas.open(ACME, 70.1)


def test_a_rejection_names_the_time_after_which_the_same_call_is_admitted() -> None:
    quotas = minute()
    call(quotas, 500, 50)
    with pytest.raises(QuotaExceeded) as caught:
        call(quotas, 200, 50)
    assert caught.value.retry_after_s == pytest.approx(20.0)
    with pytest.raises(QuotaExceeded):
        call(quotas, 200, 50, now_s=19.9)
    call(quotas, 200, 50, now_s=20.0001)


def test_a_rejected_call_costs_nothing() -> None:
    quotas = minute()
    call(quotas, 500, 50)
    for _ in range(10):
        with pytest.raises(QuotaExceeded):
            call(quotas, 200, 50)
    assert (level(quotas), quotas.running("acme")) == (50, 1)


@pytest.mark.parametrize(("emitted", "left"), [(0, 600), (1, 499)])
def test_an_answer_that_failed_before_its_first_token_costs_nothing(emitted: int, left: float) -> None:
    quotas = minute()
    answer = call(quotas, 100, 50).take()
    answer.emitted(emitted)
    answer.end(is_free=True)
    assert level(quotas) == left


def test_a_disconnected_client_pays_for_its_prompt() -> None:
    quotas = minute()
    call(quotas, 100, 50).take().end(is_free=False)
    assert level(quotas) == 500


def test_a_call_larger_than_the_bucket_needs_a_full_one() -> None:
    quotas = minute()
    call(quotas, 5000, 50)
    assert level(quotas) == 600 - 5050
    with pytest.raises(QuotaExceeded) as caught:
        call(quotas, 5000, 50, now_s=450.0)
    assert caught.value.retry_after_s == pytest.approx(55.0)
    call(quotas, 5000, 50, now_s=505.01)


def test_an_idle_bucket_fills_up_to_its_size() -> None:
    quotas = minute()
    call(quotas, 300, 10)
    assert [level(quotas, now_s) for now_s in (1.0, 10.0, 31.0, 1e9)] == [300, 390, 600, 600]


def test_a_bucket_holds_the_tokens_of_one_second_by_default() -> None:
    quotas = Quotas()
    call(quotas, 300, 10)
    assert [level(quotas, now_s) for now_s in (0.0, 30.0, 31.0, 36.0, 99.0)] == [-300, 0, 10, 10, 10]


def test_a_clock_that_goes_back_refills_nothing() -> None:
    quotas = minute()
    call(quotas, 300, 10, now_s=100.0)
    assert [level(quotas, now_s) for now_s in (50.0, 100.0, 101.0)] == [290, 290, 300]


def test_answers_in_progress_are_limited_until_they_are_released() -> None:
    quotas = minute()
    answers = [call(quotas, 1, 1).take() for _ in range(3)]
    with pytest.raises(QuotaExceeded) as caught:
        quotas.open(ACME, 0.0)
    assert caught.value.quota == "max_concurrent"
    assert "3 of 3 answers are in progress" in caught.value.message
    assert caught.value.retry_after_s == 1.0, "nothing is known yet"
    answers[0].end(is_free=False)
    with pytest.raises(QuotaExceeded):
        quotas.open(ACME, 0.0)  # Its memory may still be in use.
    answers[0].release(6.0)
    answers[0].release(6.0)
    call(quotas, 1, 1, now_s=6.0)
    with pytest.raises(QuotaExceeded) as caught:
        quotas.open(ACME, 6.0)
    assert caught.value.retry_after_s == pytest.approx(2.0), "an answer takes 6 s, so one of three ends every 2 s"


def test_each_answer_of_a_call_counts() -> None:
    quotas = minute()
    claim = call(quotas, 10, 5, 5)
    assert (quotas.running("acme"), level(quotas)) == (2, 580)
    with pytest.raises(QuotaExceeded) as caught:
        call(quotas, 10, 5, 5)
    assert caught.value.quota == "max_concurrent"
    assert quotas.running("acme") == 2
    claim.close(0.0)
    assert (quotas.running("acme"), level(quotas)) == (0, 600)


def test_a_call_above_the_answer_quota_is_invalid() -> None:
    quotas = minute()
    with pytest.raises(InvalidRequest) as caught:
        call(quotas, 10, 1, 1, 1, 1)
    assert (caught.value.field, caught.value.expected) == ("n", "at most 3, the quota max_concurrent of tenant acme")
    assert (quotas.running("acme"), level(quotas)) == (0, 600)


def test_a_call_that_ends_early_gives_back_what_its_answers_have_not_taken() -> None:
    quotas = minute()
    claim = call(quotas, 10, 5, 5)
    first = claim.take()
    claim.close(0.0)
    claim.close(0.0)
    assert (quotas.running("acme"), level(quotas)) == (1, 585)
    first.end(is_free=False)
    first.release(0.0)
    assert (quotas.running("acme"), level(quotas)) == (0, 590)


def test_a_tenant_without_quotas_has_no_limit() -> None:
    quotas = minute()
    for _ in range(1000):
        call(quotas, 10**6, 10**6, tenant=DEFAULT_TENANT).take().emitted(10**9)
    assert (quotas.running(""), quotas.level("", 0.0)) == (1000, None)


def test_new_quotas_apply_to_the_next_call() -> None:
    quotas = minute()
    call(quotas, 300, 10)
    smaller = Tenant(name="acme", tokens_per_minute=60, max_concurrent=2)
    call(quotas, 1, 1, tenant=smaller)
    assert level(quotas) == 58
    with pytest.raises(QuotaExceeded):
        call(quotas, 1, 1, tenant=smaller)
    call(quotas, 1, 1, tenant=ACME)
    assert level(quotas) == 56
    call(quotas, 1, 1, tenant=Tenant(name="acme"))
    call(quotas, 1, 1, tenant=Tenant(name="acme", tokens_per_minute=600))
    assert level(quotas) == 598, "a bucket that is new is full"


def test_removed_tenants_are_dropped_when_idle() -> None:
    quotas = minute()
    call(quotas, 300, 10)
    call(quotas, 300, 10, tenant=Tenant(name="b", tokens_per_minute=600)).close(0.0)
    quotas.forget_all_but(["c"])
    assert (quotas.running("acme"), quotas.level("b", 0.0)) == (1, None)


@settings(deadline=None)
@given(st.data())
def test_no_sequence_of_calls_exceeds_its_quotas(data: st.DataObject) -> None:
    """Over T minutes, reserved and generated tokens are at most the quota times T + 1, plus the tokens that admitted
    answers generate beyond their reservation. All slots are returned."""
    quotas, now_s, taken, over = minute(), 0.0, 0, 0
    running: list[tuple[AnswerClaim, int, int]] = []
    for _ in range(data.draw(st.integers(1, 60))):
        now_s += data.draw(st.floats(0.0, 30.0))
        if data.draw(st.booleans()):
            prompt, most = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 400))
            try:
                claim = call(quotas, prompt, most, now_s=now_s)
            except QuotaExceeded:
                continue
            running.append((claim.take(), most, prompt))
            assert quotas.running("acme") <= 3
        elif running:
            answer, most, prompt = running.pop(data.draw(st.integers(0, len(running) - 1)))
            used = data.draw(st.integers(0, most))
            answer.emitted(used)
            answer.end(is_free=False)
            answer.release(now_s)
            taken += prompt + min(used, RESERVED_TOKENS)
            over += max(used - RESERVED_TOKENS, 0)
        assert taken + over <= 600 * (now_s / 60.0 + 1.0) + 3 * 400 + 1e-6
        assert (quotas.level("acme", now_s) or 0.0) <= 600
    for answer, _, _ in running:
        answer.end(is_free=False)
        answer.release(now_s)
    assert quotas.running("acme") == 0


def test_calls_have_a_rate_for_each_caller() -> None:
    rate = CallRate(per_s=4.0, burst=3)
    assert [rate.take("acme", 7.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.25]
    assert rate.take("beta", 7.0) == 0.0, "another caller"
    assert [rate.take("acme", 7.125) for _ in range(2)] == [0.125, 0.125], "a rejected call takes nothing"
    assert [rate.take("acme", 7.5) for _ in range(3)] == [0.0, 0.0, 0.25]
    assert [rate.take("acme", 99.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.25], "a pause gives no more than the burst"


def test_a_rate_remembers_the_callers_of_its_last_burst() -> None:
    rate = CallRate(per_s=4.0, burst=2)
    for number in range(100):
        assert rate.take(f"tenant-{number}", number / 16) == 0.0
        assert len(rate) <= 8
