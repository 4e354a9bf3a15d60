#!/usr/bin/env bash
# Fourth command, within 25 s of the third one's end or alone, about four minutes: does `pdserve up` serve on one GPU as a
# user starts it, exactly, also when a worker is killed, and how fast?
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
    "$PYTHON" -m tests.gpu.check_cluster ${REHEARSE:+--rehearse}
  part doctor 40 "it shows which transport works between two processes" "$PYTHON" -m pdserve doctor
  summary fourth.sh
}

main
