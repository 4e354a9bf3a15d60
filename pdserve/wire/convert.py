"""Converts between the generated messages and pdserve.core.types, with a default for every absent field.

Pure in effect: no I/O. Bad values raise InvalidRequest, naming the field as the .proto spells it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, cast

from pdserve.core.errors import InvalidRequest
from pdserve.core.grammar import Grammar, GrammarKind, choice
from pdserve.core.types import (
    MAX_BAD_SEQUENCE_TOKENS,
    FinishReason,
    RequestAttributes,
    Role,
    Sampling,
    SamplingDefaults,
    Slo,
    TokenOut,
    check_counts,
    require_at_most,
)
from pdserve.v1 import inference_pb2, transfer_pb2, worker_pb2
from pdserve.wire.codec import Special, numbers_of

# More blocks than any pool has; a larger extent is an error, or an attack on the reader's memory.
MAX_EXTENT_BLOCKS: Final = 2**24

_ROLES: Final = numbers_of(Role, worker_pb2.Role.DESCRIPTOR)
_FINISHES: Final = numbers_of(FinishReason, inference_pb2.FinishReason.DESCRIPTOR)


def _scalars() -> frozenset[str]:
    """The scalar fields, whose names in Sampling and in its message are equal. Raises TypeError if they are not."""
    message = inference_pb2.SamplingParams.DESCRIPTOR.fields
    scalars = [one.name for one in message if one.has_presence and one.message_type is None]
    if missing := {one.name for one in dataclasses.fields(Sampling)} ^ {*scalars, *_NOT_SCALARS}:
        raise TypeError(f"Sampling and SamplingParams differ in {sorted(missing)}")
    return frozenset(scalars)


_NOT_SCALARS: Final = ("stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_token_ids", "grammar")
_SCALARS: Final = _scalars()
_ATTRIBUTES: Final = tuple(one.name for one in dataclasses.fields(RequestAttributes))


def sampling_from_proto(
    message: inference_pb2.SamplingParams,
    *,
    draw_seed: Callable[[], int] | None = None,
    default_max_tokens: int | None = None,
    defaults: SamplingDefaults | None = None,
    bad_words: Iterable[tuple[int, ...]] = (),
) -> Sampling:
    """Absent fields get `defaults`, then Sampling's own; an absent seed is random, or 0 if `draw_seed` is None.

    `bad_words` are those of the message, tokenised. A worker passes no arguments, because the router has filled every
    field.
    """
    given: dict[str, Any] = {field.name: value for field, value in message.ListFields()}  # absent ones need no work
    values = {name: value for name, value in given.items() if name in _SCALARS}
    if len(values) < len(given):
        check_counts(message)
        for word in message.bad_token_ids:
            require_at_most("bad_words", "tokens in a word", len(word.ids), MAX_BAD_SEQUENCE_TOKENS)
    if "seed" not in values and draw_seed is not None:
        values["seed"] = draw_seed()
    if defaults is not None:
        values = {**defaults.given(), **values}
        if "max_tokens" not in given:
            values.pop("max_tokens", None)
    if "max_tokens" not in values and default_max_tokens is not None:
        values["max_tokens"] = max(default_max_tokens, values.get("min_tokens", 0))
    return Sampling(
        stop=tuple(given.get("stop", ())),
        stop_token_ids=tuple(given.get("stop_token_ids", ())),
        logit_bias=tuple(sorted(given["logit_bias"].items())) if "logit_bias" in given else (),
        allowed_token_ids=tuple(given.get("allowed_token_ids", ())),
        bad_token_ids=(*(tuple(one.ids) for one in given.get("bad_token_ids", ())), *bad_words),
        grammar=grammar_from_proto(message.structured_output) if "structured_output" in given else None,
        **values,
    )


def sampling_to_proto(sampling: Sampling) -> inference_pb2.SamplingParams:
    """Complete except for `logprobs` and `prompt_logprobs`, whose absence has a meaning."""
    values = {name: getattr(sampling, name) for name in _SCALARS if getattr(sampling, name) is not None}
    return inference_pb2.SamplingParams(
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=sampling.allowed_token_ids,
        bad_token_ids=[inference_pb2.TokenIds(ids=word) for word in sampling.bad_token_ids],
        structured_output=None if sampling.grammar is None else grammar_to_proto(sampling.grammar),
        **values,
    )


def grammar_from_proto(message: inference_pb2.StructuredOutput) -> Grammar | None:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest("structured_output", "nothing", "one of its kinds")
    if kind == "choice":
        return choice(message.choice.strings)
    if kind == "json_object":
        return Grammar(GrammarKind.JSON_OBJECT) if message.json_object else None
    return Grammar(GrammarKind(kind), getattr(message, kind))


def grammar_to_proto(grammar: Grammar) -> inference_pb2.StructuredOutput:
    message = inference_pb2.StructuredOutput()
    if grammar.kind is GrammarKind.CHOICE:
        message.choice.strings.extend(grammar.choices())
    elif grammar.kind is GrammarKind.JSON_OBJECT:
        message.json_object = True
    else:
        setattr(message, grammar.kind.value, grammar.text)
    return message


def attributes_from_proto(message: inference_pb2.GenerateRequest) -> RequestAttributes:
    """Fields that the client has not set get their defaults."""
    return RequestAttributes(**{name: getattr(message, name) for name in _ATTRIBUTES if message.HasField(name)})  # type: ignore[arg-type]


def slo_from_proto(message: inference_pb2.Slo, default: Slo) -> Slo:
    return Slo(
        ttft_s=message.ttft_s if message.HasField("ttft_s") else default.ttft_s,
        tpot_s=message.tpot_s if message.HasField("tpot_s") else default.tpot_s,
        itl_s=message.itl_s if message.HasField("itl_s") else default.itl_s,
    )


def logprobs_to_proto(token: TokenOut) -> inference_pb2.TokenLogprobs:
    """For the client; `token.logprob` must be set."""
    assert token.logprob is not None
    return inference_pb2.TokenLogprobs(
        token_id=token.token_id, logprob=token.logprob, top=tops_to_proto(token.top), rank=token.rank
    )


def tops_to_proto(top: Iterable[tuple[int, float]]) -> list[inference_pb2.TopLogprob]:
    return [inference_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in top]


def tops_from_proto(top: Iterable[inference_pb2.TopLogprob]) -> tuple[tuple[int, float], ...]:
    return tuple([(one.token_id, one.logprob) for one in top])


#: Of `top` in a dataclass with a token's most likely alternatives.
TOPS: Final = Special(tops_to_proto, tops_from_proto)


def role_to_proto(role: Role) -> worker_pb2.Role:
    return cast("worker_pb2.Role", _ROLES[role])


def role_from_proto(number: int) -> Role:
    """Raises InvalidRequest."""
    found = next((role for role, known in _ROLES.items() if known == number), None)
    if found is None:
        raise InvalidRequest("role", number, "prefill or decode")
    return found


def finish_to_proto(reason: FinishReason) -> inference_pb2.FinishReason:
    return cast("inference_pb2.FinishReason", _FINISHES[reason])


def extents_from_blocks(blocks: Sequence[int]) -> list[transfer_pb2.Extent]:
    """Runs of consecutive block numbers, in order."""
    extents: list[transfer_pb2.Extent] = []
    for block in blocks:
        if extents and extents[-1].first_block + extents[-1].num_blocks == block:
            extents[-1].num_blocks += 1
        else:
            extents.append(transfer_pb2.Extent(first_block=block, num_blocks=1))
    return extents


def blocks_from_extents(extents: Iterable[transfer_pb2.Extent]) -> tuple[int, ...]:
    blocks: list[int] = []
    for extent in extents:
        if len(blocks) + extent.num_blocks > MAX_EXTENT_BLOCKS:
            raise InvalidRequest("extents", f"over {len(blocks)} blocks", f"at most {MAX_EXTENT_BLOCKS} blocks")
        blocks.extend(range(extent.first_block, extent.first_block + extent.num_blocks))
    return tuple(blocks)
