"""The options of a call: the keyword arguments of generate() and stream(), and a table of the scalar ones, from which
the command line makes its flags.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypedDict

from pdserve.core.types import Slo


class Options(TypedDict, total=False):
    """Keyword arguments of generate() and stream(). An absent argument (or None) is not zero: the server's default
    applies.

    The server checks the ranges. docs/sampling.md lists the order in which the arguments apply. An option sets the
    field of its name in GenerateRequest or SamplingParams. The text of a scalar is also the help of its command-line
    flag (pdserve/cli/generate.py).
    """

    max_tokens: Annotated[
        int | None, "maximum number of generated tokens; 1 to the server's limit (the model's default, or 256)"
    ]
    min_tokens: Annotated[int | None, "minimum number of generated tokens; 0 to max_tokens"]
    temperature: Annotated[float | None, "sampling temperature, 0 to 100; 0 is greedy (the model's default, or 1)"]
    top_k: Annotated[int | None, "sample from the N most likely tokens; 0 means all"]
    top_p: Annotated[float | None, "sample from the most likely tokens with total probability X; above 0, to 1"]
    min_p: Annotated[float | None, "sample from tokens with at least X times the largest probability; 0 to 1"]
    top_n_sigma: Annotated[
        float | None, "sample from logits at most X deviations below the best, 0 to 100; 0 means all"
    ]
    repetition_penalty: Annotated[float | None, "repetition penalty over prompt and output, 0.01 to 100; 1 means none"]
    presence_penalty: Annotated[float | None, "presence penalty over the output, -2 to 2; 0 means none"]
    frequency_penalty: Annotated[float | None, "frequency penalty over the output, -2 to 2; 0 means none"]
    seed: Annotated[int | None, "seed of the sampling, unsigned 64-bit; random if absent"]
    ignore_eos: Annotated[bool | None, "continue after an end-of-sequence token"]
    logprobs: Annotated[int | None, "logprobs of the output tokens and of the N most likely tokens; 0 to 64"]
    include_stop_in_output: Annotated[bool | None, "keep the stop string or stop token in the text"]
    skip_special_tokens: Annotated[bool | None, "leave special tokens out of the text"]  # True if absent
    stop_in_reasoning: Annotated[bool | None, "stop strings of a chat also end its reasoning"]
    prompt_logprobs: Annotated[int | None, "logprobs of the prompt tokens and of the N most likely tokens; 0 to 20"]
    stop: str | Sequence[str] | None  # at most 16 strings of 1 to 256 characters
    stop_token_ids: Sequence[int] | None  # at most 64
    logit_bias: Mapping[int, float] | None  # token id to -100 to 100, added to its logit; at most 1024
    allowed_token_ids: Sequence[int] | None  # only these tokens are sampled; 1 to 8192
    bad_words: str | Sequence[str] | None  # texts that the output must not contain; at most 128, of 1 to 256 characters
    # the answer is a document of this schema; docs/structured-output.md
    json_schema: Mapping[str, Any] | bool | str | None
    json_object: bool | None  # the answer is any JSON object
    regex: str | None  # the whole answer matches it
    choice: Sequence[str] | None  # the answer is one of them
    grammar: str | None  # Lark; of these five at most one
    n: int | None  # answers, 1 to 16; over 1 only with a temperature
    tools: Sequence[Mapping[str, Any]] | None  # of a chat: functions that the model may call, in OpenAI's form
    # of a chat: values for names that the model's chat template reads, such as {"enable_thinking": False} for Qwen3
    chat_template_kwargs: Mapping[str, Any] | None
    reasoning_effort: str | None  # of a chat: none, minimal, low, medium, high, xhigh or max; docs/http.md
    allow_special_tokens: bool | None  # of a chat: names of control tokens in its texts become these tokens
    best_of: int | None  # n to 16: samples this many and returns the n with the largest mean logprob, at the end
    slo: Slo | Mapping[str, float] | None  # a mapping sets only the targets that it names: ttft_s, tpot_s, itl_s
    slo_task_s: float | None  # deadline of the whole task, which is the session; docs/sessions.md
    timeout_s: float | None  # limit of the whole call, including retries
    request_id: str | None
    session_id: str | None  # groups requests in spans, logs and recordings; at most 128 printable characters
    cache_salt: str | None  # only requests with the same salt share cached prefixes; 1 to 256 characters
    model: str | None  # a name that model() lists: of the model, which is the default, or of a LoRA adapter
    priority: int | None  # larger values are served first among requests of equal slack
    # Hints (docs/sessions.md): seconds until the prefix is used again, 0 if the session ends; tokens of the answer.
    reuse_within_s: float | None
    expected_output_tokens: int | None
    truncate_prompt_tokens: int | None  # keeps this many last prompt tokens
    traceparent: str | None  # W3C trace context of the caller's span, for programs without OpenTelemetry


@dataclass(frozen=True, slots=True)
class Scalar:
    """A sampling option with one value."""

    name: str
    kind: type[int] | type[float] | type[bool]
    text: str


_SCALAR_TYPES: Final[Mapping[Any, type[int] | type[float] | type[bool]]] = {
    int | None: int,
    float | None: float,
    bool | None: bool,
}


def _scalars() -> tuple[Scalar, ...]:
    hints = typing.get_type_hints(Options, include_extras=True)
    annotated = {name: hint for name, hint in hints.items() if typing.get_origin(hint) is Annotated}
    return tuple(Scalar(name, _SCALAR_TYPES[hint.__origin__], hint.__metadata__[0]) for name, hint in annotated.items())


SAMPLING_SCALARS: Final = _scalars()
