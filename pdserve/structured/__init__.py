"""Grammars against a model's vocabulary, for the router that admits them and the workers that obey them."""
