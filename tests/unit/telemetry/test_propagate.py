import pytest

from pdserve.telemetry.trace_context import HEADER, TraceContext, extract, inject, parse, render, trace_id_of

GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_traceparent_survives_parsing() -> None:
    context = parse(GOOD)
    assert context == TraceContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, True)
    assert render(context) == GOOD
    unsampled = parse(GOOD[:-1] + "0")
    assert unsampled is not None
    assert not unsampled.is_sampled
    assert render(unsampled) == GOOD[:-1] + "0"
    assert (trace_id_of(GOOD), trace_id_of("nonsense")) == ("0af7651916cd43dd8448eb211c80319c", "")


@pytest.mark.parametrize(
    "bad",
    [
        None,
        "",
        "00",
        GOOD.upper(),
        GOOD + "-more",  # version 00 ends after the flags
        GOOD + "\n",
        "ff" + GOOD[2:],
        GOOD.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
        GOOD.replace("b7ad6b7169203331", "0" * 16),
        GOOD.replace("-", "_"),
    ],
)
def test_a_malformed_traceparent_is_ignored(bad: str | None) -> None:
    assert parse(bad) is None


def test_a_later_version_may_carry_more() -> None:
    context = parse("01" + GOOD[2:] + "-more")
    assert context == parse(GOOD)


def test_metadata_has_the_context_unless_the_caller_set_one() -> None:
    assert inject(None, None) == ()
    assert inject((("a", "b"),), GOOD) == (("a", "b"), (HEADER, GOOD))
    assert inject(((HEADER, "mine"),), GOOD) == ((HEADER, "mine"),)
    assert extract(inject((("a", b"b"),), GOOD)) == GOOD
    assert extract(((HEADER, "nonsense"),)) == ""
    assert extract(None) == ""
