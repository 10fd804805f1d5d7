"""The number of ranks changes, the numbers do not: a classifier of digits with
deterministic="any-world", which continues on any number of ranks.

    torchrun --standalone --nproc-per-node 3 examples/elastic.py --save elastic --until 40
    torchrun --standalone --nproc-per-node 2 examples/elastic.py --save elastic

The losses, and the digest of the weights at the end, are those of any other number of ranks."""

import argparse
import hashlib

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

import zshard

parser = argparse.ArgumentParser()
parser.add_argument("--save", required=True, help="folder for checkpoints; continues from the last")
parser.add_argument("--until", type=int, default=100, help="steps, of all runs together")
parser.add_argument("--every", type=int, default=10, help="steps from checkpoint to checkpoint")
args = parser.parse_args()
distributed.init_process_group("gloo")
rank = distributed.get_rank()
images, labels = map(torch.tensor, load_digits(return_X_y=True))
digits = TensorDataset(images[:1437].float() / 16, labels[:1437])
torch.manual_seed(0)  # the same parameters on all ranks
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 10))
model = zshard.FSDP(model, deterministic="any-world", micro_batches=12)
optimizer = zshard.AdamW(model.parameters(), lr=1e-3)
saved = zshard.latest_checkpoint(args.save)
start = zshard.load(saved, model, optimizer).step if saved else 0
sampler = zshard.MicroBatchSampler(model, len(digits), batch_size=8)
sampler.step = start
batches = iter(DataLoader(digits, batch_sampler=sampler))
for step in range(start, args.until):
    losses = {}
    for index in model.micro_batches(step):
        inputs, targets = next(batches)
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        losses[index] = loss.item()
    optimizer.step()
    optimizer.zero_grad()
    if (step + 1) % args.every == 0:
        zshard.save(args.save, model, optimizer, step=step + 1)
    if rank == 0:
        print(f"step {step + 1}: loss of micro-batch 0 {losses[0]:.9f}", flush=True)
weights = model.state_dict()
digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in weights.values()))
if rank == 0:
    print(f"weights after {args.until} steps: {digest.hexdigest()[:16]}")
