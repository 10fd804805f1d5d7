#!/usr/bin/env bash
# The first hour on a machine with one GPU: builds zshard with the torch that is there, tests it, measures it, says what holds.
#
#     bash benchmarks/on_gpu.sh                # the stages that have not passed yet, until LIMIT; call it again to go on
#     bash benchmarks/on_gpu.sh STAGE...       # these, passed or not
#
# The one idea: such a machine is lent for minutes, and a call is cut off after ten. So the work is in stages, the most valuable
# first; each writes its own result, and a call begins with the first that has not passed at this commit. It needs no network.
# Stages of tests run side by side where there are cores for it; what is timed runs alone. Results are in STATE, and as one
# on_gpu.tgz in $OUT where that is set: for each stage STAGE.log, STAGE.status and what it measured, and summary.md of all so
# far. A stage that fails does not keep the next from running.
#
# Environment: PYTHON (python3), OUT, STATE (build/on_gpu), LIMIT (seconds of the whole call: 530), DRY=1 (print the commands
# only), REHEARSE=1 (the same stages over fakes of CUDA and NCCL, in small, with PYTHON as it is), CORES (nproc: from 8 on, tests
# run side by side).
set -uo pipefail
cd "$(dirname "$0")/.." || exit

TESTS="driver trainer memory features nccl graph"
STAGES="$TESTS 125m rest 1.5b-eager 1.5b-compiled"
PYTHON=${PYTHON:-python3}
STATE=${STATE:-$PWD/build/on_gpu}
LIMIT=${LIMIT:-530}
DRY=${DRY:-0}
REHEARSE=${REHEARSE:-0}
CORES=${CORES:-$(env -u OMP_NUM_THREADS nproc)} # nproc would count that
COMMIT=$(git rev-parse HEAD 2>/dev/null || echo unknown)
FAILED=""
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1 ZSHARD_CUDA=${ZSHARD_CUDA:-1}

# step NAME COMMAND...: runs it for what is left of LIMIT, at most, with its output in NAME.log too. SIGINT has pytest and the
# benchmarks write what they have, and end their ranks.
step() {
    local name=$1 left=$((LIMIT - SECONDS)) begin=$SECONDS status
    shift
    echo "== $name: $* (${left}s left)"
    [ "$DRY" = 1 ] && return 0
    if [ "$left" -lt 10 ]; then
        echo "== $name: not begun, no time is left"
        return 1
    fi
    timeout --signal=INT --kill-after=20 "$left" "$@" 2>&1 | tee "$STATE/$name.log"
    status=${PIPESTATUS[0]}
    echo "$status $((SECONDS - begin)) $COMMIT $REHEARSE" >"$STATE/$name.status"
    echo "== $name: status $status after ${SECONDS}s in all"
    return "$status"
}

# Adds to FAILED what of these stages did not end well.
judge() {
    local name
    for name in "$@"; do
        passed "$name" || FAILED="$FAILED $name"
    done
}

# make's own virtual environment where it can be made here; else the Python that is here, as it is.
build() {
    if [ "$REHEARSE" = 1 ]; then
        PY=$PYTHON
        return 0
    elif step build make build PYTHON="$PYTHON"; then
        PY=.venv/bin/python
    else
        echo "== make could not: building in place with $PYTHON"
        step build-in-place "$PYTHON" setup.py -q build_ext --inplace || return
        export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
        PY=$PYTHON
    fi
    step doctor "$PY" -m zshard doctor
}

# tests STAGE FILE WHICH REHEARSED: WHICH is pytest's -k for a GPU, REHEARSED that for fakes.
tests() {
    local which=$3
    [ "$REHEARSE" = 1 ] && which=$4
    step "$1" "$PY" -m pytest -q -rs -p no:cacheprovider -m "thorough or not thorough" --junitxml="$STATE/$1.xml" \
        "tests/gpu/$2" -k "$which"
}

# gpu STAGE ARGUMENTS...: benchmarks.gpu, of which a rehearsal runs one small part over the fakes.
gpu() {
    local name=$1
    shift
    if [ "$REHEARSE" = 1 ]; then
        step "$name" "$PY" tests/lib/stand_ins.py "$PY" -m benchmarks.gpu --out "$STATE/gpu-$name.json" --quick --parts adam
    else
        step "$name" "$PY" -m benchmarks.gpu --out "$STATE/gpu-$name.json" "$@"
    fi
}

stage() {
    case $1 in
    driver) tests driver test_gpu.py "kernels and gpu and not copies or lack_of_memory" "kernels and copies" ;;
    trainer) tests trainer test_gpu.py "not stand-in and not memory and not kernels" "gradients_add_up and stand-in" ;;
    memory) tests memory test_gpu.py "memory_is_constant and not stand-in" "memory_is_constant and stand-in and fp32 and full_shard" ;;
    features) tests features test_gpu_features.py "not stand-in" "(optimizers or error) and stand-in" ;;
    nccl) tests nccl test_gpu_ranks.py "(nccl or agree) and not stand-in" "nccl_with_one_rank and stand-in" ;;
    graph) tests graph test_gpu_graph.py "not stand-in" "stand-in" ;;
    125m) gpu 125m --parts steps --models gpt125m ;;
    rest) gpu rest --parts host adam curve ranks ;;
    1.5b-eager) gpu 1.5b-eager --parts steps --models gpt1.5b --modes eager --rounds 8 ;;
    1.5b-compiled) gpu 1.5b-compiled --parts steps --models gpt1.5b --modes compiled --rounds 8 ;;
    esac
}

passed() {
    local status commit rehearsed
    read -r status _ commit rehearsed 2>/dev/null <"$STATE/$1.status" || return 1
    [ "$status $commit $rehearsed" = "0 $COMMIT $REHEARSE" ]
}

# After each stage, as the call may be cut off in the next.
hand_over() {
    [ "$DRY" = 1 ] && return
    "$PY" benchmarks/gpu_summary.py "$STATE" >"$STATE/summary.md"
    if [ -n "${OUT:-}" ]; then
        mkdir -p "$OUT"
        cp "$STATE/summary.md" "$OUT"
        tar -czf "$OUT/on_gpu.tgz" -C "$STATE" .
    fi
}

for name in "$@"; do
    case " $STAGES " in
    *" $name "*) ;;
    *)
        echo "usage: bash benchmarks/on_gpu.sh [STAGE...]   of: $STAGES" >&2
        exit 2
        ;;
    esac
done
mkdir -p "$STATE"
build || exit 1
todo="" beside="" alone=""
for name in ${*:-$STAGES}; do
    if [ $# = 0 ] && [ "$DRY" = 0 ] && passed "$name"; then
        echo "== $name: passed before"
        continue
    fi
    todo="$todo $name"
    case "$((CORES >= 8)) $TESTS " in
    "1 "*"$name "*) beside="$beside $name" ;;
    *) alone="$alone $name" ;;
    esac
done
for name in $beside; do
    stage "$name" &
done
wait
[ -z "$beside" ] || hand_over
for name in $alone; do
    stage "$name"
    hand_over
done
[ "$DRY" = 1 ] || judge $todo
[ "$DRY" = 1 ] || cat "$STATE/summary.md"
if [ -n "$FAILED" ]; then
    echo "== failed:$FAILED"
    exit 1
fi
