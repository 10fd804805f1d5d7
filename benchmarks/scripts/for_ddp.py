"""Scripts for DDP: nanoGPT, build-nanogpt, minGPT, and those of pytorch/examples.

Each needs the line changed that imports or calls DistributedDataParallel, no other.
"""

from __future__ import annotations

from benchmarks.scripts import made
from benchmarks.scripts.script import Script

DDP = r"from torch\.nn\.parallel import DistributedDataParallel as DDP"
ZSHARD = "from zshard import FSDP as DDP"
CLIPPING = {r"torch\.nn\.utils\.clip_grad_norm_\(.*\)": "pass"}

_ON_CPU = {
    r"device = f'cuda:\{ddp_local_rank\}'": "device = 'cpu'",
    r"torch\.cuda\.set_device\(device\)": "pass",
    r"device_ids=\[ddp_local_rank\]": "device_ids=None",
}
NANOGPT = Script(
    "nanoGPT",
    "nanoGPT",
    "3adf61e",
    [
        "train.py --backend=gloo --compile=False --dtype=float32 --dataset=made --n_layer=4"
        " --n_head=4 --n_embd=128 --block_size=64 --batch_size=4 --gradient_accumulation_steps=4"
        " --dropout=0.0 --warmup_iters=2 --eval_iters=3 --eval_interval=4 --log_interval=1"
        " --max_iters=12 --always_save_checkpoint=True --learning_rate=1e-3"
    ],
    {"train.py": _ON_CPU},
    {"train.py": {DDP: ZSHARD}},
    r"^(?:iter|step) (\d+): .*?loss (\d+\.\d+)(?:, val loss (\d+\.\d+))?",
    "out/ckpt.pt",
    made.for_nanogpt,
    clipping={"train.py": {r"if grad_clip != 0\.0:": "if False:"}},
)
BUILD_NANOGPT = Script(
    "build-nanogpt",
    "build-nanogpt",
    "6104ab1",
    ["train_gpt2.py"],
    {
        "train_gpt2.py": {
            **_ON_CPU,
            r"assert torch\.cuda\.is_available\(\).*": "pass",
            r"backend='nccl'": "backend='gloo'",
            r"ReduceOp\.AVG": "ReduceOp.SUM",
            r"total_batch_size = 524288": "total_batch_size = 1024",
            r"B = 64 ": "B = 4 ",
            r"T = 1024 ": "T = 64 ",
            r"GPTConfig\(vocab_size=50304\)": "GPTConfig(256, 256, 4, 4, 128)",
            r"max_steps = 19073": "max_steps = 9",
            r"warmup_steps = 715": "warmup_steps = 2",
            r"step % 250": "step % 3",
            r"step % 5000": "step % 3",
        }
    },
    {"train_gpt2.py": {DDP: ZSHARD}},
    r"^(?:step +(\d+) \| loss: (\d+\.\d+)|validation loss: (\d+\.\d+)|HellaSwag accuracy: (\S+))",
    "log/model_*.pt",
    made.for_build_nanogpt,
    clipping={"train_gpt2.py": {r"norm = torch\.nn\.utils\.clip_grad_norm_\(.*\)": "norm = 0.0"}},
    tolerance=5e-3,  # it computes in bf16
)
MINGPT = Script(
    "minGPT",
    "minGPT",
    "37baab7",
    [
        "projects/adder/adder.py --trainer.max_iters=41 --trainer.num_workers=0 "
        "--trainer.device='cpu' --trainer.batch_size=16"
    ],
    {
        "mingpt/trainer.py": {
            # It has no DDP: this adds it.
            r"from mingpt\.utils import.*": "\\g<0>\nfrom torch.nn.parallel import "
            "DistributedDataParallel as DDP",
            r"^(\s+)self\.optimizer = model\.conf.*": "\\g<0>\n\\1model = DDP(model)",
        },
        "projects/adder/adder.py": {
            r"^import torch$": "import torch\ntorch.distributed.init_process_group('gloo')\n"
            "RANK = torch.distributed.get_rank()",
            r"set_seed\(config\.system\.seed\)": "set_seed(config.system.seed + RANK)",
            r"'\./out/adder'": "f'./out/adder{RANK}'",
            r"2: None, 3: 5\}": "2: 2, 3: 5}",
            r"% 500 == 0": "% 20 == 0",
        },
    },
    {"mingpt/trainer.py": {DDP: ZSHARD}},
    r"^(?:iter_dt .*?; (iter \d+): train loss (\S+)|(\w+) final score: (\S+) =)",
    "out/adder*/model.pt",
    clipping={"mingpt/trainer.py": CLIPPING},
)
_MINGPT_DDP = "examples/distributed/minGPT-ddp/mingpt"
MINGPT_DDP = Script(
    "minGPT-ddp",
    _MINGPT_DDP,
    "77f55b9",
    [
        "main.py data_config.path=data/input.txt data_config.truncate=0.002 "
        "data_config.block_size=32 gpt_config.n_layer=2 gpt_config.n_head=4 gpt_config.n_embd=64 "
        "trainer_config.batch_size=32 trainer_config.data_loader_workers=0 "
        f"trainer_config.save_every=1 trainer_config.use_amp=False trainer_config.max_epochs={last}"
        for last in (2, 4)
    ],
    {
        "main.py": {
            r"if not verify_min_gpu_count\(.*\):": "if False:",
            r"acc = torch\.accel.*": "torch.manual_seed(1)",
            r'torch\.device\(f"\{acc\}:\{rank\}"\)': 'torch.device("cpu")',
            r"torch\.accelerator\.set_device_index\(rank\)": "pass",
        },
        "trainer.py": {
            r'torch\.device\(f"\{self\.acc\}:\{self\.local_rank\}"\)': 'torch.device("cpu")',
            r"\.to\(self\.local_rank\)": ".to(self.device)",
            r"device_ids=\[self\.local_rank\]": "device_ids=None",
            r"iter % 100 == 0": "iter % 5 == 0",
        },
    },
    {"trainer.py": {DDP: ZSHARD}},
    r"^\[RANK0\] Epoch (\d+) \| Iter (\d+) \| (\w+) Loss (\S+)",
    "gpt_snapshot.pt",
    clipping={"trainer.py": CLIPPING},
)
_FIVE_STEPS = """    for _ in range(5):
        optimizer.zero_grad()
        loss = loss_fn(ddp_model(torch.randn(20, 10)), labels)
        loss.backward()
        optimizer.step()
        print('loss', loss.item())"""
