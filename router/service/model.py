"""Properties of the cluster's model, as workers report them. All workers of one revision must agree; those of another
one may have other weights, with the same vocabulary and end tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.core.errors import ConfigError
from pdserve.core.kv.kv_shape import Fingerprint, check_convertible
from pdserve.v1 import worker_pb2
from pdserve.wire.protocol import FINGERPRINT


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    name: str
    max_context_tokens: int  # of the largest decode worker; a request goes to a worker that is large enough
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    hash_seed: bytes
    fingerprint: Fingerprint
    has_older_grammars: bool = False  # some worker has an older library of grammars
    aliases: tuple[str, ...] = ()  # further names for callers
    revision: str = ""  # empty: that of the cluster's start

    @property
    def weights(self) -> str:
        """Their identity. Tokens and KV of different weights are never mixed."""
        return self.fingerprint.engine

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def max_prompt_tokens(self) -> int:
        """At least one position is left for an answer."""
        return self.max_context_tokens - 1


def facts_of(hello: worker_pb2.WorkerHello, names: Sequence[str]) -> ModelFacts:
    """`names`: of the model, for callers."""
    name, *aliases = names
    return ModelFacts(
        name=name,
        aliases=tuple(aliases),
        max_context_tokens=hello.max_context_tokens,
        vocab_size=hello.vocab_size,
        eos_token_ids=tuple(hello.eos_token_ids),
        block_size=hello.block_size,
        hash_seed=hello.hash_seed,
        fingerprint=FINGERPRINT.decode(hello.fingerprint),
        revision=hello.revision,
    )


def difference(ours: ModelFacts, theirs: ModelFacts) -> str | None:
    """Describes the first difference of two workers' models; None if they are compatible.

    The maximum sequence length, the block size and the dtype may differ, because KV is converted to the decode worker's
    format. Workers of different revisions exchange no KV, unless they have the same weights.
    """
    is_same = ours.revision == theirs.revision
    for name in ("protocol", "model", "engine") if is_same else ("protocol",):
        one, other = getattr(ours.fingerprint, name), getattr(theirs.fingerprint, name)
        if one != other:
            return f"its {name} is {other!r}, the cluster's is {one!r}"
    for name in ("vocab_size", "eos_token_ids"):
        if getattr(ours, name) != getattr(theirs, name):
            return f"its {name} differs from the cluster's"
    if ours.weights != theirs.weights:
        return None
    try:
        check_convertible(ours.fingerprint.shape, theirs.fingerprint.shape)
    except ConfigError as error:
        return f"its {error.field} is {error.seen!r}, the cluster's is {error.expected}"
    return None
