"""LoRA adapters in a cluster of vLLM's workers, chosen by name: prefill, transfer, decode, prefix hits, loading while
serving and a killed worker, against transformers in float64 with each adapter merged into the weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.families import BUNDLED, prompts
from tests.cluster.suite import tokens_of
from tests.models.adapters import make_adapted
from tests.models.test_cluster import GREEDY, TOKENS, open_cluster

pytestmark = pytest.mark.timeout(900)


def test_adapters_of_one_batch_match_merged_models(tmp_path: Path) -> None:
    adapted = make_adapted(BUNDLED, tmp_path, 3)
    folders = [str(one.folder) for one in adapted.adapters]
    names = ["stdlib-5m", "a0", "a1", "hot"]
    flags = (
        "--lora",
        f"a0={folders[0]}",
        "--lora",
        f"a1={folders[1]}",
        "--lora-folders",
        str(tmp_path),
        "--decode",
        "2",
    )
    texts = prompts([20, 130, 60, 300, 40])
    with open_cluster(tmp_path, BUNDLED, *flags) as cluster, ThreadPoolExecutor(len(names) * len(texts)) as pool:
        assert cluster.client.load_adapter("hot", folders[2]) == adapted.adapters[2].fingerprint
        for turn in range(3):
            asked = [(number, text) for text in texts for number in range(len(names))]
            running = [
                pool.submit(cluster.client.generate, text, model=names[number], **GREEDY) for number, text in asked
            ]
            if turn == 1:
                cluster.kill("d0")
            done = [one.result(600) for one in running]
            for number, oracle in enumerate(adapted.oracles):
                own = [one for (of, _), one in zip(asked, done, strict=True) if of == number]
                oracle.assert_exact(texts, tokens_of(own, TOKENS))
            if turn == 2:
                assert sum(one.usage.cached_prompt_tokens for one in done) > 0, "each found its own prefix"
        cluster.wait_until_idle(60.0)
