#!/usr/bin/env bash
# The first hour on a machine with GPUs: builds zshard with the torch that is there, then runs the stages of gpu_stages.py.
#
#     bash benchmarks/on_gpu.sh                # the stages that have not passed yet, until LIMIT; call it again to go on
#     bash benchmarks/on_gpu.sh STAGE...       # these, passed or not
#
# Environment: PYTHON (python3), OUT, STATE (build/on_gpu), LIMIT (seconds of the call: 530, with several GPUs 1800), DRY=1 (print
# the commands only), REHEARSE=1 (the same stages over fakes of CUDA and NCCL, in small, with PYTHON as it is), CORES (from 8 on,
# tests run side by side), GPUS (those that nvidia-smi lists), HOSTS (1), HEAD (docs/contributing/several_gpus.md).
set -uo pipefail
cd "$(dirname "$0")/.." || exit
PYTHON=${PYTHON:-python3}
export STATE=${STATE:-$PWD/build/on_gpu} GPUS=${GPUS:-$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')}
export CORES=${CORES:-$(env -u OMP_NUM_THREADS nproc)} # nproc would count that
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1 ZSHARD_CUDA=${ZSHARD_CUDA:-1}
mkdir -p "$STATE"
DRY=1 "$PYTHON" benchmarks/gpu_stages.py "$@" >/dev/null || exit # before a build: are these stages?
if [ "${DRY:-0}${REHEARSE:-0}" = 00 ]; then
    # make's own virtual environment where it can be made here; else the Python that is here, as it is.
    if make build PYTHON="$PYTHON" 2>&1 | tee "$STATE/build.log"; then
        PYTHON=.venv/bin/python
    else
        echo "== make could not: building in place with $PYTHON"
        "$PYTHON" setup.py -q build_ext --inplace 2>&1 | tee "$STATE/build-in-place.log" || exit
        export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
    fi
    "$PYTHON" -m zshard doctor | tee "$STATE/doctor.log"
fi
SPENT=$SECONDS exec "$PYTHON" benchmarks/gpu_stages.py "$@"
