"""The sampling flags, which follow from the options of the SDK."""

from __future__ import annotations

import argparse

import pytest

from pdserve.cli.sampling import add_sampling_flags, options
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
