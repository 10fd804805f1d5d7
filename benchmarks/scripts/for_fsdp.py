"""Scripts for FSDP1 and FSDP2: two of pytorch/examples, and torchtitan's llama3.

They import FSDP or fully_shard from zshard. Comments say why other lines change.
"""

from __future__ import annotations

from benchmarks.scripts import made
from benchmarks.scripts.for_ddp import CLIPPING
from benchmarks.scripts.script import Script

_T5 = (
    "T5ForConditionalGeneration(T5Config(vocab_size=256, d_model=64, d_kv=16, d_ff=128, "
    "num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0))"
)
T5 = Script(
    "examples/FSDP",
    "examples/distributed/FSDP",
    "77f55b9",
    ["T5_training.py"],
    {
        "T5_training.py": {
            r"^import os$": "import os\nimport no_operators",
            r"device_id=torch\.cuda\.current_device\(\)": 'device_id=torch.device("cpu")',
            r"torch\.cuda\.set_device\(local_rank\)": "pass",
            r"torch\.cuda\.memory_\w+\(\)": "0",
            r"'num_workers': 2": "'num_workers': 0",
            r"1500, 512, 150": "16, 24, 12",
            r"300, 512, 150": "8, 24, 12",
            r"import T5Tokenizer, T5For": "import T5For",
        },
        "summarization_dataset.py": {  # names that transformers 5 lacks
            r"^    (AdamW|T5Tokenizer),\n": "",
            r"^    get_linear_schedule_with_warmup\n": "",
            r"^import pandas as pd\n": "",
        },
        "utils/train_utils.py": {
            r'"nccl"': '"gloo"',
            r"\.to\(local_rank\)": "",
            r"T5Tokenizer, T5For": "T5Config, T5For",
            r"T5ForConditionalGeneration\.from_pretrained\(model_name\)": _T5,
            r"^import torch$": "import torch\nfrom made_tokenizer import T5Tokenizer",
        },
    },
    {"T5_training.py": {r"^from torch\.distributed\.fsdp import": "from zshard import"}},
    r"^(?:Train Epoch: \t(\d+), Loss: \t(\S+)|Validation Loss: (\S+))",
    "",  # torch's FSDP1 cannot save this model on CPUs
    made.for_t5,
)


def _fsdp2(name: str, flags: str) -> Script:
    return Script(
        name,
        "examples/distributed/FSDP2",
        "77f55b9",
        [f"example.py --dcp-api {flags}"] * 3,
        {
            "example.py": {
                r"if not verify_min_gpu_count\(.*\):": "if False:",
                r"get_default_backend_for_device\(device\)": "get_default_backend_for_device"
                "('cpu')",
                r", device_id=device\)": ")",
                r"^( +)for _ in range\(10\):": "\\1torch.manual_seed(rank)\n\\g<0>",
                r"^( +)loss\.backward\(\)": "\\1print('loss', loss.item())\n\\g<0>",
            },
            "model.py": {  # it leaves the layers uninitialized
                r"^        self\.tok_embeddings\.reset_parameters\(\)": "        for layer in "
                "self.layers:\n            layer.reset_parameters()\n\\g<0>",
            },
        },
        {
            "example.py": {
                r"from torch\.distributed\.fsdp import": "from zshard import",
            },
            "utils.py": {
                r"from torch\.distributed\.fsdp import FSDPModule": "from zshard import FSDPModule",
                r"^ +assert param\.placements.*\n": "",  # parameters are no DTensors
            },
        },
        r"^loss (\S+)",
        "checkpoints/dcp_api/*/*.pt",
        clipping={"example.py": CLIPPING},
        begins="checkpoints",  # FSDP2 draws other initial values, on each rank its own
        print_tolerance=1e-3,  # in bf16
        tolerance=5e-3,
    )


TITAN = Script(
    "torchtitan",
    "torchtitan",
    "v0.2.2",
    ["drive.py"],
    {
        "torchtitan/models/moe/kernels.py": {  # imported with all models; there is no triton
            r"^import triton\n": "class triton:\n    jit = staticmethod(lambda f: f)\n\n\n",
            r"^import triton\.language as tl\n": "class tl:\n    constexpr = int\n",
        },
        "torchtitan/tools/utils.py": {r'_get_available_device_type\(\) or "cuda"': '"cpu"'},
        "torchtitan/models/llama3/infra/parallelize.py": {
            # gloo cannot divide while it sums, not even by 1
            r"^( +)module\.set_gradient_divide_factor\(1\.0\)": "\\g<0>\n\\1getattr(module, "
            '"set_force_sum_reduction_for_comms", bool)(True)',
        },
    },
    {
        "torchtitan/models/llama3/infra/parallelize.py": {
            r"from torch\.distributed\.fsdp import": "from zshard import",
            # Else `isinstance(module, FSDPModule)` is false, and gradients are divided twice.
            r"from torch\.distributed\._composable\.fsdp import FSDPModule": "from zshard import "
            "FSDPModule",
        }
    },
    r"^step (\d+) loss (\S+) norm (\S+)",
    "saved.pt",
    made.for_titan,
)
SCRIPTS = (
    T5,
    _fsdp2("examples/FSDP2", ""),
    _fsdp2("examples/FSDP2-bf16", "--mixed-precision --explicit-prefetching"),
    TITAN,
)
