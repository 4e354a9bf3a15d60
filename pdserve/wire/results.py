"""Codecs of the results of a request, which the router encodes and the SDK decodes."""

from __future__ import annotations

from typing import Final

from pdserve.core.phases import Phases
from pdserve.core.results import Timings, Usage
from pdserve.core.types import SamplingDefaults
from pdserve.v1 import inference_pb2
from pdserve.wire.codec import Codec

SAMPLING_DEFAULTS: Final = Codec(SamplingDefaults, inference_pb2.SamplingDefaults)
USAGE: Final = Codec(Usage, inference_pb2.Usage)
PHASES: Final = Codec(Phases, inference_pb2.Phases, is_lenient=True)
TIMINGS: Final = Codec(Timings, inference_pb2.Timings, nested=(PHASES,), is_lenient=True)
