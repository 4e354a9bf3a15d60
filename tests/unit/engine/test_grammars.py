"""Rows with a grammar: every document is valid in every engine, and other rows are not affected."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLParserLimits

from pdserve.core.attempt import EndRule
from pdserve.core.grammar import Grammar, GrammarKind, choice
from pdserve.core.types import FinishReason, Sampling, TokenOut
from pdserve.engine.interface import Engine, Row
from pdserve.engine.sampling import grammars
from pdserve.engine.sampling.grammars import Cursor, Grammars, Matchers
from pdserve.engine.toy import ToyEngine
from pdserve.structured.compile import Compiler
from pdserve.text.tokenizer import load_tokenizer
from tests.oracle import Oracle
from tests.unit.structured.schemas import schema

MODEL = next((Path(__file__).parents[3] / "pdserve/models").glob("stdlib-*"))
TOKENIZER = load_tokenizer(str(MODEL))
EOS = 0
NUM_SCHEMAS = 40
PROMPT = TOKENIZER.encode("def config():\n    return ")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
DEAD_END = Grammar(GrammarKind.LARK, 'start: "ab" X\nX: /a/ & /b/')


def json_schema(one: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(one))


@dataclass(kw_only=True)
class Writer:
    """One request until its end of sequence."""

    sampling: Sampling
    first_block: int
    drafts: Callable[[int], list[int]] = lambda num_output: []
    tokens: list[int] = field(default_factory=lambda: list(PROMPT))
    outs: list[TokenOut] = field(default_factory=list)
    num_computed: int = 0
    failed: str | None = None

    @property
    def output(self) -> list[int]:
        return self.tokens[len(PROMPT) :]

    @property
    def text(self) -> str:
        return TOKENIZER.decode(self.output)

    @property
    def is_over(self) -> bool:
        return self.failed is not None or self.output[-1:] == [EOS] or len(self.output) >= self.sampling.max_tokens


def write(engine: Engine, samplings: Sequence[Sampling], **settings: Any) -> list[Writer]:
    """Generates all texts in one batch, each to its end."""
    size = engine.spec.num_blocks // len(samplings)
    writers = [Writer(sampling=one, first_block=index * size, **settings) for index, one in enumerate(samplings)]
    while going := [one for one in writers if not one.is_over]:
        rows = []
        for one in going:
            room = one.sampling.max_tokens - len(one.output) - 1
            rows.append(
                Row(
                    tokens=one.tokens[one.num_computed :],
                    start=one.num_computed,
                    blocks=list(range(one.first_block, one.first_block + size)),
                    sample=one.sampling,
                    history=list(one.tokens),
                    prompt_len=len(PROMPT),
                    drafts=one.drafts(len(one.output))[:room] if one.output else [],
                )
            )
        for one, out in zip(going, engine.step(rows), strict=True):
            one.failed = out.failed
            one.num_computed = len(one.tokens) + len(out.sampled) - 1
            one.outs += out.sampled
            one.tokens += [token.token_id for token in out.sampled]
            if EOS in one.output:
                one.tokens = one.tokens[: len(PROMPT) + one.output.index(EOS) + 1]
    return writers


@pytest.fixture(scope="module")
def engine(open_either: Callable[..., Engine]) -> Engine:
    return open_either(MODEL, kv_blocks=5000)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_document_of_random_schemas_is_valid(engine: Engine, temperature: float) -> None:
    rng = random.Random(2026)
    asked = [schema(rng) for _ in range(NUM_SCHEMAS)]
    samplings = [
        Sampling(temperature=temperature, seed=seed, max_tokens=num_bytes + 1, grammar=json_schema(one))
        for seed, (one, num_bytes) in enumerate(asked)
    ]
    for (one, _), writer in zip(asked, write(engine, samplings), strict=True):
        assert writer.failed is None
        assert writer.output[-1] == EOS, (one, writer.text)
        checker = jsonschema.FormatChecker(["date", "uuid", "ipv4"])
        jsonschema.validate(json.loads(writer.text), one, jsonschema.Draft202012Validator, format_checker=checker)


@pytest.mark.parametrize(
    ("grammar", "num_tokens"),
    [
        (json_schema(PERSON), 120),
        (Grammar(GrammarKind.REGEX, "[a-z_]+\\([a-z]{1,9}(, [a-z]{1,9}){1,3}\\)"), 60),
        (Grammar(GrammarKind.JSON_OBJECT), 40),
        (choice(["self", "selfish", "None", "[]", "{'a': 1}"]), 20),
    ],
    ids=lambda one: one.field if isinstance(one, Grammar) else "",
)
def test_greedy_masked_tokens_match_transformers(
    engine: Engine, oracle_of: Callable[[Path], Oracle], grammar: Grammar, num_tokens: int
) -> None:
    [writer] = write(engine, [Sampling(temperature=0.0, max_tokens=num_tokens, grammar=grammar)])
    assert writer.is_over
    oracle_of(MODEL).assert_exact([PROMPT], [writer.output], processors=[Masked(grammar, engine.spec.vocab_size)])


@dataclass(frozen=True, slots=True)
class Masked:
    """Removes the tokens that the grammar forbids after the output, by a separate matcher."""

    grammar: Grammar
    vocab_size: int

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        matcher = compiler(self.vocab_size).compile(self.grammar)
        assert matcher.consume_tokens(ids[0, len(PROMPT) :].tolist())
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        return scores.masked_fill(torch.from_numpy(bits[: scores.shape[1]] == 0)[None], -torch.inf)


@cache
def compiler(vocab_size: int) -> Compiler:
    return Compiler(MODEL, vocab_size, (EOS,))


def test_drafts_change_no_grammar_token(engine: Engine, oracle_of: Callable[[Path], Oracle]) -> None:
    grammar, outputs, asked = json_schema(PERSON), [], []
    samplings = [
        Sampling(temperature=temperature, seed=5, max_tokens=200, grammar=grammar) for temperature in (0.0, 0.8, 1.0)
    ]
    plain = [one.output for one in write(engine, samplings)]
    rng = random.Random(4)
    for sampling, expected in zip(samplings, plain, strict=True):

        def guess(num_output: int, expected: list[int] = expected) -> list[int]:
            drafts = expected[num_output : num_output + rng.choice([0, 1, 4, 15])]
            if drafts and rng.random() < 0.5:
                drafts[rng.randrange(len(drafts))] = rng.randrange(engine.spec.vocab_size)
            return drafts

        [guessed] = write(engine, [sampling], drafts=guess)
        assert guessed.is_over
        outputs += [expected, guessed.output]
        asked += [sampling, sampling]
    prompts, processors = [PROMPT] * len(outputs), [Masked(grammar, engine.spec.vocab_size)]
    oracle_of(MODEL).assert_exact(prompts, outputs, sampling=asked, processors=processors)


def test_a_matcher_made_again_from_the_output_gives_the_same_masks() -> None:
    """As after a preemption or on another worker: from any prefix."""
    compiler = Compiler(MODEL, TOKENIZER.vocab_size, (EOS,))
    matchers, grammar = Matchers(compiler), json_schema(PERSON)
    output = tuple(TOKENIZER.encode('{"name": "Ada", "age": 36, "tags": ["red", "blue"]}'))
    masks = [matchers.masks(grammar, output[:count], ()) for count in range(len(output) + 1)]
    assert matchers.num_replays == 0
    for count in range(len(output) + 1):
        assert Matchers(compiler).masks(grammar, output[:count], ()) == masks[count]
    assert all(one.failed is None for one in masks)
    [end] = masks[-1].masks
    assert [at for at in range(8 * len(end)) if end[at // 8] >> at % 8 & 1] == [EOS]


def test_batched_masks_equal_single_masks() -> None:
    """Some have drafts in between, reach a dead end, or come with another list."""
    compiler, rng = Compiler(MODEL, TOKENIZER.vocab_size, (EOS,)), random.Random(2)
    grammars = Grammars(compiler)
    dead = Grammar(GrammarKind.LARK, 'start: "a" | "b" X\nX: /a/ & /b/')
    texts = {Sampling(grammar=one, seed=n): [*PROMPT] for n, one in enumerate([json_schema(PERSON)] * 3 + [dead] * 2)}
    for step in range(14):
        rows = []
        for sampling, text in texts.items():
            if (step, sampling.seed) == (9, 1):
                text = texts[sampling] = [*text]
            drafts = TOKENIZER.encode('{"na')[: step % 3] if (step, sampling.seed) in ((3, 0), (4, 0)) else ()
            row = Row(tokens=text[-1:], start=len(text) - 1, blocks=[0], sample=sampling, history=text, drafts=drafts)
            rows.append(dataclasses.replace(row, prompt_len=len(PROMPT)))
        for index, masks in grammars.masks_of(rows).items():
            row, sampling = rows[index], rows[index].sample
            assert sampling is not None
            assert sampling.grammar is not None
            alone = Matchers(compiler).masks(sampling.grammar, tuple(row.history[len(PROMPT) :]), row.drafts)
            assert masks.failed == alone.failed
            assert [bytes(one) for one in masks.masks] == list(alone.masks)
            if masks.failed is not None:
                del texts[sampling]
                continue
            bits = np.unpackbits(np.frombuffer(alone.masks[0], np.uint8), bitorder="little")
            texts[sampling].append(int(rng.choice(np.flatnonzero(bits))))
            if texts[sampling][-1] == EOS:
                del texts[sampling]
    assert len(texts) >= 3
    assert grammars.matchers.num_replays < 8, "texts that grow are made again"


def test_masks_by_cursor_equal_masks_by_row() -> None:
    """Rows are read only at first, if no cursor is given, and if a token of the batch is not allowed."""
    compiler, rng = Compiler(MODEL, TOKENIZER.vocab_size, (EOS,)), random.Random(3)
    grammars, num_words = Grammars(compiler), compiler.num_words
    dead = Grammar(GrammarKind.LARK, 'start: "a" | "b" X\nX: /a/ & /b/')
    kinds = [json_schema(PERSON)] * 6 + [Grammar(GrammarKind.REGEX, "[a-z]{9}"), dead, dead]
    texts = [(grammar, [*PROMPT]) for grammar in kinds]
    cursors: list[Cursor | None] = [None] * len(texts)
    num_read = []
    for step in range(12):
        read: list[int] = []

        def row_at(index: int, read: list[int] = read, texts: Any = texts) -> Row:
            read.append(index)
            grammar, text = texts[index]
            sampling = Sampling(grammar=grammar)
            return Row(
                tokens=text[-1:], start=len(text) - 1, blocks=(), sample=sampling, history=text, prompt_len=len(PROMPT)
            )

        if step == 6:
            cursors = [cursors[0], None, *cursors[2:]]  # As after a step that was not launched early.
        words_RW = np.zeros((len(texts), num_words), np.int32)
        filled = grammars.fill(row_at, words_RW, (cursors, [text[-1] for _, text in texts]))
        num_read.append(len(set(read)))
        staying = []
        for index, (grammar, text) in enumerate(texts):
            alone = Matchers(compiler).masks(grammar, tuple(text[len(PROMPT) :]), ())
            assert filled.failed.get(index) == alone.failed
            if alone.failed is None:
                assert words_RW[index].tobytes() == alone.masks[0]
                bits = np.unpackbits(np.frombuffer(alone.masks[0], np.uint8), bitorder="little")
                is_allowed = bool(bits[0]) if (step, index) == (7, 0) else True
                text.append(int(rng.choice(np.flatnonzero(bits))) if is_allowed else EOS)
                staying += [index] if text[-1] != EOS or not is_allowed else []
        cursors = filled.cursors
        if len(staying) < len(texts):
            texts, cursors = [texts[index] for index in staying], [cursors[index] for index in staying]
        assert (0 in filled.failed) == (step == 8)  # The token is forbidden by its grammar.
    assert len(texts) >= 4
    assert num_read[0] == 9
    assert (sum(num_read[2:6]), num_read[6], num_read[7]) == (0, 1, 0)
    assert num_read[8] > 4
    assert num_read[9:] == [0, 0, 0]
    assert grammars.matchers.num_replays <= 6, "two for each row that fails"


def test_masks_after_drafts_do_not_advance_the_matcher() -> None:
    compiler, grammar = Compiler(MODEL, TOKENIZER.vocab_size, (EOS,)), Grammar(GrammarKind.REGEX, "[ab][bc][ad][a-d]")
    a, b, c = (TOKENIZER.encode(letter)[0] for letter in "abc")
    fresh = [Matchers(compiler).masks(grammar, output, ()).masks[0] for output in ((), (a,), (a, b), (b,))]
    assert len(set(fresh)) == 3  # The same tokens may follow a and b.
    matchers = Matchers(compiler)
    assert matchers.masks(grammar, (), (a, b)).masks == tuple(fresh[:3])
    assert matchers.masks(grammar, (), (c, b)).masks == (fresh[0],)
    assert matchers.masks(grammar, (b,), ()).masks == (fresh[3],)
    assert matchers.num_replays == 0


def test_requests_with_a_common_prefix_have_their_own_matchers() -> None:
    matchers = Matchers(Compiler(MODEL, TOKENIZER.vocab_size, (EOS,)))
    grammar = choice(["abc", "abd"])
    a, b, c, d = (TOKENIZER.encode(letter)[0] for letter in "abcd")
    for _ in range(3):
        assert matchers.masks(grammar, (a, b), ()).failed is None
        one, other = matchers.masks(grammar, (a, b, c), ()), matchers.masks(grammar, (a, b, d), ())
        assert one == other != matchers.masks(grammar, (a, b), ())
    assert matchers.masks(grammar, (b,), ()).failed is not None


def test_lexer_states_of_other_requests_do_not_fail_a_row() -> None:
    """Requests with the same grammar share a lexer, which counts its states. Beyond the limit it is made again."""
    compiler = Compiler(MODEL, TOKENIZER.vocab_size, (EOS,))
    compiler._limits = LLParserLimits(max_lexer_states=2000, verbose_errors=False)
    grammar = Grammar(GrammarKind.REGEX, "(a|b){0,5}(a|b|c)*a(a|b|c){14}(d|e).{3}[^x]*y.{40}")
    matchers, rng = Matchers(compiler), random.Random(1)
    for _ in range(60):
        output: tuple[int, ...] = ()
        for _ in range(30):
            row = matchers.masks(grammar, output, ())
            assert row.failed is None
            [mask] = row.masks
            allowed = [at for at in range(1, TOKENIZER.vocab_size) if mask[at // 8] >> at % 8 & 1]
            if not allowed:
                break
            output = (*output, rng.choice(allowed))
    assert matchers.num_replays > 0, "the limit was never met"


def test_rows_with_and_without_grammars_share_a_step(engine: Engine) -> None:
    bound = Sampling(temperature=0.8, seed=1, max_tokens=30, grammar=Grammar(GrammarKind.REGEX, "[0-9 ]{25,28}"))
    free = Sampling(temperature=0.8, seed=2, max_tokens=30)
    mixed = [bound, free, dataclasses.replace(free, top_k=20, seed=5), dataclasses.replace(bound, top_p=0.7)]
    alone = [write(engine, [sampling])[0].output for sampling in mixed]
    assert [one.output for one in write(engine, mixed)] == alone


def test_a_dead_end_fails_its_row_alone(engine: Engine) -> None:
    free = Sampling(temperature=0.0, max_tokens=12)
    [alone] = write(engine, [free])
    stuck, beside = write(engine, [Sampling(temperature=0.0, max_tokens=12, grammar=DEAD_END), free])
    assert stuck.failed == "grammar: stuck after 1 tokens: no document meets it"
    assert beside.output == alone.output


def test_a_row_with_a_slow_mask_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    matchers = Matchers(Compiler(MODEL, TOKENIZER.vocab_size, (EOS,)))
    assert matchers.masks(json_schema(PERSON), (), ()).failed is None
    monkeypatch.setattr(grammars, "MAX_ROW_S", 0.0)
    assert "where 0 s are allowed" in (matchers.masks(json_schema(PERSON), (), ()).failed or "")


def test_a_dead_end_after_drafts_fails_no_earlier_token(engine: Engine) -> None:
    [first] = write(engine, [Sampling(temperature=0.0, max_tokens=1, grammar=DEAD_END)])
    assert first.failed is None
    matchers = Matchers(Compiler(MODEL, TOKENIZER.vocab_size, (EOS,)))
    row = matchers.masks(DEAD_END, (), [*first.output, 5, 6])
    assert (len(row.masks), row.failed) == (1, None)
    assert matchers.masks(DEAD_END, tuple(first.output), ()).failed is not None


def test_an_unusable_grammar_fails_the_row() -> None:
    bad = Grammar(GrammarKind.REGEX, "(")
    assert "unclosed" in (Matchers(Compiler(MODEL, TOKENIZER.vocab_size, (EOS,))).masks(bad, (), ()).failed or "")
    assert "cannot be masked" in (Matchers(None).masks(bad, (), ()).failed or "")
    [out] = ToyEngine().step(
        [Row(tokens=[65], start=0, blocks=[0], sample=Sampling(grammar=bad), history=[65], prompt_len=1)]
    )
    assert (out.sampled, out.failed) == ((), "regex: the engine toy cannot follow a grammar")


def test_a_finished_grammar_always_ends_the_text(engine: Engine) -> None:
    sampling = Sampling(
        temperature=0.0, max_tokens=30, min_tokens=20, ignore_eos=True, grammar=choice(["yes", "yes, no"])
    )
    [writer] = write(engine, [sampling])
    assert writer.text == "yes, no"  # The longer one, because min_tokens bans the end while other tokens may follow.
    rule = EndRule(eos_token_ids=frozenset({EOS}), max_context_tokens=100)
    assert rule.finish(sampling, EOS, 3, 10) is FinishReason.STOP
    assert rule.finish(dataclasses.replace(sampling, grammar=None), EOS, 3, 10) is None


def test_logprobs_ignore_the_grammar(engine: Engine) -> None:
    free = Sampling(temperature=0.0, max_tokens=1, logprobs=5)
    bound = dataclasses.replace(free, grammar=Grammar(GrammarKind.REGEX, "~+"))
    [one], [other] = (write(engine, [sampling])[0].outs for sampling in (free, bound))
    assert other.top == one.top
    assert other.token_id not in dict(one.top)
    assert other.logprob is not None
    assert other.logprob < min(value for _, value in one.top)


def test_a_step_without_grammars_computes_no_mask() -> None:
    grammars = Grammars(Compiler(MODEL, TOKENIZER.vocab_size, (EOS,)))
    row = Row(tokens=[1], start=0, blocks=[0], sample=Sampling(), history=[1], prompt_len=1)
    assert grammars.masks_of([row, dataclasses.replace(row, sample=None)]) == {}
