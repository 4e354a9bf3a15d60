"""Converts between text and token ids: tokenizers, chat templates, incremental detokenisation, stop strings."""
