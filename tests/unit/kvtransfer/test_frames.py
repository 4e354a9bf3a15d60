from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.protocol.frames import (
    HEADER_BYTES,
    MAX_TEXT_BYTES,
    BadFrame,
    Frame,
    Kind,
    Tag,
    decode,
    decode_text,
    encode_text,
    tag_of,
)
from pdserve.core.kv.kv_shape import TransferKey

U32 = st.integers(0, 2**32 - 1)
TAGS = st.builds(Tag, st.binary(min_size=16, max_size=16), U32, st.integers(0, 2**64 - 1))
CHUNKS = st.builds(
    Frame, st.just(Kind.CHUNK), TAGS, U32, U32, U32, st.integers(0, 1000), st.binary(min_size=8, max_size=8),
    st.booleans(),
)  # fmt: skip
PLAIN = Frame(Kind.CHUNK, tag_of(TransferKey(transfer_id="t", attempt=1, generation=2)), 1, 2, 3, 40)


@given(CHUNKS)
def test_a_frame_survives_the_wire(frame: Frame) -> None:
    assert decode(frame.encode(), max_chunk_bytes=1000) == frame


@given(CHUNKS, st.integers(0, HEADER_BYTES * 8 - 1))
def test_any_flipped_bit_in_a_header_is_detected(frame: Frame, bit: int) -> None:
    header = bytearray(frame.encode())
    header[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadFrame):
        decode(header, max_chunk_bytes=2**32)


@given(st.binary(max_size=200))
def test_garbage_is_a_bad_frame(garbage: bytes) -> None:
    with pytest.raises(BadFrame):
        decode(garbage, max_chunk_bytes=2**32)


def test_a_length_over_the_limit_is_rejected_first() -> None:
    with pytest.raises(BadFrame, match="CHUNK frame of 40 bytes, at most 39"):
        decode(PLAIN.encode(), max_chunk_bytes=39)
    with pytest.raises(BadFrame, match=f"REFUSE frame of 513 bytes, at most {MAX_TEXT_BYTES}"):
        decode(Frame(Kind.REFUSE, PLAIN.tag, length=513).encode(), max_chunk_bytes=2**30)
    with pytest.raises(BadFrame, match="DONE frame of 1 bytes, at most 0"):
        decode(Frame(Kind.DONE, PLAIN.tag, length=1).encode(), max_chunk_bytes=2**30)


def test_text_is_cut_to_the_limit_and_made_printable() -> None:
    message = encode_text(Kind.REFUSE, PLAIN.tag, "é" * 1000)
    assert len(message) == HEADER_BYTES + MAX_TEXT_BYTES
    assert decode_text(b"a\n\x1b[31mb\xff") == "a??[31mb\ufffd"


def test_tags_distinguish_transfers_attempts_and_generations() -> None:
    keys = [TransferKey(transfer_id=t, attempt=a, generation=g) for t in "ab" for a in (1, 2) for g in (1, 2)]
    assert len({tag_of(key) for key in keys}) == 8


def test_a_tag_is_sixteen_bytes_of_the_transfers_id() -> None:
    tag = tag_of(TransferKey(transfer_id="t", attempt=2, generation=3))
    assert tag == (hashlib.blake2b(b"t", digest_size=16).digest(), 2, 3)
