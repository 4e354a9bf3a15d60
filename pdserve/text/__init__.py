"""Converts between text and token ids: tokenizers, chat templates, incremental detokenisation, stop strings.

It may import core, isolated and the readers of model files, but no torch. Templates and patterns that may never end run
in child processes. Read `tokenizer.py` first, then `chat.py`.
"""
