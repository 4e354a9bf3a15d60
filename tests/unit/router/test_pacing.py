"""How long workers may hold tokens back, by the answers that run."""

from __future__ import annotations

from pdserve.core.types import Slo
from pdserve.v1 import worker_pb2
from router.service.worker_stream import WorkerPacing


def test_a_strict_answer_turns_the_stream_interval_off() -> None:
    sent: list[tuple[float, float]] = []

    def send(message: worker_pb2.AttachRequest) -> None:
        sent.append((message.set_pace.interval_s, message.set_pace.tokens_interval_s))

    pacing = WorkerPacing(send)
    pacing.set_stream_interval(0.02)
    assert sent == [(0.0, 0.02)]
    with pacing.streaming(Slo(tpot_s=0.2)), pacing.streaming(Slo(tpot_s=0.04)):
        assert len(sent) == 1
        with pacing.streaming(Slo(tpot_s=0.2, itl_s=0.03)):
            assert sent[1:] == [(0.0, 0.0)]
            with pacing.streaming(Slo(tpot_s=0.01)):
                assert len(sent) == 2
            pacing.set_pace(0.08)
            assert sent[2:] == [(0.08, 0.0)], "an overloaded router limits all messages"
    assert sent[3:] == [(0.08, 0.02)]
    pacing.set_stream_interval(0.0)
    assert sent[4:] == [(0.08, 0.0)]
    with pacing.streaming(Slo(tpot_s=0.001)):
        assert len(sent) == 5
    assert pacing.message.set_pace.interval_s == 0.08
