"""Random tool histories, rendered by published chat templates: equal to transformers' rendering.

`make clients CLIENTS=templates` installs the packages that contain the templates. Each template is rendered for a
tokenizer that has its control tokens, from the message of a call, as the router does it.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from pdserve.client.request import generate_request
from pdserve.core.errors import InvalidRequest
from pdserve.text.chat import ChatTemplate
from pdserve.text.chat_encoder import ChatEncoder, chat_of
from pdserve.text.tokenizer import HuggingFaceTokenizer
from tests.clients.conftest import CLIENT
from tests.unit.text.conftest import byte_level

NUM_HISTORIES = 2000
#: The templates by package and file, and whether they take a call's arguments as text instead of an object.
TEMPLATES: dict[str, tuple[str, bool]] = {
    "Qwen 2.5": ("trl/chat_templates/qwen2_5.jinja", False),
    "Qwen 3": ("trl/chat_templates/qwen3.jinja", False),
    "Qwen 3.5": ("trl/chat_templates/qwen3_5_think.jinja", False),
    "Llama 3.1": ("trl/chat_templates/llama3_1.jinja", False),
    "Llama 3.2": ("trl/chat_templates/llama3_2.jinja", False),
    "Llama 4": ("axolotl/utils/chat_templates/templates/llama4.jinja", False),
    "DeepSeek V3": ("trl/chat_templates/deepseekv3.jinja", True),
    "DeepSeek R1 Distill": ("trl/chat_templates/deepseek_r1_distill.jinja", True),
    "GLM 4.5": ("trl/chat_templates/glm4moe.jinja", False),
    "gpt-oss": ("trl/chat_templates/gptoss.jinja", False),
    "Mistral v3": ("axolotl/utils/chat_templates/templates/mistral_v3_tekken.jinja", False),
    "Command A": ("axolotl/utils/chat_templates/templates/command_a_tool_use.jinja", False),
    "Nemotron 3": ("trl/chat_templates/nemotron_3_nano.jinja", False),
    "EXAONE 4": ("axolotl/utils/chat_templates/templates/exaone4.jinja", False),
    "LFM 2.5": ("trl/chat_templates/lfm2_2_5.jinja", False),
    "Gemma 4": ("trl/chat_templates/gemma4.jinja", False),
}
WORDS = ["the", "é", "你好", "\n", "  ", "{", '"', "\\", "<b>", "&", "'", "5", "None", "[1]", "🙂", "<", "|>"]
NAMED = {"bos_token": "<bos>", "eos_token": "<eos>"}


def packages() -> Path | None:
    found = [*Path(".clients/templates").glob("lib/python*/site-packages")]
    return found[0] if found else None


@pytest.fixture(params=TEMPLATES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def source(name: str, record_property: Callable[[str, object], None]) -> str:
    record_property(CLIENT, "templates")
    folder = packages()
    if folder is None:
        pytest.skip("the templates were not installed: `make clients CLIENTS=templates`")
    return (folder / TEMPLATES[name][0]).read_text()


@pytest.fixture
def folder(source: str, tmp_path: Path) -> Path:
    tokenizer = byte_level()
    names = re.findall(r"<[|｜][^\s<>{}'\"]+[|｜]>|</?[a-z_]+>|\[/?[A-Z_]+\]", source)
    tokenizer.add_special_tokens([*NAMED.values()])
    tokenizer.add_tokens([AddedToken(one, special=one[1] in "|｜") for one in sorted(set(names))])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def encoder(source: str, folder: Path) -> ChatEncoder:
    return ChatEncoder(HuggingFaceTokenizer(folder, is_limited=True), ChatTemplate(source, NAMED))


@pytest.fixture
def theirs(source: str, folder: Path) -> Callable[..., str]:
    from transformers import PreTrainedTokenizerFast
    from transformers.utils.chat_template_utils import render_jinja_template

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **NAMED)
    tokenizer.chat_template = source

    def render(messages: list[Any], tools: list[Any] | None) -> str:
        if "content'] is none" in source:
            # apply_chat_template() drops null values, with which these templates lose a call, or fail.
            [found], _ = render_jinja_template(
                [messages], tools, chat_template=source, add_generation_prompt=True, **NAMED
            )
        else:
            found = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        assert isinstance(found, str)
        return found

    return render


def text(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 6)))


def value(rng: random.Random, depth: int = 2) -> Any:
    kind = rng.randrange(7 if depth else 5)
    if kind == 5:
        return [value(rng, depth - 1) for _ in range(rng.randrange(3))]
    if kind == 6:
        return {f"k{index}": value(rng, depth - 1) for index in range(rng.randrange(3))}
    return [text(rng), rng.randint(-9, 9), rng.random() * 10, rng.random() < 0.5, None][kind]


def tools_of(rng: random.Random) -> list[dict[str, Any]]:
    kinds = ("string", "integer", "number", "boolean", "array", "object")
    return [
        {
            "type": "function",
            "function": {
                "name": f"tool_{index}",
                "description": text(rng),
                "parameters": {
                    "type": "object",
                    "properties": {f"p{at}": {"type": rng.choice(kinds), "description": text(rng)} for at in range(3)},
                    "required": ["p0"],
                },
            },
        }
        for index in range(rng.randint(1, 3))
    ]


def history(rng: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    tools = tools_of(rng)
    messages: list[dict[str, Any]] = [{"role": "system", "content": text(rng)}] if rng.random() < 0.5 else []
    for turn in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": text(rng)})
        for _ in range(rng.randint(0, 2)):
            add_calls(rng, messages, tools)
        if turn < 2 and rng.random() < 0.7:
            messages.append({"role": "assistant", "content": text(rng)})
            if rng.random() < 0.3:
                messages[-1]["reasoning_content"] = text(rng)
        else:
            break
    if messages[-1]["role"] == "assistant":
        messages.append({"role": "user", "content": text(rng)})
    return messages, tools if rng.random() < 0.9 else []


def add_calls(rng: random.Random, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> None:
    content = rng.choice([None, None, "", text(rng)])
    called = [rng.choice(tools)["function"]["name"] for _ in range(rng.choice([1, 1, 2]))]
    calls = [
        {
            "id": f"{rng.getrandbits(36):09x}",
            "type": "function",
            "function": {
                "name": one,
                "arguments": json.dumps({f"p{at}": value(rng) for at in range(rng.randint(0, 3))}, ensure_ascii=False),
            },
        }
        for one in called
    ]
    messages.append({"role": "assistant", "content": content, "tool_calls": calls})
    if rng.random() < 0.3:
        messages[-1]["reasoning_content"] = text(rng)
    for call in calls:
        messages.append(
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text(rng)}
        )


def as_transformers_reads_it(messages: list[dict[str, Any]], *, takes_text: bool) -> list[dict[str, Any]]:
    found = json.loads(json.dumps(messages))
    for message in found:
        for call in message.get("tool_calls", ()):
            if not takes_text:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return found


def check(name: str, encoder: ChatEncoder, theirs: Callable[..., str], num_histories: int) -> int:
    """Returns the number of histories that the template takes."""
    rng = random.Random(name)
    rendered = 0
    for _ in range(num_histories):
        messages, tools = history(rng)
        if not encoder.takes_tools:
            tools = []
        chat = chat_of(generate_request(messages, {"tools": tools}).chat)
        try:
            expected = theirs(as_transformers_reads_it(messages, takes_text=TEMPLATES[name][1]), tools or None)
        except Exception:  # any error of a template
            with pytest.raises(InvalidRequest):
                encoder.encode(chat, None, lambda size: None)
            continue
        found = encoder.encode(chat, None, lambda size: None)
        assert encoder.tokenizer.decode(found.token_ids, has_special_tokens=True) == expected
        assert found.token_ids == encoder.tokenizer.encode(expected, has_special_tokens=False)
        rendered += 1
    return rendered


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_histories_are_rendered_as_by_transformers(name: str, encoder: ChatEncoder, theirs: Callable[..., str]) -> None:
    num_histories = NUM_HISTORIES // len(TEMPLATES)
    # Some require calls of one tool at a time, or reject a system message.
    num_rendered = check(name, encoder, theirs, num_histories)
    assert num_rendered >= num_histories // 10


@pytest.mark.slow
def test_no_text_of_a_history_becomes_a_control_token(name: str, encoder: ChatEncoder) -> None:
    """The same histories with and without the names of control tokens in each text have the same control tokens."""
    rng = random.Random(name)
    names = sorted(encoder.control_tokens)
    for _ in range(20):
        messages, tools = history(rng)
        if not encoder.takes_tools:
            tools = []
        evil = rng.choice(names)
        chats = [
            chat_of(generate_request(json.loads(json.dumps(messages).replace("the", word)), {"tools": tools}).chat)
            for word in ("the", f"a{json.dumps(evil)[1:-1]}b")
        ]
        try:
            plain, found = (encoder.encode(chat, None, lambda size: None).token_ids for chat in chats)
        except InvalidRequest:
            continue
        ids = set(encoder.control_tokens.values())
        assert [one for one in found if one in ids] == [one for one in plain if one in ids]
