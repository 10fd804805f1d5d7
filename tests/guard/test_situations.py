"""Code for full parameters, on shards: correct as on the plain model, or ShardError; never silently
wrong.

Each situation runs on a plain model and on sharded ones with the same values and gradients, over
both transports, in each strategy; with "no_shard" all of them are correct.
"""

import pytest
import situations
import torch
from models import COMBINATIONS
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP, ShardError

WIDTH = 16
SHARDED = [combination for combination in COMBINATIONS if combination[0] != "no_shard"]
REMEDIES = ("full_tensor", "summon_full_params", "named_norms", "WholeMatrix")
OF_A_NORM = ("rows_of_length_one", "renorm", "row_norms")


def plain_model():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])


def sharded_model(combination):
    strategy, transport = combination
    return FSDP(plain_model(), strategy=strategy, transport=transport, auto_wrap_policy={nn.Linear})


def whole(value):
    return zshard.full_tensor(value) if isinstance(value, torch.Tensor) else value


def outcome(situation, model):
    """Return (its result, the parameters after it), or the text of ShardError."""
    model(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)).square().sum().backward()
    try:
        result = situation(model)
    except ShardError as error:
        return str(error)
    return whole(result), [whole(p.detach()) for p in model.parameters()]


def same(ours, theirs):
    if isinstance(ours, torch.Tensor):
        return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    return ours == theirs


def on_shards(situation, combination):
    """Return "right", "wrong", or the error."""
    expected, after = outcome(situation, plain_model())
    ours = outcome(situation, sharded_model(combination))
    if isinstance(ours, str):
        return ours
    equal = [same(a, b) for a, b in zip(ours[1], after, strict=True)]
    return "right" if same(ours[0], expected) and all(equal) else "wrong"


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", situations.RIGHT)
@on_ranks(2)
def test_elementwise_code_is_correct(name):
    for combination in COMBINATIONS:
        assert on_shards(situations.RIGHT[name], combination) == "right", combination


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", situations.REFUSED)
@on_ranks(2)
def test_other_code_is_refused_with_parameter_and_remedy(name):
    for combination in SHARDED:
        said = on_shards(situations.REFUSED[name], combination)
        # Over shm rank 1 has no elements, so torch returns before it draws.
        if (name, combination[1], torch.distributed.get_rank()) == ("orthogonal", "shm", 1):
            continue
        assert "of '" in said and "shard" in said, (combination, said)
        assert any(remedy in said for remedy in REMEDIES), (combination, said)
        assert "to_local" not in said, "this rank's elements alone give something else"
        if name in OF_A_NORM:
            assert "with FSDP.summon_full_params(model):" in said and "named_norms" in said


@pytest.mark.parametrize("name", ["row_norms", "vector", "penalty", "gram", "adafactor"])
@on_ranks(2)
def test_unsharded_parameters_are_not_guarded(name):
    assert on_shards(situations.REFUSED[name], ("no_shard", "shm")) == "right"


@torch.no_grad()
def normalize_whole(model):
    with FSDP.summon_full_params(model):
        model[2].weight.copy_(nn.functional.normalize(model[2].weight.clone(), dim=1, p=2))


@on_ranks(2)
def test_swav_recipe_with_the_remedy():
    """Prototypes of length 1 before each step."""
    losses = []
    for model in (plain_model(), sharded_model(("full_shard", "shm"))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses.append([])
        for step in range(4):
            normalize_whole(model)
            x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH) * (step + 1)
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(float(loss))
    plain, sharded = losses
    assert sharded == pytest.approx(plain, rel=1e-5)


class Asking(nn.Linear):
    """Records whether torch would dispatch operations on its weight."""

    def forward(self, x):
        self.asked = torch.overrides.has_torch_function((self.weight,))
        self.seen = type(self.weight).__name__, self.weight.data.shape, self.weight.grad
        return super().forward(x)


@on_ranks(2)
def test_full_parameters_do_not_dispatch():
    model = FSDP(nn.Sequential(Asking(WIDTH, WIDTH)), auto_wrap_policy=None, transport="shm")
    layer = model[0]
    model(torch.ones(1, WIDTH))
    assert not layer.asked and layer.seen == ("WholeParameter", (WIDTH, WIDTH), None)
    assert torch.overrides.has_torch_function((layer.weight,))  # between forwards
    assert type(layer.weight).__name__ == "ShardParameter"
    assert torch._C._is_torch_function_enabled()
