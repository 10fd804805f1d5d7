#!/usr/bin/env bash
# What is run on a machine with one GPU: builds zshard with the torch that is there, tests it, measures it.
#
#     bash benchmarks/on_gpu.sh STAGE...      # build tests 125m rest 1.5b-eager 1.5b-compiled
#
# The one idea: such a machine is lent for minutes, a call is cut off after ten, and a fresh one is bare. So each call builds
# what is not built yet, needs no network, ends by itself after LIMIT seconds with what it has by then, and leaves its files
# flat in $OUT (benchmarks/results where that is not set). A stage that fails does not keep the next from running.
#
# Environment: PYTHON (python3), OUT, LIMIT (seconds of the whole call: 530), DRY=1 (print the commands only).
set -uo pipefail
cd "$(dirname "$0")/.." || exit

STAGES="build tests 125m rest 1.5b-eager 1.5b-compiled"
PYTHON=${PYTHON:-python3}
OUT=${OUT:-$PWD/benchmarks/results}
LIMIT=${LIMIT:-530}
FAILED=""
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1 ZSHARD_CUDA=${ZSHARD_CUDA:-1}

# step NAME COMMAND...: runs it for what is left of LIMIT, at most, with its output in $OUT/NAME.log too. SIGINT has the
# benchmarks end their ranks.
step() {
    local name=$1 left=$((LIMIT - SECONDS)) status
    shift
    echo "== $name: $* (${left}s left)"
    [ "${DRY:-0}" = 1 ] && return 0
    if [ "$left" -lt 10 ]; then
        echo "== $name: not begun, no time is left"
        FAILED="$FAILED $name"
        return 1
    fi
    timeout --signal=INT --kill-after=20 "$left" "$@" 2>&1 | tee "$OUT/$name.log"
    status=${PIPESTATUS[0]}
    [ "$status" = 0 ] || FAILED="$FAILED $name($status)"
    echo "== $name: status $status after ${SECONDS}s in all"
    return "$status"
}

# make's own virtual environment where it can be made here; else the Python that is here, as it is.
build() {
    if step build make build PYTHON="$PYTHON"; then
        PY=.venv/bin/python
    else
        echo "== make could not: building in place with $PYTHON"
        FAILED=${FAILED% build*}
        step build-in-place "$PYTHON" setup.py -q build_ext --inplace || return
        export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
        PY=$PYTHON
    fi
    step doctor "$PY" -m zshard doctor
}

gpu() { # gpu NAME ARGUMENTS...
    local name=$1
    shift
    step "$name" "$PY" -m benchmarks.gpu --out "$OUT/$(date +%F)-gpu-$name.json" "$@"
}

stage() {
    case $1 in
    build) ;; # done for every call
    tests) step tests "$PY" -m pytest -q -ra --durations=15 tests/gpu/test_gpu.py tests/gpu/test_gpu_ranks.py ;;
    125m) gpu 125m --parts steps --models gpt125m ;;
    rest) gpu rest --parts host adam curve ranks ;;
    1.5b-eager) gpu 1.5b-eager --parts steps --models gpt1.5b --modes eager --rounds 8 ;;
    1.5b-compiled) gpu 1.5b-compiled --parts steps --models gpt1.5b --modes compiled --rounds 8 ;;
    esac
}

for name in "$@"; do
    case " $STAGES " in
    *" $name "*) ;;
    *) set -- && break ;;
    esac
done
if [ $# = 0 ]; then
    echo "usage: bash benchmarks/on_gpu.sh STAGE...   of: $STAGES" >&2
    exit 2
fi
mkdir -p "$OUT"
build || exit 1
for name in "$@"; do stage "$name"; done
if [ -n "$FAILED" ]; then
    echo "== failed:$FAILED"
    exit 1
fi
