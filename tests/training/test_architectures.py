"""Real architectures under a bare `FSDP(model)`: training has the bits of DDP.

Nothing is said about the model: "auto" chooses its units, each rank has its own batches. Skipped
where transformers is not installed.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from architectures import ARCHITECTURES
from compare import assert_same
from models import COMBINATIONS, ddp, make, make_optimizer, wrapped
from spawn import on_ranks
from torch import nn

from zshard import FSDP

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

STEPS = 2
FULL = [("full_shard", "shm")]
# Trained in all ways: tied weights, shared layers, experts that rest, statistics, a weight unused.
IN_ALL_WAYS = ("gpt2, tied", "t5, tied", "albert", "mixtral", "switch", "resnet", "wav2vec2")


def train(model, name):
    """Train on this rank's batches; return the losses."""
    losses, optimizer = [], make_optimizer("torch.SGD", model)
    torch.manual_seed(dist.get_rank())  # for dropout
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**ARCHITECTURES[name].batch(step, dist.get_rank())).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_against_ddp(name, combinations, prepare=lambda model: None, **options):
    """Losses and weights are DDP's, after `prepare(model)`. Return the losses, and the least number
    of units."""

    def trained(parallel, **options):
        # DDP takes rank 0's weights, and so has FSDP to
        model = make(ARCHITECTURES[name].build, seed=1 + dist.get_rank())
        prepare(model)
        called = parallel(model, **options)
        losses = train(called, name)
        state = (model if parallel is ddp else called).state_dict()
        return called, {"losses": losses, "model": state}

    _, expected = trained(ddp, **options)
    losses = expected["losses"]
    assert all(map(torch.isfinite, map(torch.tensor, losses))) and len(set(losses)) == STEPS, losses
    units = []
    for strategy, transport in combinations:
        model, ours = trained(FSDP, strategy=strategy, transport=transport)
        assert_same(ours, expected, f"{name} under {strategy}, {transport}")
        units.append(len(FSDP.fsdp_modules(model)))
    return losses, min(units)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ARCHITECTURES)
@on_ranks(2)
def test_training_is_bit_identical_to_ddp(name):
    combinations = COMBINATIONS if name in IN_ALL_WAYS else FULL
    unused = ARCHITECTURES[name].unused
    _, units = check_against_ddp(name, combinations, find_unused_parameters=unused)
    assert units >= 2, "the model is one unit: nothing is tested"


# --- what else users of transformers do ----------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("name", ["gpt2, tied", "llama, untied", "bert", "t5, untied"])
@on_ranks(2)
def test_gradient_checkpointing_is_bit_identical_to_ddp(name, reentrant):
    def prepare(model):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()  # reentrant checkpoints work only below such an input

    check_against_ddp(name, COMBINATIONS, prepare)


def dropping(model):
    """Dropout and skipped layers, drawn separately by each rank."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
        for attribute in ("dropout", "layerdrop"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.3)


@pytest.mark.parametrize(
    ("name", "combinations"),
    [("gpt2, tied", COMBINATIONS), ("bart", COMBINATIONS), ("whisper", FULL)],
)
@on_ranks(2)
def test_dropout_and_skipped_layers_match_ddp(name, combinations):
    """A rank that skips a layer runs other units than its peers."""
    losses, _ = check_against_ddp(name, combinations, dropping, find_unused_parameters=True)
    plain, _ = check_against_ddp(name, FULL, find_unused_parameters=True)
    assert losses != plain


GREEDY = {"do_sample": False}
BEAMS = {"do_sample": False, "num_beams": 2}


def check_generation(name, combination, how, lone):
    """Each rank generates a plain model's tokens from its own prompt and length, which may end
    early.

    lone: rank 0 alone generates; the others wait."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = wrapped(ARCHITECTURES[name].build, combination)
    train(model, name)
    plain = ARCHITECTURES[name].build()
    plain.load_state_dict(model.state_dict())
    for round_ in range(3):
        length, new = 2 + (rank + round_) % world, 3 + 4 * ((rank + round_) % world)
        prompt = ARCHITECTURES[name].batch(9 + round_, rank)["input_ids"][:, :length]
        options = {"max_new_tokens": new, "min_new_tokens": new, **how}
        theirs = plain.eval().generate(prompt, **options)
        if round_ == 2:  # one that ends on its own, on rank 0 at its first token
            options |= {"min_new_tokens": 1, "eos_token_id": int(theirs[0, 2 * rank - new])}
            theirs = plain.generate(prompt, **options)
        if rank == 0 or not lone:
            assert_same(model.eval().generate(prompt, **options), theirs, f"tokens {round_}")
        if lone:
            dist.barrier()
    train(model, name)  # and training continues


@pytest.mark.parametrize("how", [GREEDY, BEAMS], ids=["greedy", "beams"])
@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
@pytest.mark.parametrize("name", ["gpt2, tied", "t5, tied"])
@on_ranks(2)
def test_generation_of_different_lengths(name, combination, how):
    check_generation(name, combination, how, lone=False)


@pytest.mark.parametrize("combination", [c for c in COMBINATIONS if c[1] == "shm"], ids=str)
@on_ranks(2)
def test_generation_on_rank_0_alone(combination):
    check_generation("gpt2, tied", combination, GREEDY, lone=True)


class Adapted(nn.Module):
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
    model = FSDP(make(ARCHITECTURES[name].build))
    train(model, name)
    state = model.state_dict()
    if dist.get_rank() == 0:
        model.save_pretrained(tmp_path, state_dict=dict(state))  # which empties it
    dist.barrier()
    loaded = getattr(transformers, ARCHITECTURES[name].model).from_pretrained(tmp_path)
    assert_same(loaded.state_dict(), state, "the loaded state")
    assert loaded.config.architectures == [ARCHITECTURES[name].model]
