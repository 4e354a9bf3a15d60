#!/usr/bin/env bash
# First command on a borrowed GPU, about four minutes: are the kernels right, can a step be captured, how fast is it?
#
#   scripts/gpu/first.sh [PART...]                   on the device, from the root of the repository
#   PDSERVE_GPU=steps=eager scripts/gpu/first.sh benchmark    a part again, with a part of the engine replaced
#   REHEARSE=1 PYTHON=.venv-gpu/bin/python scripts/gpu/first.sh
. "$(dirname "$0")/common.sh"
attention=attention,norms # files of kernels that take as long to compile as all others

main() {
  nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>&1 | tail -n 1
  echo "$(nproc) cores; MPS: $(command -v nvidia-cuda-mps-control || echo none); $(ip -brief address 2>/dev/null | tr -s ' \n' ' ')"
  setup
  part kernels-1 110 "PDSERVE_GPU=attention=few-stages; then --only with the name of one case, under compute-sanitizer" \
    "$PYTHON" -m tests.gpu.check_kernels --errors --only "$attention" ${REHEARSE:+--rehearse} &
  part kernels-2 110 "PDSERVE_GPU=sampler=argmax if it is a draw; then --only with the name of one case" \
    "$PYTHON" -m tests.gpu.check_kernels --errors --only "(?!${attention/,/|}).*" ${REHEARSE:+--rehearse} &
  part graphs 110 "PDSERVE_GPU=steps=eager for all other parts" \
    "$PYTHON" -m tests.gpu.check_graphs --only llama ${REHEARSE:+--rehearse} &
  part engine 110 "PDSERVE_GPU=prefill=torch" \
    "$PYTHON" -m tests.gpu.check_engine --only llama,stdlib-5m ${REHEARSE:+--device cpu} --tokens "$([ -n "$REHEARSE" ] && echo 4 || echo 32)" &
  wait
  LOG=first-benchmark part benchmark 140 "PDSERVE_GPU=steps=eager, prefill=torch, attention=few-stages, sampler=argmax, one by one" \
    "$PYTHON" -m benchmarks.gpu --only device,llama-bf16 --budget $((130 * ${SLOWER:-1})) ${REHEARSE:+--rehearse}
  summary first.sh
}

main
