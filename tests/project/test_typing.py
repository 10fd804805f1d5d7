"""Types: what users' type checkers see of zshard. (`make lint` compares the C module with its stub.)"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


USER = '''\
"""What a training script says, and mistakes that a type checker should find (see the comments)."""

import functools

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zshard
from zshard import FSDP, Adam, AdamW, SGD, ShardingStrategy, fully_shard, shard_info
from zshard.wrap import CustomPolicy, ModuleWrapPolicy, enable_wrap, size_based_auto_wrap_policy, wrap


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2)])

    def generate(self, length: int) -> str:
        return "x" * length


def train(model: Net) -> None: ...


def build() -> FSDP:
    return FSDP(Net())


# What FSDP() and fully_shard() return has the methods of FSDP and of the model's own class.
model = FSDP(Net())
total: torch.Tensor = model.clip_grad_norm_(1.0)
model.generate(3)
model.blocks[0].weight
build().generate(3)
text: str = model.module.generate(3)
train(model)
own: Net = FSDP(Net())
model = model.train().apply(print)
with model.no_sync(), enable_wrap(wrapper_cls=FSDP, strategy="zero1"):
    wrap(model(torch.ones(2)))
sharded = fully_shard(Net(), mesh=init_device_mesh("cpu", (2,)), mp_policy=torch_fsdp.MixedPrecisionPolicy())
sharded.set_requires_gradient_sync(False)
train(sharded)
fully_shard([Net()], offload_policy=torch_fsdp.CPUOffloadPolicy(), reshard_after_forward=2)[0].reshard()
try:
    model(3)
except TimeoutError as error:
    reason: int | None = error.errno

# Arguments: zshard's objects, names, and torch's objects, by position too.
name = "full_shard" if text else "zero1"
policy = "auto"
classes = {nn.Linear}
FSDP(Net(), None, name, True, policy, None, torch_fsdp.MixedPrecisionPolicy())
FSDP(
    Net(),
    None,
    torch_fsdp.ShardingStrategy.FULL_SHARD,
    torch_fsdp.CPUOffload(True),
    torch_fsdp.wrap.ModuleWrapPolicy({nn.Linear}),
    torch_fsdp.BackwardPrefetch.BACKWARD_PRE,
    torch_fsdp.MixedPrecision(torch.bfloat16),
)
FSDP(Net(), strategy="zero2", auto_wrap_policy=classes, device_id=0, backward_prefetch="backward_post")
FSDP(Net(), strategy=ShardingStrategy.ZERO1, auto_wrap_policy=[nn.Linear, Net], device_id="cpu", offload="/tmp")
FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy([Net]), offload=zshard.Offload(), memory_limit="3GiB")
FSDP(Net(), auto_wrap_policy=CustomPolicy(lambda m: True), cpu_offload=zshard.CPUOffloadPolicy())
FSDP(Net(), auto_wrap_policy=torch_fsdp.wrap.CustomPolicy(lambda m: True), device_id=torch.device("cpu"))
FSDP(Net(), auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=3))
FSDP(Net(), auto_wrap_policy=lambda module: isinstance(module, Net), param_init_fn=zshard.uninitialized)
FSDP(Net(), auto_wrap_policy=None, device_mesh=init_device_mesh("cpu", (2, 2)), transport=zshard.NcclOptions())

net: nn.Module = FSDP(nn.Linear(2, 2), strategy=ShardingStrategy.NO_SHARD, timeout=5.0)
adam = AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.95))
schedule = torch.optim.lr_scheduler.StepLR(adam, step_size=1)
SGD([{"params": list(net.parameters()), "lr": 0.1}], momentum=0.9)
units: list[FSDP] = FSDP.fsdp_modules(net)
norm: torch.Tensor = units[0].clip_grad_norm_(1.0)
table: str = units[0].summary()
facts = [shard_info(param) for param in net.parameters()]

FSDP(net, timeout="5")  # error: arg-type
FSDP(net, transprot="shm")  # error: call-overload | call-arg
FSDP(3)  # error: type-var
FSDP(net, 3)  # error: arg-type
FSDP(net, process_group="world")  # error: arg-type
FSDP(net, sharding_strategy=3)  # error: arg-type
FSDP(net, strategy=torch_fsdp.BackwardPrefetch.BACKWARD_PRE)  # error: arg-type
FSDP(net, cpu_offload="cpu")  # error: arg-type
FSDP(net, auto_wrap_policy=nn.Linear)  # error: arg-type
FSDP(net, auto_wrap_policy={"Linear"})  # error: arg-type
FSDP(net, backward_prefetch=True)  # error: arg-type
FSDP(net, mixed_precision=torch.bfloat16)  # error: arg-type
FSDP(net, param_init_fn="zeros")  # error: arg-type
FSDP(net, device_id=0.5)  # error: arg-type
FSDP(net, device_mesh=(2, 2))  # error: arg-type
FSDP(net, offload=True)  # error: arg-type
fully_shard(Net(), mesh=3)  # error: call-overload
fully_shard(Net(), mp_policy=torch.bfloat16)  # error: call-overload
fully_shard(Net(), offload_policy=True)  # error: call-overload
model.clip_grad_norm_()  # error: call-arg
own.generate("3")  # error: arg-type
model.module.generate("3")  # error: arg-type
AdamW(net.parameters(), momentum=0.9)  # error: call-arg
Adam(net.parameters(), lr="fast")  # error: arg-type
units[0].clip_grad_norm_()  # error: call-arg
count: int = units[0].summary()  # error: assignment
'''


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(900)  # it reads all of torch, if `make lint` has not left it a cache
@pytest.mark.skipif(
    importlib.util.find_spec("mypy") is None, reason="mypy is a tool of `make lint`"
)
def test_mypy_checks_calls_of_users(tmp_path: Path) -> None:
    script = tmp_path / f"user_{os.getpid()}.py"  # another name: mypy keeps messages, with paths
    script.write_text(USER)
    words = ["-m", "mypy", "--config-file", "pyproject.toml", "--show-error-codes", str(script)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith(f"{script}:") and ": error: " in line:
            found[int(line.split(":")[1])] = line.rpartition("[")[2].rstrip("]")
    expected = {
        number: {code.strip() for code in line.partition("# error: ")[2].split("|")}
        for number, line in enumerate(USER.splitlines(), 1)
        if "# error: " in line
    }
    assert set(found) == set(expected), done.stdout
    assert all(found[number] in codes for number, codes in expected.items()), done.stdout
