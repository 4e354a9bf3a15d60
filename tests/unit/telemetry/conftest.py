from collections.abc import Iterator

import pytest

from tests.unit.telemetry.otlp_sink import OtlpSink, running_sink


@pytest.fixture
def sink() -> Iterator[OtlpSink]:
    with running_sink() as sink:
        yield sink
