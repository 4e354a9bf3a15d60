from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdserve.testing import Cluster


@pytest.fixture(scope="package")
def target() -> Iterator[str]:
    """A real cluster on the toy engine, for all tests of the command line. Those of `pdserve up` start processes."""
    with Cluster(worker={"toy_step_s": 0.001}) as cluster:
        yield cluster.address
