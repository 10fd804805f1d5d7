"""An optimizer whose state does not fit is refused in its first step, with numbers; advice counts it.

FSDP(...) does not know the optimizer, its first step does.
"""

import pytest
import torch
from torch import nn

import zshard
from zshard import FSDP
from zshard.memory import spare
from zshard.memory.host_limits import Allowance


def model_of(limit):
    model = FSDP(nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]), memory_limit=limit)
    model(torch.ones(1, 512)).sum().backward()
    return model


@pytest.mark.parametrize("optimizer", [zshard.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("limit", ["auto", "1GiB"])
def test_a_state_that_does_not_fit_is_refused_before_it_is_made(optimizer, limit, monkeypatch):
    model, free = model_of(limit), model_of(None)
    monkeypatch.setattr(spare, "room_of_host", lambda: Allowance(5 << 20, "", ""))
    made = optimizer(model.parameters())
    with pytest.raises(MemoryError, match=r"Adam\w* does not fit.* needs 8.0 MiB .* 5.0 MiB are"):
        made.step()
    assert len(made.state) == 0
    torch.optim.SGD(model.parameters(), 0.1).step()  # as advised
    optimizer(free.parameters()).step()
    monkeypatch.setattr(spare, "room_of_host", lambda: Allowance(9 << 20, "", ""))
    made.step()
    made.step()


def test_what_fits_fits_with_the_state():
    with pytest.warns(RuntimeWarning) as caught:
        model_of("5MiB")
    words = str(caught[0].message)
    assert "offload=zshard.Offload(directory=..., grads=True), which also puts" in words
    assert "(fits, with Adam's state)" in words
    assert "stochastic_rounding=True): 2.0 MiB (fits, but not with Adam's state, 4.0 MiB" in words
