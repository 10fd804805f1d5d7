"""A transformer under FSDP1: its layers are units by class, gradients are clipped, rank 0 saves."""

import functools
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
model = nn.Sequential(nn.Embedding(40, 16), encoder, nn.Linear(16, 40))
policy = functools.partial(
    transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer}
)
model = FSDP(
    model,
    auto_wrap_policy=policy,
    sharding_strategy=ShardingStrategy.FULL_SHARD,
    backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
    device_id=torch.device("cpu"),
)
# eps far above rounding: the gradient of the keys' bias is pure rounding error, which Adam would
# amplify
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
data = torch.Generator().manual_seed(rank)
losses, norms = [], []
for _step in range(4):
    ids = torch.randint(0, 40, (4, 9), generator=data)
    optimizer.zero_grad()
    logits = model(ids[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    norms.append(float(model.clip_grad_norm_(0.5)))
    optimizer.step()
    losses.append(loss.item())
state = model.state_dict()  # on all ranks
if rank == 0:
    torch.save({"state": state, "losses": losses, "norms": norms}, sys.argv[1])
dist.barrier()
dist.destroy_process_group()
