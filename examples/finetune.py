"""Train on from a published model: each rank reads its own shards of a Hugging Face folder.

    hf download HuggingFaceTB/SmolLM2-135M --local-dir smollm  # config.json and safetensors files
    torchrun --standalone --nproc-per-node 2 examples/finetune.py --from smollm --bf16

No rank ever holds the whole model: it is built on the meta device, wrapped, then loaded. The text
is Python's manual. On GPUs each rank takes one. `--save` writes a folder of the same kind.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from libraries import process_group
from metrics import Metrics, flops_of
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import zshard

NEEDED = ("model.safetensors", "model.safetensors.index.json")


def config_of(folder: Path) -> Any:
    """The model's config. Exits with a message if the folder lacks a file."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    found = f"it has {', '.join(names[:8]) or 'no files'}{', ...' if names[8:] else ''}"
    if not folder.is_dir():
        sys.exit(f"--from {folder}: there is no such folder")
    if "config.json" not in names:
        sys.exit(f"--from {folder}: config.json is missing; {found}")
    if not set(NEEDED) & set(names):
        sys.exit(f"--from {folder}: {NEEDED[0]} (or {NEEDED[1]}) is missing; {found}")
    return AutoConfig.from_pretrained(folder)


def load(folder: Path, bf16: bool = False) -> Any:
    """The model in that folder, sharded. Collective."""
    config = config_of(folder)
    with torch.device("meta"):  # takes no memory
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    options: dict[str, Any] = {"param_init_fn": zshard.uninitialized}
    if bf16:  # computes in bfloat16; parameters stay float32
        options["mixed_precision"] = zshard.MixedPrecision(torch.bfloat16)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        options["device_id"] = torch.cuda.current_device()
    model = zshard.FSDP(model, **options)
    loaded = zshard.load(folder, model, strict=False)  # old files have more buffers
    if loaded.missing_keys:
        sys.exit(f"--from {folder}: the files lack {', '.join(loaded.missing_keys[:5])}")
    return model


def tokens_of(folder: Path, vocabulary: int) -> Tensor:
    """Python's manual in the folder's tokens; without a tokenizer there, in bytes."""
    text = "\n".join(topics.values())
    if not any(folder.glob("tokenizer*")):
        return torch.tensor(list(text.encode())) % vocabulary
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"])


def batches(tokens: Tensor, batch: int, length: int, rank: int) -> Iterator[Tensor]:
    """Endless random windows, (batch, length), other ones on each rank."""
    draw = torch.Generator().manual_seed(rank)
    while True:
        starts = torch.randint(len(tokens) - length, (batch, 1), generator=draw)
        yield tokens[starts + torch.arange(length)]


def train(args: argparse.Namespace, rank: int) -> None:
    model = load(args.source, args.bf16)
    config, device = model.config, next(model.parameters()).device
    length = min(args.length, getattr(config, "max_position_embeddings", args.length))
    tokens = tokens_of(args.source, config.vocab_size)
    optimizer = zshard.AdamW(model.parameters(), lr=args.lr)
    flops = flops_of(model, config.num_hidden_layers, config.hidden_size, length)
    metrics = Metrics(model, args.batch * length, args.log_every, flops, args.peak_tflops)
    for step, batch in zip(range(args.steps), batches(tokens, args.batch, length, rank)):  # noqa: B905
        batch = batch.to(device)
        loss = model(input_ids=batch, labels=batch).loss
        if rank == 0 and step == 0:
            print(f"first loss {loss.item():.9f}", flush=True)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        metrics.step(loss)
    if args.save:
        zshard.export(model, dtype=torch.bfloat16).save(args.save)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--from", dest="source", type=Path, required=True, metavar="PATH", help="the folder")
    add("--save", type=Path, metavar="PATH", help="write the trained model here, in bfloat16")
    add("--steps", type=int, default=20, help="(default: %(default)s)")
    add("--batch", type=int, default=1, help="sequences per rank and step (default: %(default)s)")
    add("--length", type=int, default=512, help="tokens of a sequence (default: %(default)s)")
    add("--lr", type=float, default=1e-5, help="learning rate (default: %(default)s)")
    add("--bf16", action="store_true", help="compute in bfloat16")
    add("--log-every", type=int, default=5, metavar="N", help="steps between lines (default: 5)")
    add("--peak-tflops", type=float, help="of a GPU, for MFU (default: measured)")
    args = parser.parse_args()
    with process_group() as (rank, _):
        train(args, rank)


if __name__ == "__main__":
    main()
