#!/usr/bin/env bash
# Fourth command, within 25 s of the third one's end or alone, about five minutes: does `pdserve up` serve on one GPU as a
# user starts it, exactly, also when a worker is killed, and how fast? Do KV blocks come back from pinned memory, from a
# disk and from a store?
#
#   scripts/gpu/fourth.sh [PART...]
. "$(dirname "$0")/common.sh"

# Everything that `pdserve up` imports beside torch and transformers, and a Redis server.
product() {
  local site="$STATE/product"
  [ -d "$site" ] || "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
    --disable-pip-version-check --target "$site" .carry/product/*.whl .carry/wheels/*.whl
  export PYTHONPATH="$site:$PYTHONPATH"
}

main() {
  setup
  product
  part cluster 190 "--only with one case; PDSERVE_GPU=steps=eager; --transport tcp in tests/gpu/check_cluster.py" \
    "$PYTHON" -m tests.gpu.check_cluster --only bundled,serve,gemma-3,qwen3-moe ${REHEARSE:+--rehearse}
  part tiers 60 "--only bytes; rates needs a quiet device" "$PYTHON" -m tests.gpu.check_tiers ${REHEARSE:+--rehearse}
  part tiers-cluster 150 "tiers alone shows whether the copies are right" \
    "$PYTHON" -m tests.gpu.check_cluster --only tiers ${REHEARSE:+--rehearse}
  part doctor 40 "it shows which transport works between two processes" "$PYTHON" -m pdserve doctor
  summary fourth.sh
}

main
