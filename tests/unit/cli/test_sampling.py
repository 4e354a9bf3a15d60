"""The sampling flags, which follow from the options of the SDK."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from pdserve.cli.generate import add_sampling_flags, options
from pdserve.client.request import generate_request


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_sampling_flags(parser)
    return parser


def test_a_flag_that_is_not_given_is_not_sent(parser: argparse.ArgumentParser) -> None:
    assert options(parser.parse_args([])) == {}


def test_flags_become_options_of_their_type(parser: argparse.ArgumentParser) -> None:
    line = "--max-tokens 5 --temperature 0 --frequency-penalty -0.5 --ignore-eos --no-skip-special-tokens"
    line += " --include-stop-in-output --stop a --stop b --bad-words c --logit-bias 3=-1 --slo-ttft 2"
    chosen = options(parser.parse_args(line.split()))
    slo = chosen.pop("slo")
    assert slo.ttft_s == 2.0
    assert chosen == {
        "max_tokens": 5,
        "temperature": 0.0,
        "frequency_penalty": -0.5,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "include_stop_in_output": True,
        "stop": ["a", "b"],
        "bad_words": ["c"],
        "logit_bias": {3: -1.0},
    }
    assert generate_request("hi", chosen).sampling.skip_special_tokens is False


@pytest.mark.parametrize("flag", ["--json-schema", "--grammar"])
def test_a_file_without_its_at_sign_is_named(
    flag: str,
    parser: argparse.ArgumentParser,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shape").write_text("{}")
    for value, meant in (("shape", "; @shape is that file"), ("absent", "; @NAME is a file")):
        with pytest.raises(SystemExit):
            parser.parse_args([flag, value])
        assert f"argument {flag}: '{value}' is not " in (error := capsys.readouterr().err)
        assert error.endswith(f"{meant}\n")


def test_a_schema_is_json(parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for text in ('{"type": "object"}', "true", "[" * 100_000):  # the last one is too deep to be read here
        assert parser.parse_args(["--json-schema", text]).json_schema == text
    broken = tmp_path / "schema.json"
    broken.write_text('{"type": }')
    with pytest.raises(SystemExit):
        parser.parse_args(["--json-schema", f"@{broken}"])
    assert f"{broken} is not JSON (Expecting value: line 1 column 10 (char 9))\n" in capsys.readouterr().err


def test_a_grammar_may_have_the_length_of_no_file_name(parser: argparse.ArgumentParser) -> None:
    grammar = 'start: "a"\n' * 1000
    assert parser.parse_args(["--grammar", grammar]).grammar == grammar
