"""Like torch's FSDP1 tutorial: a convnet, units by size, a schedule, totals over ranks."""

import functools
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.optim.lr_scheduler import StepLR


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.fc1 = nn.Linear(576, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return F.log_softmax(self.fc2(F.relu(self.fc1(torch.flatten(x, 1)))), dim=1)


def train(model, batches, optimizer):
    model.train()
    total = torch.zeros(2)
    for data, target in batches:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target, reduction="sum")
        loss.backward()
        optimizer.step()
        total += torch.tensor([loss.item(), len(data)])
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return (total[0] / total[1]).item()


def test(model, batches):
    model.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        for data, target in batches:
            output = model(data)
            total[0] += F.nll_loss(output, target, reduction="sum")
            total[1] += (output.argmax(1) == target).sum()
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return total.tolist()


def main(path):
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1000)
    model = FSDP(Net(), auto_wrap_policy=policy, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    draw = torch.Generator().manual_seed(dist.get_rank())
    batches = [
        (torch.randn(8, 1, 16, 16, generator=draw), torch.randint(0, 10, (8,), generator=draw))
        for _ in range(3)
    ]
    losses = []
    for _epoch in range(2):
        losses += [train(model, batches, optimizer), *test(model, batches)]
        scheduler.step()
    dist.barrier()
    states = model.state_dict()
    if dist.get_rank() == 0:
        torch.save({"state": states, "losses": losses}, path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
