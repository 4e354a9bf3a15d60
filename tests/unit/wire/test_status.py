from __future__ import annotations

import subprocess
import sys
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from urllib.parse import quote

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from pdserve.core import errors
from pdserve.core.errors import PdserveError
from pdserve.wire import status

EXAMPLES: list[PdserveError] = [
    errors.InvalidRequest("temperature", "nan", "a number in [0, 100]"),
    errors.ContextLengthExceeded("prompt", "9 tokens", "at most 7 tokens"),
    errors.IdInUse("r1"),
    errors.NotFound("request", "r-1"),
    errors.UnknownMethod("/pdserve.v1.InferenceService/Explode"),
    errors.UnknownModel("lora", ["base", "other"]),
    errors.UnknownModel("lora", list("abcdefghijklmnopqrstuvwxyz")),
    errors.UnknownModel("lora"),
    errors.ConfigError("port", "90000", "a port between 0 and 65535"),
    errors.ModelError("config.json", "absent", "a Hugging Face checkpoint"),
    errors.Overloaded("no placement meets the targets", 1.25),
    errors.QuotaExceeded("tokens_per_minute", "used up", 2.5),
    errors.LoadShed("front", 1.5),
    errors.Unavailable("draining"),
    errors.Unavailable("restarting", 0.5),
    errors.NoWorkers("decode"),
    errors.NoWorkers("prefill", None),
    errors.NoWorkers("decode", states="2 drained, 1 away"),
    errors.ShuttingDown(),
    errors.DeadlineExceeded("queued"),
    errors.Cancelled("the caller left"),
    errors.Unauthenticated("no valid token"),
    errors.PermissionDenied("only for the operator"),
    errors.ChangeFailed("the roll-out stopped: 1 request failed"),
    errors.TransferFailed("checksum of block 3"),
    errors.KvLost("decode worker d0 is gone"),
    errors.InternalError("our own fault"),
]


def subclasses(kind: type[PdserveError]) -> Iterator[type[PdserveError]]:
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield child
            yield from subclasses(child)


def state(error: PdserveError) -> tuple[type[PdserveError], str, dict[str, object]]:
    return type(error), error.message, dict(vars(error))


def test_every_error_of_the_tree_has_a_row_and_an_example() -> None:
    tree = set(subclasses(PdserveError))
    assert set(status.TABLE) == tree
    assert {type(error) for error in EXAMPLES} == tree
    assert len(status.BY_REASON) == len(status.TABLE), "two errors share a reason"


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_errors_survive_the_wire(error: PdserveError) -> None:
    wire = status.to_status(error).SerializeToString()
    assert state(status.from_status(status_pb2.Status.FromString(wire))) == state(error)


def test_a_bad_field_is_named_in_bad_request_details() -> None:
    packed = status.to_status(errors.InvalidRequest("top_p", 2.0, "a number in (0, 1]"))
    found = error_details_pb2.BadRequest()
    assert any(detail.Unpack(found) for detail in packed.details if detail.Is(found.DESCRIPTOR))
    assert [(one.field, one.description) for one in found.field_violations] == [
        ("top_p", "got 2.0, expected a number in (0, 1]")
    ]


def test_a_long_value_is_shortened() -> None:
    packed = status.to_status(errors.InvalidRequest("stop", "x" * 100_000, "short"))
    assert len(packed.SerializeToString()) < 6_000


def test_an_unknown_error_class_is_sent_as_its_ancestor() -> None:
    class Stranger(errors.Overloaded):
        pass

    assert state(status.from_status(status.to_status(Stranger("busy", 2.0)))) == state(errors.Overloaded("busy", 2.0))
    assert type(status.from_status(status.to_status(PdserveError("what")))) is errors.InternalError


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_every_bare_status_means_some_error(code: grpc.StatusCode) -> None:
    assert isinstance(status.from_code(code, "text"), PdserveError)


def test_an_oversized_message_names_both_sizes() -> None:
    error = status.from_code(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max (5000012 vs. 4194304)"
    )
    assert isinstance(error, errors.InvalidRequest)
    assert "5000012" in error.message
    assert "4194304" in error.message


def test_a_foreign_reason_falls_back_to_the_code() -> None:
    packed = status.to_status(errors.Overloaded("busy", 2.0))
    info = error_details_pb2.ErrorInfo(reason="ELSE", domain="example.com")
    del packed.details[:]
    packed.details.add().Pack(info)
    assert type(status.from_status(packed)) is errors.Overloaded


class Raises(grpc.GenericRpcHandler):
    """Answers /t/<index> with EXAMPLES[index]; /t/bad with details that do not parse."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def handle(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
            name = details.method.rsplit("/", 1)[1]
            if name == "bad":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "odd", ((status.DETAILS_KEY, b"\xff\xff"),))
            await status.abort(context, EXAMPLES[int(name)])

        return grpc.unary_unary_rpc_method_handler(handle)


@pytest.fixture
async def address() -> AsyncIterator[str]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Raises(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:50051: "
            "Failed to connect to remote host: Connection refused",
            "no server answers at 127.0.0.1:50051 (Connection refused)",
        ),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv6:%5B::1%5D:6379: "
            "Failed parsing HTTP/2 (Expected SETTINGS frame as the first frame, got frame type 82)",
            "no connection to [::1]:6379: that server does not speak gRPC; give the gRPC port of the router",
        ),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:8000: Failed parsing HTTP/2 "
            "(Expected SETTINGS frame as the first frame, got frame type 80) "
            "(Trying to connect an http1.x server (HTTP status 400))",
            "no connection to 127.0.0.1:8000: that is an HTTP port; give the gRPC port of the router, which is 50051 "
            "unless its --port is another",
        ),
        (
            "errors resolving nowhere: [field:hostname lookup error:address lookup failed for nowhere: "
            "Domain name not found]",
            "no server answers at nowhere (Domain name not found)",
        ),
        ("Socket closed", "Socket closed"),
    ],
)
def test_a_failed_connection_names_address_and_reason(text: str, expected: str) -> None:
    assert status.from_code(grpc.StatusCode.UNAVAILABLE, text).message == expected


async def test_errors_cross_a_real_connection(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        for index, sent in enumerate(EXAMPLES):
            with pytest.raises(grpc.RpcError) as caught:
                await channel.unary_unary(f"/t/{index}")(b"")
            assert caught.value.code() is status.TABLE[type(sent)].code
            assert state(status.from_rpc_error(caught.value)) == state(sent)


async def test_details_that_do_not_parse_leave_the_code(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await channel.unary_unary("/t/bad")(b"")
        error = status.from_rpc_error(caught.value)
        assert type(error) is errors.Unavailable
        assert error.message == "odd"


def test_wire_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'redis', 'opentelemetry', 'ray', 'numpy', 'tokenizers'}"
    code = f"import sys, pdserve.wire.status, pdserve.wire.convert; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("retry_after_s", [float("inf"), 1e300, 1e12, float("nan")])
def test_a_huge_retry_time_is_limited_to_a_day(retry_after_s: float) -> None:
    found = status.from_status(status.to_status(errors.Overloaded("full", retry_after_s)))
    assert isinstance(found, errors.Overloaded)
    assert found.retry_after_s == 86_400.0


def test_the_names_of_served_models_fit_the_metadata_of_a_call() -> None:
    """Beyond 8 KiB, gRPC's client replaces the error by RESOURCE_EXHAUSTED, which callers retry."""
    found = status.to_status(errors.UnknownModel("sql", ["\N{GRINNING FACE}" * 256] * 20))
    assert len(quote(found.message)) + len(b64encode(found.SerializeToString())) < 7 * 1024
