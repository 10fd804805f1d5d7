"""Python imports this when it starts, if PYTHONPATH contains this folder
(stand_ins.environment)."""

import os

if os.environ.get("ZSHARD_CUDA_ON_HOST") == "1":
    import fake_gpu

    fake_gpu.install()
