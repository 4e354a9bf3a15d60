"""Grammars for a model's vocabulary: admission on the router, masks on the workers."""
