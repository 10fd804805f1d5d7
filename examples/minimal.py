"""The smallest example: classify handwritten digits on two ranks; save, and continue after a crash.

torchrun --standalone --nproc-per-node 2 examples/minimal.py --strategy full_shard --save mini"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import zshard

parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="full_shard", help="one of zshard's, or ddp: torch's DDP")
parser.add_argument("--save", help="folder for checkpoints; continues from the newest one there")
args = parser.parse_args()
distributed.init_process_group("gloo")
rank, world = distributed.get_rank(), distributed.get_world_size()
images, labels = map(torch.tensor, load_digits(return_X_y=True))
torch.manual_seed(0)  # the same parameters on all ranks
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
ddp = args.strategy == "ddp"
model = DDP(model) if ddp else zshard.FSDP(model, strategy=args.strategy)
optimizer = zshard.AdamW(model.parameters(), lr=1e-3)
saved = args.save and zshard.latest_checkpoint(args.save)
for step in range(zshard.load(saved, model, optimizer).step if saved else 0, 100):
    batch = torch.arange(64 * step * world + rank, 64 * (step + 1) * world, world) % 1437
    loss = F.cross_entropy(model(images[batch].float() / 16), labels[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if args.save and step % 20 == 19:
        zshard.save(args.save, model, optimizer, step=step + 1)
    if rank == 0 and step % 10 == 9:
        print(f"step {step + 1}: loss {loss.item():.9f}", flush=True)
with torch.no_grad():
    accuracy = (model(images[1437:].float() / 16).argmax(1) == labels[1437:]).float().mean().item()
print(f"rank {rank}: accuracy on 360 held-out digits {accuracy:.3f} (expected: 0.85; chance: 0.10)")
assert accuracy >= 0.85
