from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)",
    "naïve café, 你好 世界 🙂🙃 ✅",
    "the cat sat",
] * 4
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool café>", special=False)])
    return tokenizer


def sentencepiece(decoder: object) -> Tokenizer:
    words = ["<unk>", "<s>", "</s>", *BYTES, *"▁abcdefghijklmnopqrstuvwxyz", "▁the", "▁▁", "at"]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    tokenizer.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def metaspace(scheme: str) -> Tokenizer:
    words = ["<unk>", "▁", "▁the", "▁cat", "s", "▁▁a", "x▁y"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


def word_level() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def fused(*, is_stripped: bool) -> object:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if is_stripped else steps)


KINDS = {
    "byte-level": byte_level,
    "llama": lambda: sentencepiece(fused(is_stripped=True)),
    "gemma": lambda: sentencepiece(fused(is_stripped=False)),
    "metaspace-always": lambda: metaspace("always"),
    "metaspace-never": lambda: metaspace("never"),
    "no-decoder": word_level,
}


@pytest.fixture(scope="session", params=list(KINDS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of each kind."""
    path = tmp_path_factory.mktemp(request.param)
    KINDS[request.param]().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def byte_level_folder(tmp_path: Path) -> Path:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path
