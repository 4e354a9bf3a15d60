#!/usr/bin/env bash
# Third command, within 25 s of the second one's end, about three and a half minutes: where do the milliseconds go, and
# which switch is faster? The figures without switches are those of first.sh. A part for which no time is left is skipped.
#
#   scripts/gpu/third.sh [PART...]
. "$(dirname "$0")/common.sh"
ENDS=200
cases=${REHEARSE:+decode 1 x 20,decode 2 x 40,prefill 24}
cases=${cases:-decode 1 x 1024,decode 128 x 1024,prefill 4096}

launches=$([ -n "$REHEARSE" ] && echo norms,place || echo attention,sampling,norms,place,relay)

storm=(--gpu)
[ -z "$REHEARSE" ] || storm=(--transport cuda_ipc nccl tcp_staged --latest 30) # on busy cores

# compare NAME SWITCHES FLAGS...: the Llama shape with something changed.
compare() {
  local name=$1 switches=$2
  shift 2
  LOG=third-benchmark part "$name" 30 "nothing: leave it out" env PDSERVE_GPU="${PDSERVE_GPU:+$PDSERVE_GPU,}$switches" \
    "$PYTHON" -m benchmarks.gpu --only llama-bf16 --cases "$cases" --budget $((28 * ${SLOWER:-1})) ${REHEARSE:+--rehearse} "$@"
}

main() {
  setup
  compare products products=fastest
  compare heads layout=heads --block-size 64
  compare launches merge=fused,pdl=on
  cases="${cases/decode*,prefill/prefill}" compare chunk "" --chunk-tokens "$([ -n "$REHEARSE" ] && echo 64 || echo 8192)"
  part times 40 "--only with the name of one launch" \
    "$PYTHON" -m tests.gpu.check_kernels --times --only "$launches" ${REHEARSE:+--rehearse}
  part storm 60 "--transport tcp_staged, then the one that fails alone" \
    "$PYTHON" -m benchmarks.fault_storm --transfers 100 "${storm[@]}"
  compare split-k products=split-k
  compare blocks "" --block-size 64
  compare fp8-kv "" --kv-dtype fp8
  LOG=third-benchmark part fp8 40 "nothing: it is a comparison" \
    "$PYTHON" -m benchmarks.gpu --only llama-fp8 --cases "$cases" --budget $((38 * ${SLOWER:-1})) ${REHEARSE:+--rehearse}
  compare cublaslt products=cublaslt
  compare merge merge=fused
  compare pdl pdl=on
  summary third.sh
}

main
