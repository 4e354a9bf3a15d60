"""The codec of a log's lines."""

from __future__ import annotations

from typing import Final

from pdserve.core.log_line import LogLine
from pdserve.v1 import worker_pb2
from pdserve.wire.codec import Codec

LOG_LINE: Final = Codec(LogLine, worker_pb2.LogLine, is_lenient=True)  # a time of day is no duration
