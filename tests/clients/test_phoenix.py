"""A cluster's traces in a real tracing backend, which reads the GenAI conventions.

tests/cluster/test_trace.py proves the same spans with a collector of our own, without another program.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve import Client, InvalidRequest
from pdserve.launch.running import Running
from pdserve.telemetry import names
from tests.support.phoenix import running_phoenix
from tests.unit.launch.conftest import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_backend_shows_the_trace_of_a_request(need: Callable[[str], Path], tmp_path: Path) -> None:
    with running_phoenix(need("phoenix"), tmp_path) as phoenix:
        with Running.start("--model", "toy", "--otlp", phoenix.otlp) as cluster, Client(cluster.target) as client:
            done = client.generate("hello", max_tokens=4, session_id="a session")
            with pytest.raises(InvalidRequest):
                client.generate("hello", temperature=-1.0)
        until(lambda: any(one["status_code"] == "ERROR" for one in phoenix.spans()), 60.0)  # the last one
        spans = phoenix.spans()
    [request] = [one for one in spans if one["attributes"].get(names.REQUEST_ID) == done.request_id]
    assert (request["name"], request["status_code"]) == ("text_completion toy", "UNSET")
    assert request["span_kind"] == "LLM"  # it has understood the conventions
    below = [one for one in spans if one["parent_id"] == request["context"]["span_id"]]
    assert {"pdserve.prepare", "pdserve.decode", "pdserve.deliver"} <= {one["name"] for one in below}
    [failed] = [one for one in spans if one["status_code"] == "ERROR"]
    assert failed["attributes"][names.ERROR_TYPE] == "INVALID_REQUEST"
