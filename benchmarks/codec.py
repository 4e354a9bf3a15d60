"""Compares the codec of worker messages with hand-written copies: us per message, both ways, in one run.

    python -m benchmarks.codec [--rounds 500]

The peer is what `pdserve.wire.codec` replaced: one keyword per field. Rounds of the two alternate, and the fastest
round counts. A row has what a request's first and last token need; nearly all tokens travel in the columns of
PlainTokens, which need no codec.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Final

from pdserve.core import protocol as pr
from pdserve.core.attempt import AttemptKey
from pdserve.core.durations import check_duration
from pdserve.core.types import FinishReason, TokenOut
from pdserve.v1 import inference_pb2, worker_pb2
from pdserve.wire import protocol

KEY: Final = AttemptKey("d0", "3f6c1a9be2d04c57", 1)
TOKEN: Final = TokenOut(token_id=1234)
FIRST: Final = pr.FirstToken(key=KEY, token=TOKEN, queue_s=0.01, prefill_s=0.1, cached_tokens=16)
ROW: Final = pr.TokenRow(key=KEY, output_index=7, tokens=(TOKEN,), finish=FinishReason.STOP, decode_s=0.5)
PER_ROUND: Final = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=500)
    rounds = parser.parse_args().rounds
    first, row = protocol.encode_response(FIRST).first_token, protocol.TOKEN_ROW.encode(ROW)
    assert (first_by_hand(FIRST), row_by_hand(ROW)) == (first, row)
    assert (first_back_by_hand(first), row_back_by_hand(row)) == (FIRST, ROW)
    codec = protocol._RESPONSES[pr.FirstToken][1]
    cases: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
        ("FirstToken, to the wire", lambda: codec.encode(FIRST), lambda: first_by_hand(FIRST)),
        ("FirstToken, back", lambda: codec.decode(first, "d0"), lambda: first_back_by_hand(first)),
        ("TokenRow, to the wire", lambda: protocol.TOKEN_ROW.encode(ROW), lambda: row_by_hand(ROW)),
        ("TokenRow, back", lambda: protocol.TOKEN_ROW.decode(row, "d0"), lambda: row_back_by_hand(row)),
    ]
    print("| message | codec us | by hand us | ratio |\n|---|---|---|---|")
    for name, ours, theirs in cases:
        least = [float("inf"), float("inf")]
        for _ in range(rounds):
            for number, run in enumerate((ours, theirs)):
                began_s = time.perf_counter()
                for _ in range(PER_ROUND):
                    run()
                least[number] = min(least[number], (time.perf_counter() - began_s) / PER_ROUND)
        print(f"| {name} | {least[0] * 1e6:.2f} | {least[1] * 1e6:.2f} | {least[0] / least[1]:.2f} |")


def first_by_hand(first: pr.FirstToken) -> worker_pb2.FirstToken:
    return worker_pb2.FirstToken(
        request_id=first.key.request_id,
        attempt=first.key.attempt,
        token=token_by_hand(first.token),
        queue_s=first.queue_s,
        prefill_s=first.prefill_s,
        cached_tokens=first.cached_tokens,
        finish=finish_by_hand(first.finish),
    )


def first_back_by_hand(message: worker_pb2.FirstToken) -> pr.FirstToken:
    return pr.FirstToken(
        key=AttemptKey("d0", message.request_id, message.attempt),
        token=token_back_by_hand(message.token),
        queue_s=_seconds("queue_s", message.queue_s),
        prefill_s=_seconds("prefill_s", message.prefill_s),
        cached_tokens=message.cached_tokens,
        finish=finish_back_by_hand(message.finish),
    )


def row_by_hand(row: pr.TokenRow) -> worker_pb2.TokenRow:
    return worker_pb2.TokenRow(
        request_id=row.key.request_id,
        attempt=row.key.attempt,
        output_index=row.output_index,
        tokens=[token_by_hand(one) for one in row.tokens],
        finish=finish_by_hand(row.finish),
        decode_s=row.decode_s,
        decode_queue_s=row.decode_queue_s,
        preempted_s=row.preempted_s,
        preemptions=row.preemptions,
        queue_s=row.queue_s,
        prefill_s=row.prefill_s,
        cached_tokens=row.cached_tokens,
    )


def row_back_by_hand(message: worker_pb2.TokenRow) -> pr.TokenRow:
    return pr.TokenRow(
        key=AttemptKey("d0", message.request_id, message.attempt),
        output_index=message.output_index,
        tokens=tuple([token_back_by_hand(one) for one in message.tokens]),
        finish=finish_back_by_hand(message.finish),
        decode_s=_seconds("decode_s", message.decode_s),
        decode_queue_s=_seconds("decode_queue_s", message.decode_queue_s),
        preempted_s=_seconds("preempted_s", message.preempted_s),
        preemptions=message.preemptions,
        queue_s=_seconds("queue_s", message.queue_s),
        prefill_s=_seconds("prefill_s", message.prefill_s),
        cached_tokens=message.cached_tokens,
    )


def token_by_hand(token: TokenOut) -> worker_pb2.Token:
    top = [inference_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in token.top]
    return worker_pb2.Token(token_id=token.token_id, logprob=token.logprob, top=top)


def token_back_by_hand(message: worker_pb2.Token) -> TokenOut:
    return TokenOut(
        token_id=message.token_id,
        logprob=message.logprob if message.HasField("logprob") else None,
        top=tuple((one.token_id, one.logprob) for one in message.top),
    )


def finish_by_hand(reason: FinishReason | None) -> inference_pb2.FinishReason:
    if reason is None:
        return inference_pb2.FINISH_REASON_UNSPECIFIED
    is_stop = reason is FinishReason.STOP
    return inference_pb2.FINISH_REASON_STOP if is_stop else inference_pb2.FINISH_REASON_LENGTH


def finish_back_by_hand(number: int) -> FinishReason | None:
    if number == inference_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    return FinishReason.STOP if number == inference_pb2.FINISH_REASON_STOP else FinishReason.LENGTH


def _seconds(field: str, seconds: float) -> float:
    check_duration(field, seconds)
    return seconds


if __name__ == "__main__":
    main()
