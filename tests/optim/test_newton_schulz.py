"""zshard.Muon(symmetric=True): within its bound, and the same bits under every sharding."""

import pytest
import torch
from compare import assert_same
from spawn import ranks
from torch import nn

import zshard
from zshard import FSDP
from zshard.extras.optimizers.newton_schulz import orthogonalized


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str
)
@pytest.mark.parametrize("shape", [(300, 520), (520, 300), (256, 256), (1, 7), (128, 130)])
def test_symmetric_products_change_an_update_by_less_than_the_bound(shape, dtype, bound):
    generator = torch.Generator().manual_seed(0)
    for power in (1, 9):  # singular values of about one size, and of several
        update = (torch.randn(shape, generator=generator) ** power).to(dtype)
        options = {"ns_coefficients": (3.4445, -4.7750, 2.0315), "eps": 1e-7, "ns_steps": 5}
        whole, halves = (
            orthogonalized(update.clone(), {**options, "symmetric": symmetric}).double()
            for symmetric in (False, True)
        )
        assert (halves - whole).norm() <= bound * whole.norm()


def symmetric_over(transport):
    found = []
    for strategy in ("full_shard", "no_shard"):
        torch.manual_seed(0)
        layers = nn.Linear(260, 300, bias=False), nn.Linear(300, 3)
        model = FSDP(nn.Sequential(*layers), strategy=strategy, transport=transport)
        optimizer = zshard.Muon(model, lr=0.05, ns_dtype="float32", symmetric=True)
        for step in range(2):
            x = torch.randn(4, 260, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
        found.append(model.state_dict())
    assert_same(*found, "the model")
    return found[0]


@ranks(2, 3)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_symmetric_products_of_shards(pool, transport):
    first, *others = pool.run(symmetric_over, transport)
    for each in others:
        assert_same(first, each, "the model")
