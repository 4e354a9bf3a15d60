# For first.sh to fourth.sh, which source it: runs parts with a limit each, and says at the end what came out.
# shellcheck shell=bash
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export OUT="${OUT:-gpu-results}" PYTHONUNBUFFERED=1
PYTHON="${PYTHON:-python3}"
REHEARSE="${REHEARSE:-}"
SLOWER="${REHEARSE:+8}" # a rehearsal runs on few cores, in an interpreter
STATE="${STATE:-/tmp/pdserve-gpu-$UID}" # stays on a machine that is kept between two scripts
results="$(mktemp)"
wanted=" $* " # parts to run; none: all
mkdir -p "$OUT" "$STATE"

# What a machine lacks is in .carry (scripts/gpu/carry.sh).
setup() {
  local package
  export PYTHONPATH="$STATE/site${PYTHONPATH:+:$PYTHONPATH}"
  for package in $("$PYTHON" scripts/gpu/floors.py); do
    echo "installing $package: the one here is too old"
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --disable-pip-version-check \
      --target "$STATE/site" .carry/wheels/"$package"-*.whl
  done
  "$PYTHON" scripts/gpu/floors.py --say
  # A fresh machine needs some 20 s to read these from its disk, which would be the time of the first part.
  "$PYTHON" -W ignore -c "import torch, transformers, triton" || true
  export TRITON_CACHE_DIR="$STATE/triton"
  if [ -e .carry/triton-cache.tar.xz ] && [ ! -d "$TRITON_CACHE_DIR" ]; then
    mkdir -p "$TRITON_CACHE_DIR" && "$PYTHON" -W ignore -m tarfile -e .carry/triton-cache.tar.xz "$TRITON_CACHE_DIR"
  fi
  kernels="$(num_kernels)"
  echo "$kernels compiled kernels were carried; switches: ${PDSERVE_GPU:-none}"
}

num_kernels() { find "${TRITON_CACHE_DIR:-/nonexistent}" -name '*.cubin' 2>/dev/null | wc -l; }

# part NAME SECONDS WHAT_TO_TRY COMMAND...: its lines appear as they come, each with its name, and in a file of $OUT.
part() {
  local name=$1 limit=$2 try=$3 began=$SECONDS log first code process
  shift 3
  [ "$wanted" = "  " ] || [[ $wanted == *" $name "* ]] || return 0
  limit=$((limit * ${SLOWER:-1}))
  if [ -n "${ENDS:-}" ] && [ $((SECONDS + limit / 2)) -gt $((ENDS * ${SLOWER:-1})) ]; then
    echo "$name skipped 0 -" >>"$results"
    return 0
  fi
  log="$OUT/${LOG:-$name}.log"
  touch "$log"
  first=$(($(wc -l <"$log") + 1))
  echo "[$name] at most $limit s: $*"
  timeout -k 5 "$limit" "$@" </dev/null >>"$log" 2>&1 &
  process=$!
  tail -q -s 0.2 -n +$first -f --pid=$process "$log" | sed -u "s/^/[$name] /" &
  wait $process
  code=$?
  wait $!
  echo "[$name] $([ $code = 124 ] && echo "over its time" || echo "exit code $code") after $((SECONDS - began)) s"
  echo "$name $code $((SECONDS - began)) $log $try" >>"$results"
}

# The last lines that the caller sees: figures, then each part, then what to try for those that are red.
summary() {
  local name code took log try red=0
  echo
  echo "# What came out of $1"
  [ ! -e "$OUT/benchmark.jsonl" ] || "$PYTHON" -m benchmarks.gpu.report "$OUT/benchmark.jsonl"
  echo "kernels compiled here: $(($(num_kernels) - kernels)), tracebacks: $(cat "$OUT/traces.txt" 2>/dev/null | grep -c '^## ')"
  while read -r name code took log try; do
    case $code in
      0) echo "green    $name, $took s" ;;
      skipped) echo "skipped  $name: no time was left" ;;
      *)
        red=1
        echo "RED      $name, $([ "$code" = 124 ] && echo "over its time" || echo "exit code $code"), $took s. Try: $try"
        { grep -E '\*\*|Error|SKIPPED|MISSED|failed:' "$log" | grep -v '\*\*missed' || tail -n 4 "$log"; } | tail -n 6 | cut -c 1-330 | sed 's/^/           /'
        ;;
    esac
  done <"$results"
  rm -f "$results"
  return $red
}
