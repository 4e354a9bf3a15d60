"""Texts of requests: tokenizers in threads; grammars, chat templates and slow tokenizers in child processes.

The queues are bounded, and fair among clients. `admission.py` prepares requests with it. Read `prompts.py` first.
"""
