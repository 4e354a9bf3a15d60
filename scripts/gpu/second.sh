#!/usr/bin/env bash
# Second command, within 25 s of the first one's end, about four and a half minutes: do transfers work between two
# processes, also if one is killed; does the two-worker cluster write the same text as transformers?
#
#   scripts/gpu/second.sh [PART...]
. "$(dirname "$0")/common.sh"

main() {
  setup
  part transfer 70 "--only tcp_staged shows whether staging works; for nccl read the NCCL lines of the log, do not repeat it" \
    "$PYTHON" -m tests.gpu.check_transfer ${REHEARSE:+--rehearse}
  # The cluster first: it is the product.
  part benchmark 205 "PDSERVE_GPU=steps=eager and --only serving --cases 'stdlib-5m over cuda_ipc'; transfers do not need graphs" \
    "$PYTHON" -m benchmarks.gpu --only serving,transfers --budget $((200 * ${SLOWER:-1})) ${REHEARSE:+--rehearse}
  summary second.sh
}

main
