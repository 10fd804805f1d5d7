#!/usr/bin/env bash
# The first hour on a machine with GPUs: builds zshard with the torch that is there, tests it, measures it, says what holds.
#
#     bash benchmarks/on_gpu.sh                # the stages that have not passed yet, until LIMIT; call it again to go on
#     bash benchmarks/on_gpu.sh STAGE...       # these, passed or not
#
# With several GPUs, on one host or on more, the stages are others: docs/contributing/several_gpus.md.
#
# The one idea: such a machine is lent for minutes, and a call is cut off after ten. So the work is in stages, the most valuable
# first; each writes its own result, and a call begins with the first that has not passed at this commit. It needs no network.
# Stages of tests run side by side where there are cores for it; what is timed runs alone. Results are in STATE, and as one
# on_gpu.tgz in $OUT where that is set: for each stage STAGE.log, STAGE.status and what it measured, and summary.md of all so
# far. A stage that fails does not keep the next from running.
#
# Environment: PYTHON (python3), OUT, STATE (build/on_gpu), LIMIT (seconds of the whole call: 530, with several GPUs 1800), DRY=1
# (print the commands only), REHEARSE=1 (the same stages over fakes of CUDA and NCCL, in small, with PYTHON as it is), CORES
# (nproc: from 8 on, tests run side by side), GPUS (those of this host that nvidia-smi lists), HOSTS (1) and HEAD (the name of one
# of them).
set -uo pipefail
cd "$(dirname "$0")/.." || exit

TESTS="driver faults features trainer memory nccl wire graph"
FIRST="peaks driver faults features compiled host 1.5b long recomputed" # 8 minutes of an H100
REST="saves offload trainer memory nccl wire graph 125m rest 1.5b-small 1.5b-compiled"
ACROSS="bandwidth killed several several-1.5b" # GPUs, and hosts
GPUS=${GPUS:-$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')}
HOSTS=${HOSTS:-1}
STAGES="$FIRST $REST"
[ "$GPUS" -gt 1 ] && STAGES="$ACROSS nccl faults features"
[ "$HOSTS" -gt 1 ] && STAGES=$ACROSS
SIDES="ddp fsdp2 zshard zshard-no_shard zshard-c10d"
[ "$HOSTS" -gt 1 ] && SIDES="$SIDES zshard-hybrid"
[ "$GPUS" -gt 1 ] && LIMIT=${LIMIT:-1800}
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
    step "$1" "$PY" -m pytest -q -rs -p no:cacheprovider --whole --junitxml="$STATE/$1.xml" \
        "tests/gpu/$2" -k "$which"
}

# gpu STAGE ARGUMENTS...: benchmarks.gpu; a rehearsal runs it over the fakes with a tiny model.
gpu() {
    local name=$1
    shift
    if [ "$REHEARSE" = 1 ]; then
        step "$name" "$PY" tests/lib/stand_ins.py "$PY" -m benchmarks.gpu --out "$STATE/gpu-$name.json" "$@" \
            --quick --models tiny --batches small --rounds 1
    else
        step "$name" "$PY" -m benchmarks.gpu --out "$STATE/gpu-$name.json" "$@"
    fi
}

# like STAGE ARGUMENTS...: the same, but a rehearsal leaves it out: another stage runs the same code.
like() {
    if [ "$REHEARSE" = 1 ]; then
        echo "0 0 $COMMIT 1" >"$STATE/$1.status"
    else
        gpu "$@"
    fi
}

# across STAGE PORT ARGUMENTS...: the same on all GPUs of this host, and of the others; PORT is the first of its own on HEAD.
across() {
    local name=$1 port=$2
    shift 2
    gpu "$name" "$@" --gpus "$GPUS" --hosts "$HOSTS" ${HEAD:+--head "$HEAD:$port"}
}

stage() {
    case $1 in
    driver) tests driver test_gpu.py "kernels and gpu and not copies or lack_of_memory" "kernels and copies" ;;
    trainer) tests trainer test_gpu.py "not stand-in and not memory and not kernels" "gradients_add_up and stand-in" ;;
    memory) tests memory test_gpu.py "memory_is_constant and not stand-in" "memory_is_constant and stand-in and fp32 and full_shard" ;;
    features) tests features test_gpu_features.py "not stand-in" "optimizers and stand-in" ;;
    faults) tests faults test_gpu_recovery.py "not stand-in and not c10d" "stand-in-2-1-nccl or stand-in-nccl-False" ;;
    nccl) tests nccl test_gpu_ranks.py "(nccl or agree) and not stand-in" "nccl_with_one_rank and stand-in" ;;
    wire) tests wire test_gpu_wire.py "not stand-in" "no_effect and stand-in" ;;
    graph) tests graph test_gpu_graph.py "not stand-in" "stand-in" ;;
    peaks) gpu peaks --parts memory --modes eager --batches large --sides plain fsdp2 zshard ;;
    compiled) like compiled --parts steps --models gpt125m --modes compiled --batches small --sides plain-by-hand fsdp2 zshard --rounds 7 ;;
    host) gpu host --parts host --rounds 7 ;;
    1.5b) like 1.5b --parts steps --models gpt1.5b --modes eager --batches large --rounds 4 ;;
    long) like long --parts steps --models gpt125m-4096 --modes eager --batches large --sides plain-by-hand fsdp2 zshard --rounds 5 ;;
    recomputed) gpu recomputed --parts steps --models gpt1.5b --modes recomputed --batches large --sides fsdp2 zshard --rounds 4 ;;
    saves) gpu saves --parts saves --models gpt1.5b ;;
    offload) gpu offload --parts steps --models gpt1.5b --modes eager --batches large --sides fsdp2-offload zshard-offload --rounds 2 ;;
    125m) like 125m --parts steps --models gpt125m ;;
    rest) like rest --parts adam curve ranks ;;
    1.5b-small) like 1.5b-small --parts steps --models gpt1.5b --modes eager --batches small --rounds 5 ;;
    1.5b-compiled) like 1.5b-compiled --parts steps --models gpt1.5b --modes compiled --rounds 5 ;;
    bandwidth) across bandwidth 29500 --parts bandwidth ;;
    killed) across killed 29520 --parts killed ;;
    several) across several 29540 --parts steps --models gpt125m --modes eager --sides $SIDES --rounds 7 ;;
    several-1.5b) across several-1.5b 29560 --parts steps --models gpt1.5b --modes eager --sides $SIDES --rounds 5 ;;
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
    case " $FIRST $REST $ACROSS " in
    *" $name "*) ;;
    *)
        echo "usage: bash benchmarks/on_gpu.sh [STAGE...]   of: $FIRST $REST $ACROSS" >&2
        exit 2
        ;;
    esac
done
mkdir -p "$STATE"
build || exit 1
todo=""
for name in ${*:-$STAGES}; do
    if [ $# = 0 ] && [ "$DRY" = 0 ] && passed "$name"; then
        echo "== $name: passed before"
        continue
    fi
    todo="$todo $name"
done
# Neighbours that are tests run side by side.
for name in $todo; do
    case "$((CORES >= 8)): $TESTS " in
    "1:"*" $name "*)
        stage "$name" &
        continue
        ;;
    esac
    wait
    stage "$name"
    hand_over
done
wait
hand_over
[ "$DRY" = 1 ] || judge $todo
[ "$DRY" = 1 ] || cat "$STATE/summary.md"
if [ -n "$FAILED" ]; then
    echo "== failed:$FAILED"
    exit 1
fi
