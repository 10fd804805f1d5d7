"""What the scripts would fetch from the network: tokens, tokenizers, questions, made here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


def make_tokens(path: Path, count: int, vocabulary: int) -> None:
    """Text with some structure, so that there is something to learn."""
    draw = np.random.default_rng(len(path.name))
    tokens = draw.integers(0, vocabulary, count)
    tokens[1::2] = (tokens[::2][: len(tokens[1::2])] * 7 + 1) % vocabulary
    if path.suffix == ".npy":
        np.save(path, tokens.astype(np.uint16))
    else:
        tokens.astype(np.uint16).tofile(path)


def for_nanogpt(folder: Path) -> None:
    data = folder / "data" / "made"
    data.mkdir(parents=True)
    for split in ("train", "val"):
        make_tokens(data / f"{split}.bin", 20_000, 256)


TIKTOKEN = """
class Encoding:
    def encode(self, text):
        return list(text.encode())
    def decode(self, tokens):
        return bytes(t % 128 for t in tokens).decode()

def get_encoding(name):
    return Encoding()
"""


def for_build_nanogpt(folder: Path) -> None:
    """Its tokenizer, data and questions come from the network: here, bytes and made ones."""
    data = folder / "edu_fineweb10B"
    data.mkdir()
    for split in ("train", "val"):
        make_tokens(data / f"made_{split}_000000.npy", 20_000, 256)
    (folder / "tiktoken.py").write_text(TIKTOKEN)
    (folder / "requests.py").write_text("")
    (folder / "transformers.py").write_text("class GPT2LMHeadModel:\n    pass\n")
    questions = folder / "hellaswag"
    questions.mkdir()
    endings = ["one end", "another end", "a third one", "the last"]
    rows = [{"ctx": "a" * (i + 3), "label": i % 4, "endings": endings} for i in range(5)]
    text = "\n".join(map(json.dumps, rows))
    (questions / "hellaswag_val.jsonl").write_text(text + "\n")


NO_OPERATORS = """
import sys
import torch
try:
    import torchvision
except RuntimeError:  # its operators are of another build of torch; the scripts need none
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float iou) -> Tensor")
except ImportError:
    pass
"""


def for_imagenet(folder: Path) -> None:
    (folder / "no_operators.py").write_text(NO_OPERATORS)


NLP = """
class Rows(list):
    @property
    def shape(self):
        return (len(self), 3)
    def select(self, indices):
        return Rows(self[i % len(self)] for i in indices)

def load_dataset(name, kind, data_dir, split=None):
    words = "push pull turn lift open close".split()
    rows = Rows({"text": " ".join(words[(i * j) % 6] for j in range(1, 9)),
                 "headline": words[i % 6]} for i in range(32))
    return {"train": rows, "validation": rows} if split is None else rows
"""
TOKENIZER = """
import torch

class T5Tokenizer:
    @classmethod
    def from_pretrained(cls, name, legacy):
        return cls()

    def batch_encode_plus(self, texts, max_length, padding, truncation, return_tensors):
        rows = [list(text.encode())[:max_length] for text in texts]
        full = [row + [0] * (max_length - len(row)) for row in rows]
        mask = [[1] * len(row) + [0] * (max_length - len(row)) for row in rows]
        return {"input_ids": torch.tensor(full), "attention_mask": torch.tensor(mask)}
"""
PACKAGING = "import packaging.version\nimport packaging\n"


def for_t5(folder: Path) -> None:
    """Its tokenizer and articles come from the network: here, bytes and words."""
    for_imagenet(folder)  # transformers imports torchvision if it finds it
    (folder / "nlp.py").write_text(NLP)
    (folder / "made_tokenizer.py").write_text(TOKENIZER)
    (folder / "pkg_resources.py").write_text(PACKAGING)


TITAN = '''
"""torchtitan's llama3 under its own parallelize function, optimizers, clipping and checkpoints."""
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torchtitan.components.checkpoint import ModelWrapper
from torchtitan.components.optimizer import build_optimizers
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims, utils
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.llama3.infra.parallelize import parallelize_llama

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
config = JobConfig()
config.training.seq_len = 32
config.training.mixed_precision_param = "float32"
config.activation_checkpoint.mode = "full"
dims = ParallelDims(1, world, 1, 1, 1, 1, 1, world)
dims.build_mesh()
torch.manual_seed(0)
size = TransformerModelArgs(dim=64, n_layers=3, n_heads=4, vocab_size=256, max_seq_len=64)
model = Transformer(size)
with torch.no_grad():
    model.init_weights()
parallelize_llama(model, dims, config)
optimizers = build_optimizers([model], config.optimizer, dims)
draw = torch.Generator().manual_seed(rank)
for step in range(10):
    optimizers.zero_grad()
    tokens = torch.randint(0, 256, (4, 33), generator=draw)
    tokens[:, 1::2] = (tokens[:, :-1:2] * 7 + 1) % 256
    out = model(tokens[:, :-1])
    targets = tokens[:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), targets, reduction="sum")
    loss = loss / (world * targets.numel())  # as its trainer: by the tokens of all ranks
    loss.backward()
    norm = utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizers.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    print(f"step {step} loss {total.item():.6f} norm {float(norm):.6f}", flush=True)
state = {**ModelWrapper(model).state_dict(), "optimizer": optimizers}
dcp.save(state, checkpoint_id="saved")
if rank == 0:
    dcp_to_torch_save("saved", "saved.pt")
dcp.load({**ModelWrapper(model).state_dict(), "optimizer": optimizers}, checkpoint_id="saved")
dist.destroy_process_group()
'''


def for_titan(folder: Path) -> None:
    """Its trainer needs a GPU; this drives its parts."""
    (folder / "drive.py").write_text(TITAN)
