"""examples/finetune.py: from a folder of transformers' to a sharded model with the same loss."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from spawn import on_ranks

transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def finetune():
    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        return importlib.import_module("finetune")


def published(folder, **options) -> None:
    """A tiny Llama with random weights, as save_pretrained() writes it. options: of this call."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    torch.manual_seed(5)
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=48)
    transformers.LlamaForCausalLM(config).save_pretrained(folder, **options)


def run(*flags) -> str:
    """Run it on this rank; return what it printed, and how it ended."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        mock.patch.object(sys, "argv", ["finetune.py", *map(str, flags)]),
    ):
        finetune().main()
    return printed.getvalue()


def first_loss(folder) -> float:
    """Of the plain model, of rank 0's first batch."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch = next(finetune().batches(finetune().tokens_of(folder, 256), 2, 48, 0))
    return plain(input_ids=batch, labels=batch).loss.item()


def by_rank_0(action, *args, **options) -> None:
    if dist.get_rank() == 0:
        action(*args, **options)
    dist.barrier()


@pytest.mark.parametrize("size", ["5GB", "64KB"])
@on_ranks(2)
def test_the_first_loss_is_the_plain_models(size, tmp_path):
    by_rank_0(published, tmp_path / "a", max_shard_size=size)
    assert (len(list((tmp_path / "a").glob("*.safetensors"))) > 1) == (size == "64KB")
    flags = ["--batch", 2, "--steps", 6, "--lr", 1e-3, "--log-every", 1]
    printed = run("--from", tmp_path / "a", "--save", tmp_path / "b", *flags)
    if dist.get_rank() == 0:
        assert f"first loss {first_loss(tmp_path / 'a'):.9f}\n" in printed
        losses = [float(each) for each in re.findall(r"step +\d+  loss ([\d.]+)", printed)]
        assert len(losses) == 6 and losses[-1] < losses[0] - 0.1
        assert first_loss(tmp_path / "b") < losses[0] - 0.1  # transformers reads what it saved


@on_ranks(2)
def test_no_rank_holds_the_model(tmp_path):
    by_rank_0(published, tmp_path / "a")
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **kwargs or {})
            if isinstance(out, torch.Tensor) and not out.is_meta:
                largest = max(largest, out.untyped_storage().nbytes())
            return out

    with Watch():
        model = finetune().load(tmp_path / "a")
    size = 4 * importlib.import_module("zshard").num_parameters(model)
    assert model.memory()["shards"] < 0.55 * size and largest < 0.55 * size


@on_ranks(2)
def test_a_folder_that_lacks_something(tmp_path):
    def fails(text, name="a"):
        with pytest.raises(SystemExit) as left:
            run("--from", tmp_path / name)
        assert text in str(left.value), left.value
        dist.barrier()

    by_rank_0(published, tmp_path / "a")
    by_rank_0(shutil.copytree, tmp_path / "a", tmp_path / "b")
    fails("there is no such folder", "c")
    by_rank_0((tmp_path / "a" / "model.safetensors").rename, tmp_path / "a" / "pytorch_model.bin")
    fails("model.safetensors (or model.safetensors.index.json) is missing; it has config.json,")
    by_rank_0((tmp_path / "a" / "config.json").unlink)
    fails("config.json is missing; it has ")

    def cut():
        path = tmp_path / "b" / "model.safetensors"
        tensors = importlib.import_module("safetensors.torch").load_file(path)
        del tensors["model.norm.weight"]
        importlib.import_module("safetensors.torch").save_file(tensors, path)

    by_rank_0(cut)
    fails("the files lack model.norm.weight", "b")
