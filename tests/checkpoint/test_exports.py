"""Destinations of exports: a Hugging Face folder, a process group; the changes of a model since the
last one; and checkpoints of Hugging Face models, read by `from_pretrained`.
"""

from __future__ import annotations

import importlib.util
import json
import os

import pytest
import torch
import torch.distributed as dist
from architectures import ARCHITECTURES
from checkpoints import inside, manifest_in, tensors_in
from compare import assert_same
from models import Net, make
from optim_states import rank
from rows import all_rows
from safetensors.torch import load_file
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP, AdamW, Exported
from zshard.extras.weights import hf_folder, send

each_transport = pytest.mark.parametrize("transport", ["shm", "c10d"])


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.arange(12).view(2, 6) % 31).square().mean().backward()
    optimizer.step()


def built(transport, group=None):
    """A sharded model with frozen first layers, and its optimizer."""
    plain = make(Net).requires_grad_(False)
    plain.norm.requires_grad_(True)
    plain.head.requires_grad_(True)
    model = FSDP(plain, transport=transport, process_group=group, timeout=10)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    step(model, optimizer)
    return model, optimizer


def same(found, expected):
    assert_same(found, expected, "what was exported")


def full(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def joined(buckets):
    return {name: value for bucket in buckets for name, value in bucket.items()}


# --- changes --------------------------------------------------------------------------------------

TRAINED = {"norm.weight", "norm.bias", "head.weight", "head.bias"}


@each_transport
@on_ranks(2, 3)
def test_only_what_has_changed(transport):
    model, optimizer = built(transport)
    since = Exported()

    def export(**options):
        return joined(zshard.export(model, since=since, bucket=1500, **options))

    expected = full(model)
    same(export(), expected)
    assert export() == {}
    step(model, optimizer)
    expected = full(model)
    same(export(), {name: expected[name] for name in TRAINED})
    # one element, on its rank
    changed = expected["norm.bias"].index_fill(0, torch.tensor([7]), 5.0)
    zshard.load_state_dict(model, expected | {"norm.bias": changed})
    assert export().keys() == {"norm.bias"}
    assert export(dtype=torch.bfloat16).keys() == expected.keys(), "another dtype"
    # a break: everything is sent again, to all
    for _ in zshard.export(model, since=since, bucket=1500, dtype=torch.bfloat16):
        break
    step(model, optimizer)
    export()
    assert export() == {}
    since.reset()
    assert export().keys() == expected.keys()


@pytest.mark.parametrize("kind", ["strided", "expanded", "negative", "conjugate"])
def test_a_changed_view_is_sent(kind):
    """Their memory is not that of their values."""
    model, since, values = nn.Module(), Exported(), torch.randn(8, dtype=torch.complex64)
    other = values.real.clone()
    view, changed = {
        "strided": lambda: (other[::2], other.index_fill(0, torch.tensor([6]), 5.0)[::2]),
        "expanded": lambda: (other[:1].expand(1 << 22), other[1:2].expand(1 << 22)),
        "negative": lambda: (other, torch._neg_view(other)),
        "conjugate": lambda: (values, values.conj()),
    }[kind]()
    model.register_buffer("b", view)
    same(joined(zshard.export(model, since=since)), {"b": view.clone()})
    assert joined(zshard.export(model, since=since)) == {}
    model.b = changed
    expected = changed.resolve_neg().resolve_conj().clone()
    same(joined(zshard.export(model, since=since)), {"b": expected})


@on_ranks(2)
def test_after_a_break_on_one_rank_all_ranks_get_everything():
    model, optimizer = built("shm")
    since = Exported()
    joined(zshard.export(model, since=since))
    step(model, optimizer)
    for i, _ in enumerate(zshard.export(model, since=since, bucket=400)):
        if i == 0 and rank() == 1:
            break
    for expected in (full(model), {}):
        same(joined(zshard.export(model, since=since)), expected)
    assert joined(zshard.export(model, since=since, ranks=0)) == {}


# --- folders --------------------------------------------------------------------------------------


@each_transport
@on_ranks(2)
def test_folders(transport, tmp_path):
    model, optimizer = built(transport)
    expected = full(model)
    zshard.export(model).save(tmp_path / "all")
    low = zshard.export(model, dtype=torch.bfloat16, bucket=900, rename="m.{}".format)
    low.save(tmp_path / "low", max_shard_size=2000)
    dist.barrier()
    same(load_file(tmp_path / "all" / "model.safetensors"), expected)
    assert len([each for each in inside(tmp_path / "low") if each.endswith(".safetensors")]) > 2
    low = {f"m.{name}": value.bfloat16() for name, value in expected.items()}
    same(tensors_in(tmp_path / "low"), low)
    other = make(Net)
    zshard.load(tmp_path / "all", other)
    same(full(other), expected)
    for path, error in (("all", FileExistsError), ("none/x", FileNotFoundError)):
        if transport == "shm" and rank() == 1:
            zshard.export(model).save(tmp_path / path)
        else:
            with pytest.raises(error) as caught:
                zshard.export(model).save(tmp_path / path)
            assert "overwrite" not in str(caught.value)  # which save() does not take
    with pytest.raises(ValueError, match="without since"):
        zshard.export(model, since=Exported()).save(tmp_path / "delta")
    dist.barrier()
    assert [each for each in inside(tmp_path) if each.startswith(".")] == []
    step(model, optimizer)


def no_space(*_):
    raise OSError(28, "no space left")


@each_transport
@on_ranks(2)
def test_a_full_disk_is_an_error_on_all_ranks(transport, tmp_path):
    model, _ = built(transport)
    with pytest.MonkeyPatch.context() as patch:
        if rank() == 0:
            patch.setattr(hf_folder, "bytes_of", no_space)
        if transport == "c10d" or rank() == 0:
            with pytest.raises(OSError, match="no space left"):
                zshard.export(model, bucket=900).save(tmp_path / "x")
    dist.barrier()
    assert os.listdir(tmp_path) == []
    zshard.full_tensor(model.norm.weight)


# --- process groups -------------------------------------------------------------------------------


@each_transport
@on_ranks(4)
def test_broadcasts(transport):
    """Ranks 0 and 1 train; 0 sends to 2 and 3."""
    trainers, line = dist.new_group([0, 1]), dist.new_group([0, 2, 3])
    if rank() < 2:
        model, optimizer = built(transport, trainers)
        sent = [full(model)]
        export = zshard.export(model, bucket=2000, since=Exported())
        export.broadcast(line)
        step(model, optimizer)
        sent.append({name: full(model)[name] for name in TRAINED})
        export.broadcast(line)
        sent.append({})
        export.broadcast(line)
        zshard.export(model, dtype=torch.bfloat16).broadcast(line)
        sent.append({name: value.bfloat16() for name, value in full(model).items()})
        with pytest.raises(ValueError, match="same name"):
            zshard.export(model, rename=lambda _: "x").broadcast(line)
        if rank() == 1 or transport == "c10d":
            with pytest.raises(ValueError, match="not in the process group"):
                zshard.export(model, ranks=1).broadcast(line)
    else:
        sent = [joined(zshard.receive_export(line)) for _ in range(4)]
        with pytest.raises(RuntimeError, match=r"the sender's export failed.*same name"):
            joined(zshard.receive_export(line))
        with pytest.raises(ValueError, match="src must be another rank"):
            joined(zshard.receive_export(line, src=3))
    everyone = [None] * 4
    dist.all_gather_object(everyone, sent)
    same(sent, everyone[0])


class TooLarge(torch.Tensor):
    """A bucket for which the group's device has no memory."""

    def to(self, *_):
        raise MemoryError("on purpose")


@on_ranks(2)
def test_a_sender_without_memory_fails_its_receivers():
    if rank() == 0:
        with pytest.MonkeyPatch.context() as patch:
            room = send.flat_for
            patch.setattr(send, "flat_for", lambda batch: room(batch).as_subclass(TooLarge))
            with pytest.raises(MemoryError, match="on purpose"):
                zshard.export(make(Net)).broadcast()
        zshard.export(make(Net)).broadcast()
    else:
        with pytest.raises(RuntimeError, match=r"the sender's export failed.*on purpose"):
            joined(zshard.receive_export())
        assert joined(zshard.receive_export()).keys() == make(Net).state_dict().keys()


@on_ranks(2)
def test_a_receiver_may_leave_early():
    if rank() == 0:
        export = zshard.export(make(Net), bucket=600)
        export.broadcast()
        export.broadcast()
    else:
        for _ in zshard.receive_export():
            break
        assert joined(zshard.receive_export()).keys() == make(Net).state_dict().keys()


# --- checkpoints for Hugging Face's tools ---------------------------------------------------------


HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
needs_transformers = pytest.mark.skipif(not HAS_TRANSFORMERS, reason="needs transformers")


def plain(name, is_tied):
    import transformers

    torch.manual_seed(3)
    sizes = {"vocab_size": 61, "tie_word_embeddings": is_tied}
    if name == "gpt2":
        sizes |= {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
        config = transformers.GPT2Config(**sizes)
    else:
        sizes |= {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
        config = transformers.LlamaConfig(**sizes)
    return transformers.AutoModelForCausalLM.from_config(config)


CASES = [
    ("gpt2", True, {}),
    ("gpt2", False, {"max_shard_size": 5000}),
    ("llama", True, {"max_shard_size": "4KB"}),
    ("llama", False, {"dtype": torch.bfloat16}),
]


def read_by_transformers(folder, model, **options):
    """Save a sharded model, and compare what from_pretrained() then returns, on rank 0."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kind, model = type(model), FSDP(model, transport="c10d")
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.25)
    zshard.save(folder, model, overwrite=True, **options)
    expected = model.state_dict()
    if rank() == 0:
        loading = {"output_loading_info": True, "local_files_only": True}
        again, facts = kind.from_pretrained(folder, **loading)
        dtype = options.get("dtype", torch.float32)
        if dtype != torch.float32:
            expected = {name: value.to(dtype) for name, value in expected.items()}
        assert_same(again.state_dict(), expected, kind.__name__)
        assert not any(facts.values()), facts
        with open(f"{folder}/config.json") as file:
            config = json.load(file)
        assert config["architectures"] == [kind.__name__]
        assert config["dtype"] == str(dtype).removeprefix("torch.")
        return again
    return None


@needs_transformers
@pytest.mark.thorough
@pytest.mark.parametrize(("name", "is_tied", "options"), CASES)
@on_ranks(2)
def test_from_pretrained(name, is_tied, options, tmp_path):
    again = read_by_transformers(tmp_path / "x", plain(name, is_tied), **options)
    if again is not None:
        tied = again.get_output_embeddings().weight is again.get_input_embeddings().weight
        assert tied is is_tied
        names = {"lm_head.weight"} if is_tied else set()
        assert manifest_in(tmp_path / "x").tied.keys() == names
        assert "generation_config.json" in inside(tmp_path / "x")


@needs_transformers
@pytest.mark.thorough
@pytest.mark.slow
@on_ranks(2)
def test_architectures(tmp_path):
    with all_rows() as row:
        for name, architecture in ARCHITECTURES.items():
            with row(name):
                torch.manual_seed(1)
                read_by_transformers(tmp_path / "x", architecture.build())


def test_model_with_a_different_kind_of_config(tmp_path):
    model = nn.Linear(2, 2)
    for config in (None, {"a": 1}, object()):
        model.config = config
        zshard.save(tmp_path / "x", model, overwrite=True)
        assert "config.json" not in inside(tmp_path / "x")


class Around(nn.Module):
    """A head on a Hugging Face model, with that model's configuration."""

    def __init__(self):
        super().__init__()
        self.model = plain("gpt2", False)
        self.config = self.model.config


@needs_transformers
@on_ranks(2)
def test_module_around_a_model_saves_no_config(tmp_path):
    """With the configuration, from_pretrained() would load none of its weights and draw all of
    them."""
    zshard.save(tmp_path / "x", FSDP(Around()))
    assert "config.json" not in inside(tmp_path / "x")
    zshard.load(tmp_path / "x", Around())
