from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import pdserve
from pdserve.core.errors import ModelError
from pdserve.text.tokenizer import HuggingFaceTokenizer, ToyTokenizer, bad_word_ids, load_tokenizer

TEXTS = ["the cat", " two  spaces ", "naïve café 你好 🙂", "", "<|end|>x", "<s>x"]


@pytest.mark.parametrize("explicit", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}])
def test_ids_match_transformers(folder: Path, explicit: dict[str, bool], tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    vocabulary = HuggingFaceTokenizer(folder)._backend.get_vocab()
    known = [token for token in ("<s>", "</s>", "<|end|>", "<unk>") if token in vocabulary]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": known[0], "eos_token": known[-1]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | explicit))
    ours, theirs = load_tokenizer(str(tmp_path)), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.encode(text, has_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_the_bundled_model_is_read() -> None:
    import pdserve

    tokenizer = load_tokenizer(str(Path(pdserve.__file__).parent / "models" / "stdlib-5m"))
    text = "def fib(n):\n    return 你好"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_toy_ids_are_bytes_and_the_end_has_no_text() -> None:
    toy = load_tokenizer("toy")
    assert isinstance(toy, ToyTokenizer)
    assert toy.encode("aé") == [97, 195, 169]
    assert toy.decode([97, 256, 98]) == "ab"
    assert toy.vocab_size == 257


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    for folder in (tmp_path / "absent", tmp_path):
        with pytest.raises(ModelError) as caught:
            load_tokenizer(str(folder))
        assert caught.value.field == "model"
        assert str(folder) in caught.value.message


def test_a_broken_tokenizer_json_is_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE"')
    with pytest.raises(ModelError) as caught:
        load_tokenizer(str(tmp_path))
    assert caught.value.field == "tokenizer.json"


def test_a_broken_tokenizer_config_is_a_model_error(byte_level_folder: Path) -> None:
    (byte_level_folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelError) as caught:
        load_tokenizer(str(byte_level_folder))
    assert caught.value.field == "tokenizer_config.json"


def test_text_imports_no_torch_and_toy_does_not_load_the_tokenizers_library() -> None:
    code = (
        "import sys, pdserve.text.chat, pdserve.text.detokenize, pdserve.text.stops, pdserve.text.tokenizer as t;"
        "t.load_tokenizer('toy'); assert not {'torch', 'transformers', 'tokenizers', 'grpc'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_long_text_leaves_other_threads_running() -> None:
    """The router tokenises beside its event loop; a call that kept the interpreter would stop every stream."""
    tokenizer = load_tokenizer(str(next((Path(__file__).parents[3] / "pdserve/models").glob("stdlib-*"))))
    tokenizer.warm_up()
    text = "".join(f"def value{one}(self, name{7 * one}):\n    return self\n" for one in range(40_000))
    worker = threading.Thread(target=tokenizer.encode, args=(text,))
    longest_s, last_s = 0.0, time.perf_counter()
    began_s = last_s
    worker.start()
    while worker.is_alive():
        time.sleep(0.0005)
        now_s = time.perf_counter()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    assert longest_s < 0.8 * (last_s - began_s), f"{longest_s:.3f} s of {last_s - began_s:.3f} s"


def test_token_bytes_are_the_added_text(folder: Path) -> None:
    tokenizer = HuggingFaceTokenizer(folder)
    before = tokenizer.encode("the", has_special_tokens=False)
    for text in ("the cat", "naïve café 你好 🙂"):
        ids = tokenizer.encode(text, has_special_tokens=False)
        detokenizer = tokenizer.detokenizer(before)
        added = detokenizer.push(ids) + detokenizer.finish()
        shown = [one for one in ids if one not in tokenizer._special]
        assert b"".join(map(tokenizer.token_bytes, shown)).decode() == added


def test_a_special_token_has_its_name_and_an_unused_id_has_no_bytes(folder: Path) -> None:
    tokenizer = HuggingFaceTokenizer(folder)
    for token, token_id in tokenizer._backend.get_vocab().items():
        if token_id in tokenizer._special:
            assert tokenizer.token_bytes(token_id) == token.encode()
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""
    assert (ToyTokenizer().token_bytes(65), ToyTokenizer().token_bytes(256)) == (b"A", b"")


def test_a_panic_of_the_library_is_the_models_error(byte_level_folder: Path) -> None:
    """It is no Exception, so it would end the process with a traceback."""
    path = byte_level_folder / "tokenizer.json"
    text = json.loads(path.read_text())
    unknown = {"SpecialToken": {"id": "absent", "type_id": 0}}
    added = {"type": "TemplateProcessing", "single": [unknown], "pair": [], "special_tokens": {}}
    map_of_chars = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    for change, is_limited in (({"post_processor": added}, False), ({"normalizer": map_of_chars}, True)):
        path.write_text(json.dumps(text | change))
        with pytest.raises(ModelError, match=r"tokenizer\.json"):
            HuggingFaceTokenizer(byte_level_folder, is_limited=is_limited)


# --- bad words ------------------------------------------------------------------------------------------------
# Bad words become the token sequences in which a text can come to contain them.

MODEL = Path(pdserve.__file__).parent / "models" / "stdlib-5m"


def test_byte_tokens_need_no_second_sequence() -> None:
    assert bad_word_ids(["no", " no", "o!"], ToyTokenizer()) == [(110, 111), (111, 33)]
    assert bad_word_ids(["no", "o"], ToyTokenizer()) == [(111,)]  # a text without "o" has no "no"
    assert bad_word_ids(["\n"], ToyTokenizer()) == [(10,)]
    assert bad_word_ids([], ToyTokenizer()) == []


def test_a_word_is_banned_at_the_start_and_after_a_space() -> None:
    tokenizer = HuggingFaceTokenizer(MODEL)
    [bare, spaced] = bad_word_ids(["return"], tokenizer)
    assert tokenizer.decode(bare) == "return"
    assert tokenizer.decode(spaced) == " return"
    assert bad_word_ids([" return"], tokenizer) == [bare, spaced]
