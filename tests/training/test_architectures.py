"""Real architectures under a bare `FSDP(model)`: training has the bits of DDP.

Nothing is said about the model: "auto" chooses its units, each rank has its own batches. Skipped
where transformers is not installed.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import ARCHITECTURES
from compare import assert_same
from models import COMBINATIONS, ddp, differences, make, make_optimizer
from spawn import on_ranks

from zshard import FSDP

pytest.importorskip("transformers", reason="transformers is not installed")

STEPS = 2
FULL = [("full_shard", "shm")]
# Trained in all ways: tied weights, shared layers, experts that rest, statistics, a weight unused.
IN_ALL_WAYS = ("gpt2, tied", "t5, tied", "albert", "mixtral", "switch", "resnet", "wav2vec2")


def train(model, name, optimizer="torch.SGD"):
    """Trains on this rank's batches; returns the losses."""
    losses, chosen = [], make_optimizer(optimizer, model)
    for step in range(STEPS):
        chosen.zero_grad()
        loss = model(**ARCHITECTURES[name].batch(step, dist.get_rank())).loss
        loss.backward()
        chosen.step()
        losses.append(loss.item())
    return losses


def train_by_ddp(name):
    """(losses, state dict) under DDP. Fails where that shows nothing."""
    architecture = ARCHITECTURES[name]
    model = make(architecture.build, seed=1 + dist.get_rank())  # DDP takes rank 0's, so has FSDP to
    parallel = ddp(model, find_unused_parameters=architecture.unused)
    losses = train(parallel, name)
    assert all(map(torch.isfinite, map(torch.tensor, losses))) and len(set(losses)) == STEPS, losses
    return losses, model.state_dict()


def train_sharded(name, combination):
    """(losses, state dict, number of units) under zshard."""
    strategy, transport = combination
    model = make(ARCHITECTURES[name].build, seed=1 + dist.get_rank())
    model = FSDP(model, strategy=strategy, transport=transport)
    return train(model, name), model.state_dict(), len(FSDP.fsdp_modules(model))


def differences_from_ddp(name, combinations):
    """({combination: what differs from DDP}, the least number of units)."""
    losses, state = train_by_ddp(name)
    found: dict[Any, list[str]] = {}
    units = []
    for combination in combinations:
        our_losses, ours, count = train_sharded(name, combination)
        units.append(count)
        found[combination] = differences(ours, state)
        if our_losses != losses:
            found[combination].append(f"losses: {our_losses}, not {losses}")
    return found, min(units)


def combinations_of(name):
    return COMBINATIONS if name in IN_ALL_WAYS else FULL


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_training_is_bit_identical_to_ddp(pool2, name):
    found_on_ranks = pool2.run(differences_from_ddp, name, combinations_of(name))
    for rank, (found, units) in enumerate(found_on_ranks):
        assert not any(found.values()), f"rank {rank}: {found}"
        assert units >= 2, "the model is one unit: nothing is tested"


# --- what else users of transformers do ----------------------------------------------------------


def trained(name, prepare, combination=None, **options):
    """(losses, state dict) after `prepare(model)`; by DDP if no combination is given."""
    architecture, rank = ARCHITECTURES[name], dist.get_rank()
    model = make(architecture.build)
    prepare(model)
    if combination is None:
        parallel = ddp(model, **options)
    else:
        parallel = FSDP(model, strategy=combination[0], transport=combination[1])
    torch.manual_seed(rank)
    return train(parallel, name), model.state_dict()


def nothing(model):
    pass


def checkpointing_with(reentrant, model):
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()  # reentrant checkpoints work only below such an input


@pytest.mark.sampled(1)
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("name", ["gpt2, tied", "llama, untied", "bert", "t5, untied"])
@on_ranks(2)
def test_gradient_checkpointing_is_bit_identical_to_ddp(name, reentrant):
    """What differs from DDP with the same checkpoints."""
    prepare = functools.partial(checkpointing_with, reentrant)
    losses, state = trained(name, prepare)
    found = {}
    for combination in COMBINATIONS:
        our_losses, ours = trained(name, prepare, combination)
        found[combination] = differences(ours, state) + [our_losses] * (our_losses != losses)
    assert not any(found.values()), found


