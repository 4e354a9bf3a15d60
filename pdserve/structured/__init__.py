"""Grammars for a model's vocabulary: admission on the router, masks on the workers.

It decides which schemas and grammars are accepted, and compiles them with llguidance. It imports core and isolated, and
no torch. Read `compile.py` first, then `supported.py`.
"""
