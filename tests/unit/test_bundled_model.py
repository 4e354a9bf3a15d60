"""The bundled demo model's folder: shapes, size, special tokens and a tokenizer that loses nothing."""

from __future__ import annotations

import ast
import json
import struct
from functools import cache
from pathlib import Path
from typing import Any

import jinja2.sandbox
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import deserialize
from tokenizers import Tokenizer

FOLDER = Path(__file__).resolve().parents[2] / "pdserve" / "models" / "stdlib-5m"
MAX_BYTES = 15 * 1024 * 1024
END_OF_TEXT = "<|endoftext|>"


@cache
def read_json(name: str) -> dict[str, Any]:
    content = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@cache
def tensors() -> dict[str, Any]:
    """Every tensor's name with its dtype, shape and raw little-endian bytes."""
    return dict(deserialize((FOLDER / "model.safetensors").read_bytes()))  # type: ignore[no-untyped-call]


def bfloat16_is_finite(data: bytes) -> bool:
    """A bfloat16 is infinite or not a number exactly when its eight exponent bits are all set."""
    return all(word & 0x7F80 != 0x7F80 for (word,) in struct.iter_unpack("<H", data))


def expected_shapes() -> dict[str, list[int]]:
    """The tensors that config.json calls for."""
    config = read_json("config.json")
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": [hidden],
            f"{prefix}.post_attention_layernorm.weight": [hidden],
            f"{prefix}.self_attn.q_proj.weight": [queries, hidden],
            f"{prefix}.self_attn.k_proj.weight": [keys, hidden],
            f"{prefix}.self_attn.v_proj.weight": [keys, hidden],
            f"{prefix}.self_attn.o_proj.weight": [hidden, queries],
            f"{prefix}.mlp.gate_proj.weight": [inner, hidden],
            f"{prefix}.mlp.up_proj.weight": [inner, hidden],
            f"{prefix}.mlp.down_proj.weight": [hidden, inner],
        }
    return shapes


def render(messages: list[dict[str, Any]], **given: Any) -> str:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(read_json("tokenizer_config.json")["chat_template"])
    return template.render(messages=messages, add_generation_prompt=True, eos_token=END_OF_TEXT, **given)


def test_folder_is_small_and_complete() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES


def test_vocabulary_matches_config() -> None:
    size = read_json("config.json")["vocab_size"]
    assert tokenizer().get_vocab_size(with_added_tokens=True) == size
    assert sorted(tokenizer().get_vocab(with_added_tokens=True).values()) == list(range(size))


def test_special_tokens_agree_everywhere() -> None:
    end = tokenizer().token_to_id(END_OF_TEXT)
    assert end is not None
    for name in ("config.json", "generation_config.json"):
        content = read_json(name)
        assert [content[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")] == [end, end, end]
    settings = read_json("tokenizer_config.json")
    assert {settings[key] for key in ("bos_token", "eos_token", "pad_token")} == {END_OF_TEXT}
    assert settings["model_max_length"] == read_json("config.json")["max_position_embeddings"]
    assert tokenizer().encode(f"a{END_OF_TEXT}b").ids.count(end) == 1
    assert tokenizer().decode([end], skip_special_tokens=True) == ""
    assert end not in tokenizer().encode("def fib(n):").ids, "encoding a prompt adds nothing to it"


def test_tensors_have_the_shapes_of_the_config() -> None:
    config = read_json("config.json")
    assert config["tie_word_embeddings"] is True
    assert config["dtype"] == "bfloat16"
    assert {name: list(tensor["shape"]) for name, tensor in tensors().items()} == expected_shapes()
    assert {tensor["dtype"] for tensor in tensors().values()} == {"BF16"}


@pytest.mark.parametrize("name", sorted(expected_shapes()))
def test_tensor_is_finite_and_not_all_zero(name: str) -> None:
    data = bytes(tensors()[name]["data"])
    assert bfloat16_is_finite(data)
    assert any(data)


def test_finite_check_sees_infinity_and_nan() -> None:
    assert bfloat16_is_finite(struct.pack("<4H", 0x0000, 0x8000, 0x7F7F, 0x3F80))
    assert not bfloat16_is_finite(struct.pack("<2H", 0x3F80, 0x7F80))
    assert not bfloat16_is_finite(struct.pack("<2H", 0x3F80, 0xFFC0))


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=200))
@example("")
@example(" leading and trailing ")
@example("\r\n\t\x00\x7f  \n\n\n    x = 1\n")
@example("naïve café 日本語 \U0001f600\u200d\U0001f680 e\u0301 \ufeff \u2028")
def test_round_trip_loses_nothing(text: str) -> None:
    assert tokenizer().decode(tokenizer().encode(text).ids, skip_special_tokens=False) == text


@given(
    st.lists(st.sampled_from(["def ", "self", "\n", "    ", "(", "):", " return", '"""', "# ", "é", "\t"]), max_size=60)
)
def test_round_trip_of_code_like_text(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert tokenizer().decode(tokenizer().encode(text).ids, skip_special_tokens=False) == text


def test_code_takes_far_fewer_tokens_than_bytes() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert len(tokenizer().encode(text).ids) < len(text.encode()) / 2


def test_chat_template_makes_python_comments_in_a_sandbox() -> None:
    messages = [
        {"role": "system", "content": "Write code."},
        {"role": "user", "content": "Add two\nnumbers. {{ 7 * 7 }}"},
        {"role": "assistant", "content": "def add(a, b):\n    return a + b\n"},
        {"role": "user", "content": "Now a stack."},
    ]
    expected = "# Write code.\n# Add two\n# numbers. {{ 7 * 7 }}\ndef add(a, b):\n    return a + b\n\n# Now a stack.\n"
    assert render(messages) == expected


def test_chat_template_shows_tools_calls_and_results() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    messages = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "4\n5"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    assert render(messages, tools=tools).splitlines() == [
        '# Functions, one in each line. A call: <tool_call>{"name": NAME, "arguments": {..}}</tool_call>',
        '# {"name": "add", "parameters": {"type": "object"}}',
        "# Add.",
        '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>',
        "",
        "# Result: 4",
        "# 5",
    ]


def test_chat_template_is_the_one_of_the_training_script() -> None:
    source = (FOLDER.parents[2] / "examples" / "bundled_corpus.py").read_text(encoding="utf-8")
    parsed = ast.parse(source)
    [value] = [
        one.value
        for one in parsed.body
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "CHAT_TEMPLATE"
    ]
    assert ast.literal_eval(value) == read_json("tokenizer_config.json")["chat_template"]
