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


def plain_model():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])


def sharded_model(combination):
    strategy, transport = combination
    return FSDP(plain_model(), strategy=strategy, transport=transport, auto_wrap_policy={nn.Linear})


def with_gradients(model):
    """The same on all ranks."""
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
    model(x).square().sum().backward()
    return model


def whole(value):
    return zshard.full_tensor(value) if isinstance(value, torch.Tensor) else value


def outcome(situation, model):
    """Return (its result, the parameters after it), or the text of ShardError."""
    try:
        given = situation(model)
    except ShardError as error:
        return str(error)
    return whole(given), [whole(p.detach()) for p in model.parameters()]


def same(ours, theirs):
    if isinstance(ours, torch.Tensor):
        return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    return ours == theirs


def on_shards(name, combination):
    """Return "right", "wrong", or the error."""
    situation = getattr(situations, name)
    expected, after = outcome(situation, with_gradients(plain_model()))
    found = outcome(situation, with_gradients(sharded_model(combination)))
    if isinstance(found, str):
        return found
    equal = [same(a, b) for a, b in zip(found[1], after, strict=True)]
    return "right" if same(found[0], expected) and all(equal) else "wrong"


def alone(name, combinations):
    return {combination: on_shards(name, combination) for combination in combinations}


SHARDED = [combination for combination in COMBINATIONS if combination[0] != "no_shard"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [each.__name__ for each in situations.RIGHT])
def test_elementwise_code_is_correct(pool2, name):
    for found in pool2.run(alone, name, COMBINATIONS):
        assert found == dict.fromkeys(COMBINATIONS, "right")


@pytest.mark.parametrize("name", [each.__name__ for each in situations.REFUSED])
def test_other_code_is_refused_with_parameter_and_remedy(pool2, name):
    by_rank = pool2.run(alone, name, SHARDED)
    for combination in SHARDED:
        texts = [found[combination] for found in by_rank]
        # Over shm rank 1 has no elements, so torch returns before it draws.
        if (name, combination[1]) == ("orthogonal", "shm"):
            texts.remove("wrong")
        for said in texts:
            assert "of '" in said and "shard" in said, (combination, said)
            remedies = ("full_tensor", "summon_full_params", "named_norms", "WholeMatrix")
            assert any(remedy in said for remedy in remedies), (combination, said)
            assert "to_local" not in said, "this rank's elements alone give something else"


@pytest.mark.parametrize("name", ["rows_of_length_one", "renorm", "row_norms", "trust_ratio"])
def test_error_of_a_norm_names_the_remedy(pool2, name):
    for found in pool2.run(alone, name, SHARDED):
        for said in found.values():
            assert "with FSDP.summon_full_params(model):" in said and "named_norms" in said


@pytest.mark.parametrize("name", ["row_norms", "vector", "penalty", "gram", "adafactor"])
def test_unsharded_parameters_are_not_guarded(pool2, name):
    for found in pool2.run(on_shards, name, ("no_shard", "shm")):
        assert found == "right"


@torch.no_grad()
def normalize_whole(model):
    with FSDP.summon_full_params(model):
        model[2].weight.copy_(nn.functional.normalize(model[2].weight.clone(), dim=1, p=2))


@on_ranks(2)
def test_swav_recipe_with_the_remedy():
    """Return losses of SwAV's recipe: prototypes of length 1 before each step."""
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


def questions_about_whole_parameters():
    model = FSDP(nn.Sequential(Asking(WIDTH, WIDTH)), auto_wrap_policy=None, transport="shm")
    model(torch.ones(1, WIDTH))
    between = torch.overrides.has_torch_function((model[0].weight,))
    why = type(model[0].weight).__name__, torch._C._is_torch_function_enabled()
    return model[0].asked, model[0].seen, between, why


def test_full_parameters_do_not_dispatch(pool2):
    seen = "WholeParameter", (WIDTH, WIDTH), None
    expected = (False, seen, True, ("ShardParameter", True))
    for found in pool2.run(questions_about_whole_parameters):
        assert found == expected
