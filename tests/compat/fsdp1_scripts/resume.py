"""Train, save on rank 0, load into a model with other weights on all ranks, and continue
training."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 3 * width), nn.SiLU(), nn.Linear(3 * width, width)
        )

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def make(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(7, 10), *[Block(10) for _ in range(3)], nn.Linear(10, 1))
    options = {"use_orig_params": True, "device_id": torch.device("cpu")}
    return FSDP(net, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def train(model, data):
    biases = [param for name, param in model.named_parameters() if name.endswith("bias")]
    others = [param for name, param in model.named_parameters() if not name.endswith("bias")]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
    losses = []
    for _step in range(3):
        x = torch.randn(8, 7, generator=data)
        loss = (model(x).squeeze(1) - x.sum(1)).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(model):
    """Return the full state dict, on rank 0 only."""
    config = FullStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        state = model.state_dict()
    assert (len(state) > 0) == (dist.get_rank() == 0)
    return state


dist.init_process_group("gloo")
rank, path = dist.get_rank(), sys.argv[1]
data = torch.Generator().manual_seed(rank)
first = make(seed=3)
losses = train(first, data)
state = whole(first)
if rank == 0:
    torch.save(state, path)
dist.barrier()
second = make(seed=4)
second.load_state_dict(torch.load(path, map_location="cpu"))
losses += train(second, data)
state = whole(second)
if rank == 0:
    torch.save({"state": state, "losses": losses}, path)
dist.barrier()
dist.destroy_process_group()