def dropping(model):
    """Dropout and skipped layers, drawn anew by each rank."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
        for attribute in ("dropout", "layerdrop"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.3)


def differences_with_dropout(name, combinations):
    """({combination: what differs from DDP}, does dropout do anything?)"""
    losses, state = trained(name, dropping, find_unused_parameters=True)
    found = {}
    for combination in combinations:
        our_losses, ours = trained(name, dropping, combination)
        found[combination] = differences(ours, state) + [our_losses] * (our_losses != losses)
    return found, trained(name, nothing, find_unused_parameters=True)[0] != losses


@pytest.mark.parametrize(
    ("name", "combinations"),
    [
        ("gpt2, tied", COMBINATIONS),
        ("bart", COMBINATIONS),
        ("whisper", FULL),
    ],
)
def test_dropout_and_skipped_layers_match_ddp(pool2, name, combinations):
    # A rank that skips a layer runs other units than its peers.
    for found, matters in pool2.run(differences_with_dropout, name, combinations):
        assert matters
        assert not any(found.values()), found


def generated(name, combination):
    """(tokens by a sharded model, by a plain one) after the same training."""
    model = make(ARCHITECTURES[name].build)
    model = FSDP(model, strategy=combination[0], transport=combination[1])
    train(model, name)
    plain = ARCHITECTURES[name].build()
    plain.load_state_dict(model.state_dict())
    prompt = ARCHITECTURES[name].batch(9, dist.get_rank())["input_ids"]
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    return [m.eval().generate(prompt, **options).tolist() for m in (model, plain)]


@pytest.mark.parametrize("name", ["llama, tied", "t5, tied"])
def test_generation_by_all_ranks(pool2, name):
    for combination in (("full_shard", "shm"), ("shard_grad_op", "c10d")):
        for ours, theirs in pool2.run(generated, name, combination):
            assert ours == theirs
            assert len(ours[0]) > 5


def generated_by_each(name, combination, how, lone):
    """Each rank generates a plain model's tokens from its own prompt and length, which may end early.

    lone: rank 0 alone generates; the others wait."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = make(ARCHITECTURES[name].build)
    model = FSDP(model, strategy=combination[0], transport=combination[1])
    train(model, name)
    plain = ARCHITECTURES[name].build()
    plain.load_state_dict(model.state_dict())
    wrong = []
    for round_ in range(3):
        length = 2 + (rank + round_) % world
        prompt = ARCHITECTURES[name].batch(9 + round_, rank)["input_ids"][:, :length]
        options = {"max_new_tokens": 3 + 4 * ((rank + round_) % world), **how}
        theirs = plain.eval().generate(prompt, **options)
        if round_ == 2:  # one that ends by itself, on rank 0 at its first token
            ends = int(theirs[0, length + 2 * rank])
            options["eos_token_id"] = ends
            theirs = plain.generate(prompt, **options)
        if rank == 0 or not lone:
            ours = model.eval().generate(prompt, **options)
            wrong += [] if ours.tolist() == theirs.tolist() else [(ours.tolist(), theirs.tolist())]
        if lone:
            dist.barrier()
    train(model, name)  # and training goes on
    assert wrong == []


GREEDY = {"do_sample": False}
BEAMS = {"do_sample": False, "num_beams": 2}
GENERATING = [*COMBINATIONS, ("zero1", "c10d")]


@pytest.mark.parametrize("how", [GREEDY, BEAMS], ids=["greedy", "beams"])
@pytest.mark.parametrize("combination", list(dict.fromkeys(GENERATING)), ids=str)
def test_generation_of_different_lengths(pool2, combination, how):
    pool2.run(generated_by_each, "gpt2, tied", combination, how, False)


@pytest.mark.parametrize("combination", [c for c in COMBINATIONS if c[1] == "shm"], ids=str)
def test_generation_on_rank_0_alone(pool2, combination):
    pool2.run(generated_by_each, "gpt2, tied", combination, GREEDY, True)


class Adapted(torch.nn.Module):
    """Passes arguments on to the model within, as PEFT's models do."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, **batch):
        return self.base(**batch)

    def generate(self, *args, **kwargs):
        return self.base.generate(*args, **kwargs)


@on_ranks(2)
def test_generation_of_a_model_within_a_model():
    """Tokens are a plain model's where the model that generates is inside the wrapped one."""
    name = "gpt2, tied"
    rank = dist.get_rank()
    model = FSDP(Adapted(make(ARCHITECTURES[name].build)), transport="c10d").eval()
    plain = make(ARCHITECTURES[name].build).eval()
    prompt = ARCHITECTURES[name].batch(9, rank)["input_ids"]
    options = {"max_new_tokens": 3 + 4 * rank, "do_sample": False}
    ours, theirs = (each.generate(prompt, **options) for each in (model, plain))
    assert_same(ours, theirs, "the tokens")
    alone = model.generate(prompt, synced_gpus=True, **{**options, "max_new_tokens": 3})
    assert alone.shape[1] <= prompt.shape[1] + 3


@pytest.mark.parametrize("name", ["gpt2, tied", "llama, untied"])
@on_ranks(2)
def test_save_pretrained(name, tmp_path):
    """`from_pretrained` loads what save_pretrained() of a sharded model saved."""
    folder = str(tmp_path)
    import transformers

    model = FSDP(make(ARCHITECTURES[name].build))
    train(model, name)
    state = model.state_dict()
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=dict(state))  # which empties it
    dist.barrier()
    loaded = getattr(transformers, ARCHITECTURES[name].model).from_pretrained(folder)
    assert_same(loaded.state_dict(), state, "the loaded state")
    assert loaded.config.architectures == [ARCHITECTURES[name].model]
