"""lm-evaluation-harness: loglikelihoods of its local-completions model and of its HF backend, as one JSON object.

Without a task of the hub: the requests are built directly. Runs in the client's own environment.
"""

import json
import sys
from importlib.metadata import version

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI

URL, MODEL, FOLDER = sys.argv[1:]
MOST_TOKENS = 2048  # the context of the bundled model
PAIRS = [
    ("def fib(n):\n", "    return n\n"),
    ("def fib(n):\n", "    raise\n"),
    ("import os", "\nimport sys\n"),
    ("import os", ".path"),
    ("", "class A:\n    pass\n"),
    ("# größe in 日本\nx = ", "'ä€𝄞'"),
    ("x", " "),
    ("for i in range(10):\n    print(", "i)"),
    ("a = 1\n" * 20, "a = 1\n" * 3),
    ("def add(a, b):\n    return a + b\n\n" * 250, "def add(a, b):\n"),  # longer than the context
]
TEXTS = ["def f(x):\n    return x\n", "Straße, 日本: €", "value = {'a': [1, 2, 3]}\n" * 500]


def scores(model):
    pairs = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(PAIRS)]
    texts = [Instance("loglikelihood_rolling", {}, (text,), index) for index, text in enumerate(TEXTS)]
    rolling = [found[0] if isinstance(found, tuple) else found for found in model.loglikelihood_rolling(texts)]
    return {"pairs": [list(found) for found in model.loglikelihood(pairs)], "rolling": rolling}


def served(**settings):
    return LocalCompletionsAPI(
        base_url=f"{URL}/completions",
        model=MODEL,
        tokenizer=FOLDER,
        tokenizer_backend="huggingface",
        max_length=MOST_TOKENS,
        **settings,
    )


# One token of the client's context is for the answer, and HF's window does not count the last token.
theirs = HFLM(pretrained=FOLDER, dtype="float32", device="cpu", batch_size=1, max_length=MOST_TOKENS - 2)
print(
    json.dumps(
        {
            "version": version("lm_eval"),
            "hf": scores(theirs),
            "token_ids": scores(served(batch_size=1)),
            "batched": scores(served(batch_size=4, num_concurrent=3)),
            "texts": scores(served(batch_size=4, tokenized_requests=False)),
        }
    )
)
