"""Published trace files, and invalid files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pdserve.core.errors import ConfigError
from simulator.model import TraceError, TraceRequest
from simulator.traces.files import FileTrace
from simulator.traces.rows import MAX_TOKENS

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
TRACES = Path(os.environ.get("PDSERVE_TRACES", Path(__file__).parents[4] / "shared/traces"))


def mooncake(**changes: object) -> str:
    row = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]} | changes
    return json.dumps({name: value for name, value in row.items() if value is not ...})


def written(folder: Path, *lines: str, ends: str = "\n") -> Path:
    path = folder / "trace.txt"  # The format is detected by the content, not by the name.
    path.write_bytes(ends.join(lines).encode())
    return path


def test_mooncake_rows_become_requests(tmp_path: Path) -> None:
    trace = FileTrace(
        written(tmp_path, mooncake(timestamp=3000), "", mooncake(timestamp=4500.0, input_length=1, hash_ids=[7]))
    )
    assert list(trace) == [
        TraceRequest(arrival_s=0.0, prompt_tokens=600, output_tokens=3, block_ids=(0, 1)),
        TraceRequest(arrival_s=1.5, prompt_tokens=1, output_tokens=3, block_ids=(7,)),
    ]
    assert (trace.name, trace.block_tokens, trace.quantum_s) == ("trace.txt", 512, 3.0)
    assert list(trace) == list(trace)  # Each iteration reads the file again.


@pytest.mark.parametrize("text", ["a", "é", "語", "\U0001f600"])
def test_progress_counts_bytes(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, f"\ufeff{AZURE},note", *[f"2024-05-10 00:00:00,1,1,{text * 500}"] * 40, ends="\r\n")
    seen: list[tuple[int, int]] = []
    trace = FileTrace(path, lambda done, size: seen.append((done, size)))
    seen.clear()
    assert len(list(trace)) == 40
    size = path.stat().st_size
    assert (seen[0], seen[-1]) == ((0, size), (size, size))
    assert seen == sorted(seen)


def test_a_pipe_is_no_trace() -> None:
    read, write = os.pipe()
    os.close(write)
    try:
        with pytest.raises(ConfigError, match="a pipe, expected a file, because it is read more than once"):
            FileTrace(Path(f"/dev/fd/{read}"))
    finally:
        os.close(read)


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_azure_rows_become_requests(tmp_path: Path, ends: str) -> None:
    rows = ("2023-11-16 18:15:59.5000000,374,44", "2023-11-16 18:16:00.7500000,396,109")
    trace = FileTrace(written(tmp_path, "\ufeff" + AZURE, *rows, ends=ends))
    assert list(trace) == [
        TraceRequest(arrival_s=0.0, prompt_tokens=374, output_tokens=44),
        TraceRequest(arrival_s=1.25, prompt_tokens=396, output_tokens=109),
    ]
    assert (trace.block_tokens, trace.quantum_s) == (0, 0.0)


def test_azure_columns_may_have_any_order(tmp_path: Path) -> None:
    rows = ("GeneratedTokens,x,ContextTokens,TIMESTAMP", "5,a,6,2024-05-10 00:00:00.009930+00:00")
    assert list(FileTrace(written(tmp_path, *rows))) == [TraceRequest(arrival_s=0.0, prompt_tokens=6, output_tokens=5)]


@pytest.mark.parametrize(
    ("row", "column", "expected"),
    [
        (mooncake(output_length=...), "output_length", "every row has"),
        (mooncake(hash_ids=...), "hash_ids", "every row has"),
        (mooncake(timestamp=-1), "timestamp", "at least 0"),
        (mooncake(timestamp=500), "timestamp", "in order of arrival"),
        (mooncake(timestamp="soon"), "timestamp", "a number of milliseconds"),
        (mooncake(timestamp=True), "timestamp", "a number of milliseconds"),
        (mooncake(timestamp=float("nan")), "timestamp", "a number of milliseconds"),
        (mooncake(timestamp=float("inf")), "timestamp", "a number of milliseconds"),
        (mooncake(timestamp=10**400), "timestamp", "a number of milliseconds"),
        (mooncake(timestamp=10**14), "timestamp", "within ten years"),
        (mooncake(timestamp=1000, input_length=0), "input_length", "between 1 and"),
        (mooncake(timestamp=1000, input_length=-3), "input_length", "between 1 and"),
        (mooncake(timestamp=1000, input_length=600.0), "input_length", "whole number"),
        (mooncake(timestamp=1000, input_length="600"), "input_length", "whole number"),
        (mooncake(timestamp=1000, output_length=None), "output_length", "whole number"),
        (mooncake(timestamp=1000, output_length=MAX_TOKENS + 1), "output_length", str(MAX_TOKENS)),
        (mooncake(timestamp=1000, hash_ids=[1]), "hash_ids", "2: one per 512 of 600 prompt tokens"),
        (mooncake(timestamp=1000, hash_ids=[1, 2, 3]), "hash_ids", "2: one per 512"),
        (mooncake(timestamp=1000, hash_ids=[1, "2"]), "hash_ids", "a list of whole numbers"),
        (mooncake(timestamp=1000, hash_ids=[1, True]), "hash_ids", "a list of whole numbers"),
        (mooncake(timestamp=1000, hash_ids="12"), "hash_ids", "a list of whole numbers"),
        ("{", "row", "one JSON object"),
        ("[1]", "row", "one JSON object"),
        ("[" * 100_000, "row", "one JSON object"),
    ],
)
def test_a_wrong_mooncake_row_is_named_by_line_and_column(tmp_path: Path, row: str, column: str, expected: str) -> None:
    reading = iter(FileTrace(written(tmp_path, mooncake(timestamp=500), mooncake(timestamp=1000), "", row)))
    assert [next(reading).arrival_s, next(reading).arrival_s] == [0.0, 0.5]
    with pytest.raises(TraceError) as caught:
        next(reading)
    assert (caught.value.trace, caught.value.line, caught.value.column) == ("trace.txt", 4, column)
    assert expected in caught.value.expected
    assert str(caught.value).startswith(f"trace.txt, line 4, {column}: got ")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("row", "column", "expected"),
    [
        ("2023-11-16 18:15:45,1,1", "TIMESTAMP", "in order of arrival"),
        ("yesterday,1,1", "TIMESTAMP", "a date and time such as"),
        ("12.5,1,1", "TIMESTAMP", "a date and time such as"),
        (",1,1", "TIMESTAMP", "a value in cell 1"),
        ("2099-11-16 18:15:47,1,1", "TIMESTAMP", "within ten years"),
        ("2023-11-16 18:15:47,0,1", "ContextTokens", "between 1 and"),
        ("2023-11-16 18:15:47,-4,1", "ContextTokens", "between 1 and"),
        ("2023-11-16 18:15:47,--4,1", "ContextTokens", "whole number"),
        ("2023-11-16 18:15:47,3.5,1", "ContextTokens", "whole number"),
        ("2023-11-16 18:15:47,3,many", "GeneratedTokens", "whole number"),
        ("2023-11-16 18:15:47,3," + "9" * 5000, "GeneratedTokens", "whole number"),
        ("2023-11-16 18:15:47,3", "GeneratedTokens", "a value in cell 3"),
        ("2023-11-16 18:15:47", "ContextTokens", "a value in cell 2"),
    ],
)
def test_a_wrong_azure_row_is_named_by_line_and_column(tmp_path: Path, row: str, column: str, expected: str) -> None:
    with pytest.raises(TraceError) as caught:
        list(FileTrace(written(tmp_path, AZURE, "2023-11-16 18:15:46,1,1", row)))
    assert (caught.value.line, caught.value.column) == (3, column)
    assert expected in caught.value.expected


def test_a_missing_azure_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 1, GeneratedTokens"):
        list(FileTrace(written(tmp_path, "TIMESTAMP,ContextTokens", "2023-11-16 18:15:46,1")))


@pytest.mark.parametrize("lines", [(), ("", "  ", ""), (AZURE,), (AZURE, "")])
def test_a_file_without_requests_is_an_error(tmp_path: Path, lines: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="at least one request"):
        list(FileTrace(written(tmp_path, *lines)))


def test_a_file_of_no_known_format_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"one of sessions JSONL, .*Mooncake JSONL, Azure CSV"):
        FileTrace(written(tmp_path, "time,in,out", "1,2,3"))


def test_unreadable_files_are_typed_errors(tmp_path: Path) -> None:
    path = tmp_path / "binary"
    path.write_bytes(b"\x1f\x8b\x08\xff\xfe\n")
    with pytest.raises(TraceError, match="a text file"):
        FileTrace(path)
    with pytest.raises(ConfigError, match="a file that can be read"):
        FileTrace(tmp_path / "absent")
    with pytest.raises(ConfigError, match="a file that can be read"):
        FileTrace(tmp_path)


def test_a_file_is_read_as_a_stream(tmp_path: Path) -> None:
    """A reader that stops early does not see the damage in the last line."""
    rows = [mooncake(timestamp=number) for number in range(1000)]
    reading = iter(FileTrace(written(tmp_path, *rows, "damage")))
    assert len([next(reading) for _ in rows]) == 1000
    with pytest.raises(TraceError, match="line 1001, row"):
        next(reading)


@pytest.mark.parametrize(
    ("name", "count", "span_s", "prompt_tokens"),
    [("mooncake_conversation.jsonl", 12_031, 3537, 12_035), ("azure_2023_conv.csv", 19_366, 3502, 1155)],
)
def test_the_published_files_are_read_completely(name: str, count: int, span_s: int, prompt_tokens: int) -> None:
    if not (TRACES / name).exists():
        pytest.skip(
            f"{name} is not there: a public file that is no part of the product (PDSERVE_TRACES names its folder)"
        )
    requests = list(FileTrace(TRACES / name))
    assert len(requests) == count
    assert round(requests[-1].arrival_s) == span_s
    assert round(sum(one.prompt_tokens for one in requests) / count) == prompt_tokens
