"""llama.cpp as a peer of benchmarks.engine, run by the python of its own environment. Imports nothing of pdserve.

The environment needs llama-cpp-python, gguf and numpy. The checkpoint of a Llama model is written as GGUF, and then
quantised by llama.cpp itself. A step is one llama_decode of a batch with one token of each sequence, and the argmax of
every row of logits; tokenizer and samplers are not used.
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine.child import Orders, prompts, serve

FTYPES = {"f32": 0, "f16": 1, "q8_0": 7, "q4_k_m": 15, "bf16": 32}  # llama.cpp's numbers
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def load(model: str, ftype: str, threads: int, kv_tokens: int, max_batch: int, step_tokens: int) -> Orders:
    import llama_cpp as lib
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "unquantised.gguf", Path(folder) / f"{ftype}.gguf"
        vocab_size = write_gguf(Path(model), source)
        params = lib.llama_model_quantize_default_params()
        params.ftype, params.nthread = FTYPES[ftype], threads
        if lib.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)):
            raise ValueError(f"llama.cpp did not quantise to {ftype}")
        source.unlink()
        model_params = lib.llama_model_default_params()
        model_params.use_mmap = False
        net = lib.llama_model_load_from_file(str(target).encode(), model_params)
    context_params = lib.llama_context_default_params()
    context_params.n_ctx, context_params.n_seq_max = kv_tokens, max_batch
    context_params.n_batch = step_tokens
    context_params.n_threads = context_params.n_threads_batch = threads
    context_params.kv_unified = True  # sequences of any length share the context
    context = lib.llama_init_from_model(net, context_params)
    room = lib.llama_batch_init(step_tokens, 0, 1)

    def step(rows: Sequence[Sequence[int]], starts: Sequence[int]) -> list[int]:
        """The most likely token after each row's last one."""
        ends, count = [], 0
        for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
            for offset, token in enumerate(row):
                room.token[count], room.pos[count] = token, start + offset
                room.n_seq_id[count], room.seq_id[count][0] = 1, index
                room.logits[count] = offset == len(row) - 1
                count += 1
            ends.append(count - 1)
        room.n_tokens = count
        if lib.llama_decode(context, room):
            raise ValueError("llama_decode failed")
        return [
            int(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, end), (vocab_size,)).argmax()) for end in ends
        ]

    def clear() -> None:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)

    def decode(batch: int, prompt_tokens: int, warm: int, steps: int, salt: int) -> dict[str, Any]:
        clear()
        sampled = step(prompts(batch, prompt_tokens, vocab_size, salt), [0] * batch)
        took_s, tokens = [], sampled[:1]
        for number in range(warm + steps):
            began_s = time.perf_counter()
            sampled = step([[token] for token in sampled], [prompt_tokens + number] * batch)
            took_s.append(time.perf_counter() - began_s)
            tokens.append(sampled[0])
        return {"step_s": took_s[warm:], "tokens": tokens}

    def prefill(tokens: int, salt: int) -> dict[str, Any]:
        clear()
        rows = prompts(1, tokens, vocab_size, salt)
        began_s = time.perf_counter()
        step(rows, [0])
        return {"prefill_s": time.perf_counter() - began_s}

    return {"decode": decode, "prefill": prefill}


def write_gguf(folder: Path, target: Path) -> int:
    """Writes a Llama checkpoint in float32, without a tokenizer; returns the size of the vocabulary."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for name, weight in read_tensors(folder):
        for suffix, count in (("q_proj.weight", heads), ("k_proj.weight", kv_heads)):
            if name.endswith(suffix):  # llama.cpp rotates neighbouring pairs
                weight = weight.reshape(count, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(gguf_name(name), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return int(config["vocab_size"])


def gguf_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, *module, suffix = name.split(".")
    return f"blk.{layer}.{NAMES['.'.join(module)]}.{suffix}"


def read_tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Every tensor of the safetensors files, in float32."""
    import numpy as np

    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as handle:
            size = int.from_bytes(handle.read(8), "little")
            header: dict[str, Any] = json.loads(handle.read(size))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            raw = np.fromfile(file, np.uint8, end - begin, offset=8 + size + begin)
            if entry["dtype"] == "BF16":
                values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            else:
                values = raw.view({"F32": np.float32, "F16": np.float16}[entry["dtype"]]).astype(np.float32)
            yield name, values.reshape(entry["shape"])


if __name__ == "__main__":
    name, ftype, *sizes = sys.argv[1:]
    serve(lambda: load(name, ftype, *map(int, sizes)))
