"""Random documents of a grammar, written without a model: each token is drawn from those that the mask allows."""

from __future__ import annotations

import random

import numpy as np

from pdserve.core.grammar import Grammar
from pdserve.structured.compile import Compiler
from pdserve.text.tokenizer import Tokenizer

END_SHARE = 0.3  # of steps that end the document, a string or a list if that is allowed
END_MARKS = '"}]'


def document(compiler: Compiler, tokenizer: Tokenizer, grammar: Grammar, rng: random.Random, most: int = 400) -> str:
    """Empty if the document did not end within `most` tokens. Raises InvalidRequest if the grammar is refused."""
    matcher = compiler.compile(grammar)
    ends = {token for mark in END_MARKS for token in tokenizer.encode(mark)}
    output: list[int] = []
    for _ in range(most):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        if matcher.is_error() or not len(allowed):
            raise AssertionError(f"stuck after {tokenizer.decode(output)!r}: {matcher.get_error()}")
        if matcher.is_accepting() and (matcher.is_stopped() or rng.random() < END_SHARE):
            return tokenizer.decode(output)
        ending = [token for token in allowed.tolist() if token in ends]
        is_ending = ending and rng.random() < END_SHARE
        token = rng.choice(ending) if is_ending else int(allowed[rng.randrange(len(allowed))])
        if token == 0:
            continue
        output.append(token)
        assert matcher.consume_token(token)
    return ""
