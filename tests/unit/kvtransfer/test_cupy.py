"""The binding of NCCL by CuPy: a pair's communicator, ids and statuses. CuPy is a fake."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtransfer.devices.cuda import CudaBlocks
from kvtransfer.devices.issuer import Issuer, answer_of, on_its_own_thread, status_of
from kvtransfer.devices.nccl_connection import NcclConnector, communicator
from kvtransfer.transports.nccl import Nccl
from pdserve.core.errors import TransferFailed
from tests.unit.kvtransfer.fake_driver import ID_BYTES, Communicator, Event, cupy_of

UNIQUE_ID = bytes([255, 5, 127, *range(ID_BYTES - 3)])


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Callable[..., NcclConnector]:
    """connector(available=True): with a stand-in for CuPy's binding, which adds its communicators to `made`."""

    def make(available: bool = True) -> NcclConnector:
        made: list[Communicator] = []

        def communicator(*arguments: Any) -> Communicator:
            made.append(Communicator(*arguments))
            return made[-1]

        nccl = SimpleNamespace(
            available=available,
            get_version=lambda: 23004,
            get_unique_id=lambda: UNIQUE_ID,
            NcclCommunicator=communicator,
            made=made,
        )
        cupy = cupy_of()
        cupy.cuda.nccl = nccl
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
        return Nccl()._connector()  # type: ignore[return-value]

    return make


def device_that(copying: Any) -> Any:
    """A device whose messages end like `copying`, at once."""

    def watched(wake: Callable[[], None], *_: Any) -> Any:
        wake()
        return copying

    staging = CudaBlocks(torch.zeros((1, 16), dtype=torch.uint8))
    return SimpleNamespace(
        device=torch.device("cuda", 0),
        watched=watched,
        staging=lambda blocks: staging,
        has_drained=lambda stream, limit_s: True,
    )


def test_cupy_without_nccl_is_reported(connector: Callable[..., NcclConnector]) -> None:
    with pytest.raises(TransferFailed, match="CuPy finds no NCCL library"):
        connector(available=False)


@pytest.mark.parametrize(("rank", "word"), [(0, "send"), (1, "recv")])
def test_a_new_pair_sends_a_first_message(
    events: list[Event], connector: Callable[..., NcclConnector], rank: int, word: str
) -> None:
    library = connector()
    assert library.version == "23004"
    unique_id = library.new_id()
    connection = library.join(device_that(SimpleNamespace(is_done=True)), unique_id, rank)
    [made] = library._nccl.made
    assert made.made_of == (2, UNIQUE_ID, rank)
    assert [name for name, *_ in made.calls] == [word]
    connection.close()
    connection.close()
    assert [name for name, *_ in made.calls] == [word, "abort"], "once"


def test_a_pair_without_a_first_message_is_aborted(
    events: list[Event], connector: Callable[..., NcclConnector]
) -> None:
    library = connector()
    with pytest.raises(TransferFailed, match="the other NCCL rank has not answered"):
        library.join(device_that(SimpleNamespace(is_done=False)), library.new_id(), 1)
    assert [name for name, *_ in library._nccl.made[0].calls] == ["recv", "abort"]


def test_a_failed_abort_still_ends_the_pair(
    events: list[Event], connector: Callable[..., NcclConnector], caplog: pytest.LogCaptureFixture
) -> None:
    library = connector()
    connection = library.join(device_that(SimpleNamespace(is_done=True)), library.new_id(), 1)

    def fails() -> None:
        raise KeyError(7)

    library._nccl.made[0].abort = fails
    connection.close()
    assert "failed when it was aborted" in caplog.text


def test_statuses_unknown_to_cupy_are_handled() -> None:
    assert status_of(KeyError(7)) == "status 7"
    assert status_of(RuntimeError("NCCL_ERROR_SYSTEM")) == "NCCL_ERROR_SYSTEM"


@pytest.mark.parametrize("kind", [bytes, tuple])
def test_an_nccl_id_reaches_cupy_14_as_bytes_and_older_ones_as_signed_chars(kind: type) -> None:
    class Cupy:
        @staticmethod
        def NcclCommunicator(num_ranks: int, unique_id: Any, rank: int) -> Any:
            if type(unique_id) is not kind:
                raise TypeError(f"Argument 'commId' has incorrect type (expected {kind.__name__})")
            return num_ranks, unique_id, rank

    chars = tuple(range(-128, 128))
    packed = bytes(number % 256 for number in chars)
    assert communicator(Cupy, packed, 1) == (2, packed if kind is bytes else chars, 1)


def test_a_missing_rank_delays_no_other_pair() -> None:
    waits = threading.Event()
    issuer = Issuer()
    with pytest.raises(TransferFailed, match="not answered"):
        answer_of(waits.wait, on_its_own_thread, 0.05)
    assert issuer.call(lambda: 5) == 5
    waits.set()


def test_unknown_statuses_are_numbers() -> None:
    def fails() -> None:
        raise KeyError(7)

    with pytest.raises(TransferFailed, match="status 7"):
        Issuer().call(fails)