DDP_EXAMPLE = Script(
    "examples/ddp",
    "examples/distributed/ddp",
    "77f55b9",
    ["example.py"],
    {
        "example.py": {
            r"if not verify_min_gpu_count\(.*\):": "if False:",
            r"acc = torch\.accel.*": "torch.manual_seed(rank)",
            r"get_default_backend_for_device\(acc\)": "get_default_backend_for_device('cpu')",
            r"torch\.accelerator\.set_device_index\(rank\)": "pass",
            r"\.to\(rank\)": "",
            r"device_ids=\[rank\]": "device_ids=None",
            # It takes one step, and prints no loss.
            r"    loss_fn\(outputs, labels\)\.backward\(\)\n    optimizer\.step\(\)": _FIVE_STEPS,
        }
    },
    {"example.py": {DDP: ZSHARD}},
    r"^loss (\S+)",
    "",
    print_tolerance=0.0,
)
_SERIES_CPU = {
    r"torch\.cuda\.set_device\(.*\)": "torch.manual_seed(1)",
    r'backend="nccl"': 'backend="gloo"',
    r"\.to\((self\.)?(gpu_id|local_rank)\)": ".to('cpu')",
    r"device_ids=\[(self\.)?(gpu_id|local_rank)\]": "device_ids=None",
    # Its cross-entropy of one class is 0, whatever the model; and it prints no loss.
    r"F\.cross_entropy": "F.mse_loss",
    r"^(\s+)loss\.backward\(\)": "\\g<0>\n\\1print('loss', loss.item())",
}
_SNAPSHOTS = {r'f"cuda:\{self\.(gpu_id|local_rank)\}"': '"cpu"'}


def _series(file: str, launched: bool) -> Script:
    more = {"runs": [f"{file} 2 1", f"{file} 4 1"]} if launched else {"runs": [f"{file} 2 1"]}
    spawns = {r"torch\.cuda\.device_count\(\)": "2"}
    return Script(
        f"examples/ddp-tutorial-series/{file}",
        "examples/distributed/ddp-tutorial-series",
        "77f55b9",
        both={file: {**_SERIES_CPU, **(_SNAPSHOTS if launched else spawns)}},
        ours={file: {DDP: ZSHARD}},
        lines=r"^(?:loss (\S+))" if launched else r"(\[GPU0\] Epoch \d+)",
        saved="snapshot.pt" if launched else "checkpoint.pt",
        print_tolerance=0.0,
        tolerance=0.0,
        **more,
        **({} if launched else {"launcher": ()}),
    )


IMAGENET = Script(
    "examples/imagenet",
    "examples/imagenet",
    "77f55b9",
    [
        "main.py --dummy --dist-url env:// --dist-backend gloo --no-accel --seed 1 -j 0 -b 8 -p 1 "
        "--lr 0.01 " + more
        for more in ("--epochs 1", "--epochs 2 --resume checkpoint.pth.tar")
    ],
    {
        "main.py": {
            r"^import torchvision\.datasets": "import no_operators\n\\g<0>",
            # Without an accelerator it does not wrap the model; and all ranks save, to one file.
            r"print\('using CPU, this will be slow'\)": "model = "
            "torch.nn.parallel.DistributedDataParallel(model)",
            r"if not args\.multiprocessing_distributed or \(args[^)]*\)": "if args.rank == 0",
            r"1281167, \(3, 224, 224\)": "48, (3, 64, 64)",
            r"50000, \(3, 224, 224\)": "16, (3, 64, 64)",
        }
    },
    {
        "main.py": {
            r"^import torch$": "import torch\nimport zshard",
            r"model = torch\.nn\.parallel\.DistributedDataParallel\(model\)": "model = zshard.FSDP("
            "model, forward_sync_buffers=True)",
        }
    },
    r"^(?:Epoch: \[(\d)\]\[ *(\d+)/.*?|Test: \[ *(\d+)/.*?)Loss (\S+)",
    "*.pth.tar",
    made.for_imagenet,
)
SCRIPTS = (
    *(NANOGPT, BUILD_NANOGPT, MINGPT, MINGPT_DDP, DDP_EXAMPLE),
    _series("multigpu_torchrun.py", True),
    _series("multinode.py", True),
    _series("multigpu.py", False),
    IMAGENET,
)
