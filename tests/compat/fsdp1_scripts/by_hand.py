"""Units by hand (enable_wrap, wrap), gradients accumulated in no_sync, ZeRO-2."""

import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import enable_wrap, wrap


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[wrap(nn.Linear(12, 12)) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(12))
        self.head = wrap(nn.Sequential(wrap(nn.Linear(12, 20)), nn.GELU(), nn.Linear(20, 5)))

    def forward(self, x):
        return self.head(torch.tanh(self.layers(x)) * self.scale)


dist.init_process_group("gloo")
torch.manual_seed(1)
options = {
    "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
    "device_id": torch.device("cpu"),
}
with enable_wrap(wrapper_cls=FSDP, **options):
    model = wrap(Model())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(dist.get_rank())
losses, norms = [], []
for _step in range(3):
    optimizer.zero_grad()
    for micro in range(4):
        with model.no_sync() if micro < 3 else contextlib.nullcontext():
            loss = model(torch.randn(6, 12, generator=data)).square().mean() / 4
            loss.backward()
        losses.append(loss.item())
    norms.append(model.clip_grad_norm_(max_norm=0.1, norm_type=2).item())
    optimizer.step()
state = model.state_dict()
if dist.get_rank() == 0:
    torch.save({"state": state, "losses": losses, "norms": norms}, sys.argv[1])
dist.barrier()
dist.destroy_process_group()
