"""Templates and patterns that never end cost their own caller an error, and nobody else anything."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from pdserve.core.errors import InternalError, InvalidRequest, ModelError, Overloaded
from pdserve.text.chat import TemplateSources
from pdserve.text.tokenizer import HuggingFaceTokenizer
from pdserve.v1 import inference_pb2
from router import text_children
from router.admission import Admission
from tests.unit.router_io.test_grammars import FOLDER, MODEL
from tests.unit.router_io.test_prompts import LIMITS

SPIN = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
ON_DEMAND = "{% for m in messages %}{% if 'BAD' in m.content %}BODY{% endif %}{{ m.content }}{% endfor %}"
BACKTRACKING = {"type": "Split", "pattern": {"Regex": "(?:a|a)*$"}, "behavior": "Isolated", "invert": False}

Make = Callable[..., Awaitable[Admission]]


@pytest.fixture
async def make(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    monkeypatch.setattr(text_children, "SLOW_CPU_S", 0.2)
    made: list[Admission] = []

    async def one(source: str | None, folder: Path = FOLDER) -> Admission:
        templates = None if source is None else TemplateSources(source, None, {})
        tokenizer = HuggingFaceTokenizer(folder)
        made.append(await asyncio.to_thread(Admission, tokenizer, templates, LIMITS, None, None, str(folder)))
        return made[-1]

    yield one
    for admission in made:
        await admission.close()


def chat(text: str) -> inference_pb2.GenerateRequest:
    messages = [inference_pb2.ChatMessage(role="user", content=text)]
    return inference_pb2.GenerateRequest(chat=inference_pb2.ChatPrompt(messages=messages))


async def text_of(admission: Admission, request: inference_pb2.GenerateRequest) -> str:
    prepared = await admission.prepare(request, MODEL, None)
    return admission.tokenizer.decode(prepared.prompt_ids)


@pytest.mark.parametrize(
    "body",
    [
        SPIN,
        "{{ 'x' | center(2000000000) }}",
        "{{ '%2000000000s' % 'x' }}",
        "{{ 'x' * 10000000000 }}",
        "{{ lipsum(100000) | length }}",
        "{{ 9 ** 999999999 }}",
        "{% autoescape ('x' | center(2000000000)) %}{% endautoescape %}",
        "{{ ('x' * 1000000).replace('x', 'y' * 1000000) | length }}",
        "{{ (['x' * 1000000] * 100000) | join | length }}",
        "{{ 'x' | indent(2000000000, true) }}",
        "{% set n = namespace(x='ab') %}{% for a in range(99999) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
async def test_a_template_that_exceeds_a_limit_fails_its_own_chat(make: Make, body: str) -> None:
    try:
        admission = await make(ON_DEMAND.replace("BODY", body))
    except ModelError:
        assert "autoescape" in body  # jinja evaluates its argument when it compiles
        return
    for _ in range(2):
        with pytest.raises((ModelError, InvalidRequest)):
            await admission.prepare(chat("BAD"), MODEL, None)
        assert await text_of(admission, chat("good")) == "good"
    assert admission.can_work


async def test_slow_chats_do_not_delay_quick_ones(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their processes have no end within the test: only the order decides."""
    monkeypatch.setattr(text_children, "SLOW_CPU_S", 300.0)
    monkeypatch.setattr(text_children, "WALL_S", 300.0)
    admission = await make(ON_DEMAND.replace("BODY", SPIN))
    slow = [asyncio.create_task(admission.prepare(chat(f"BAD {number}"), MODEL, None)) for number in range(6)]
    try:
        for number in range(3):
            assert await asyncio.wait_for(text_of(admission, chat(f"good {number}")), 60) == f"good {number}"
        assert not any(one.done() for one in slow)
    finally:
        await admission.close()  # at once, whatever runs
        assert not any(isinstance(one, str) for one in await asyncio.gather(*slow, return_exceptions=True))


async def test_a_template_without_an_end_loads_and_fails_each_chat(make: Make) -> None:
    admission = await make(SPIN)
    with pytest.raises(ModelError, match="chat_template: got no end within its time"):
        await admission.prepare(chat("x"), MODEL, None)
    assert await text_of(admission, inference_pb2.GenerateRequest(text="def f")) == "def f"


async def test_health_fails_while_no_child_starts(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    admission = await make(ON_DEMAND)
    interpreter = sys.executable
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(InternalError, match="did not start"):
        await admission.prepare(chat("good"), MODEL, None)
    assert not admission.can_work
    monkeypatch.setattr(sys, "executable", interpreter)
    warming = asyncio.create_task(admission.children.keep_warm())  # no request is needed
    async with asyncio.timeout(60):
        while not admission.can_work:
            await asyncio.sleep(0.01)
    warming.cancel()
    assert await text_of(admission, chat("good")) == "good"


async def test_health_fails_while_every_child_hangs(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    admission = await make(ON_DEMAND)
    assert await text_of(admission, chat("good")) == "good"
    pool = admission.children._children.pools[0]
    pid = pool.children[0].pid
    assert pid is not None
    os.killpg(pid, signal.SIGSTOP)
    waiting = asyncio.create_task(admission.prepare(chat("good"), MODEL, None))
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        while not pool._began_s:
            await asyncio.sleep(0.01)
    pool._began_s = dict.fromkeys(pool._began_s, -1e9)
    assert not admission.can_work
    os.killpg(pid, signal.SIGKILL)
    with pytest.raises(Overloaded, match="was killed"):
        await waiting
    assert admission.can_work


def slow_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "slow"
    shutil.copytree(FOLDER, folder)
    held = json.loads((folder / "tokenizer.json").read_text())
    held["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [BACKTRACKING, held["pre_tokenizer"]]}
    (folder / "tokenizer.json").write_text(json.dumps(held))
    return folder


async def test_a_pattern_that_backtracks_fails_its_own_text(make: Make, tmp_path: Path) -> None:
    admission = await make(ON_DEMAND, slow_folder(tmp_path))
    bad = "a" * 60 + "!"
    attacks = [inference_pb2.GenerateRequest(text=bad), chat(bad)]
    attacks.append(inference_pb2.GenerateRequest(text="x", sampling=inference_pb2.SamplingParams(bad_words=[bad])))
    for one in attacks:
        with pytest.raises(ModelError, match=r"tokenizer\.json: got (no end within its time|a pattern that fails)"):
            await admission.prepare(one, MODEL, None)
    with pytest.raises(ModelError):
        await admission.tokenize(inference_pb2.TokenizeRequest(text=bad), MODEL)
    plain = HuggingFaceTokenizer(FOLDER)
    text = "def f(x):\n    return x\n" * 20
    for request in (inference_pb2.GenerateRequest(text=text), chat(text)):
        assert list((await admission.prepare(request, MODEL, None)).prompt_ids) == plain.encode(text)
    tail = inference_pb2.GenerateRequest(text=text, truncate_prompt_tokens=5)
    assert list((await admission.prepare(tail, MODEL, None)).prompt_ids) == plain.encode(text)[-5:]
    long = inference_pb2.GenerateRequest(chat=chat("x = 1\n" * 400_000).chat)
    with pytest.raises(InvalidRequest, match="the prompt is too long"):
        await admission.prepare(long, MODEL, None)


def test_a_tokenizer_with_unknown_patterns_encodes_nothing_here(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(slow_folder(tmp_path))
    assert not tokenizer.is_linear
    with pytest.raises(InternalError):
        tokenizer.encode("x")
    assert tokenizer.decode(HuggingFaceTokenizer(FOLDER).encode("def f")) == "def f"
    assert HuggingFaceTokenizer(FOLDER).is_linear
