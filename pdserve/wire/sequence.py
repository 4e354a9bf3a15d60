"""The codec of a Sequence: the data that a worker needs to compute a request's tokens. No I/O."""

from __future__ import annotations

from typing import Final

from pdserve.core.attempt import Attempt
from pdserve.v1 import worker_pb2
from pdserve.wire.codec import Codec, Special
from pdserve.wire.convert import sampling_from_proto, sampling_to_proto

# The worker computes the `given` fields from its clock, its hash seed and the `ignored` fields of the message.
SEQUENCE: Final = Codec(
    Attempt,
    worker_pb2.Sequence,
    special={"sampling": Special(sampling_to_proto, sampling_from_proto)},
    renamed={"prompt_ids": "prompt_token_ids", "output_ids": "output_token_ids"},
    given=("chain_key", "arrived_s", "deadline_at_s", "begun_at_s"),
    ignored=("deadline_s", "waited_s", "traceparent", "cache_salt"),
)
