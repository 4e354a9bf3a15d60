"""Runs work that may never end in processes that the kernel limits and ends: templates, patterns and grammars."""
