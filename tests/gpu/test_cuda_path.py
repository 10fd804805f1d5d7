"""The suite's own tests of strategies, precision and memory, run once more over the GPU's path.

All that is true of a model on the CPU must be true of it on a GPU, so the tests are the same: the
same files run in a separate session, in which fakes are CUDA's driver and NCCL (stand_ins.py), with
work on side streams put off. What needs one-sided reading (shm), or names a transport, is left out
by name.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from c_compile import ROOT
from stand_ins import with_stand_ins

FILES = {
    "training/test_parity.py": "bit_identical or agree or process_group",
    # A GPU's slots and buckets are lent to others between passes.
    "training/test_mixed_precision.py": "not offload and not over_hosts and not full_buffers",
    "units/test_hybrid.py": "not shm_within_hosts",
    "wrap/test_meta.py": "not little_is_whole and not peak_memory",  # which read the host's memory
    "checkpoint/test_save.py": "not chunk_of_memory and not offload",
}
CASES = [(backend, *each) for backend in ("nccl", "c10d") for each in FILES.items()]


@pytest.mark.thorough
@pytest.mark.needs_fma
@pytest.mark.parametrize(("backend", "file", "only"), CASES, ids=lambda value: value or "all")
def test_cpu_tests_on_a_fake_gpu(backend: str, file: str, only: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(["-k", only] if only else []), str(ROOT / "tests" / file)],
        env=with_stand_ins(backend),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
