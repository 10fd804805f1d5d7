"""What a script still holds when it ends dies while Python empties modules, and says nothing then.

Python empties the modules that were imported last first: what the script's own module holds dies
after zshard's modules have been emptied.
"""

import copy
import sys

import pytest
import torch
from models import TRANSPORTS, loss_of, make
from nursery import fork_ranks
from scenarios import Wide, floats, learn

import zshard
from zshard import FSDP

SETTINGS = {}  # of the models, in a rank


def trained(kind=torch.optim.AdamW, **options):
    model = FSDP(make(Wide), **SETTINGS)
    optimizer = kind(model.parameters(), lr=0.01, **options)
    for i in range(2):
        learn(model, optimizer, i)
    return model, optimizer


def model():
    return trained()[0]


def averages():
    held = trained()
    return zshard.EMA(held[0], 0.9), copy.deepcopy(held)


def cycles_and_hooks():
    model, optimizer = trained(zshard.AdamW)
    model.itself, optimizer.model = [model], model

    def hook(*_, held=(model, optimizer)):
        pass

    model.register_forward_hook(hook)
    optimizer.register_step_post_hook(hook)
    return torch.nn.modules.module.register_module_forward_hook(hook)


def steps_in_backward():
    model, optimizer = trained(zshard.AdamW)
    optimizer.zero_grad()
    handle = model.optimizer_in_backward(optimizer)
    loss_of(model(floats(0))).backward()
    return handle


def trace(folder):
    with zshard.profile(f"{folder}/trace.json") as traced:
        held = trained()
    return traced, held


def saves(folder):
    model, optimizer = trained()
    saved = zshard.save(f"{folder}/checkpoint", model, optimizer, asynchronous=True)
    return saved, zshard.export(model), list(zshard.export(model))


def engine():
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3},
    }
    made = zshard.initialize(model=make(Wide), config=config)
    made[0].backward(loss_of(made[0](floats(0))))
    made[0].step()
    return made


def finished(folder):
    """Objects that a script has used."""
    kinds = (torch.optim.AdamW, zshard.AdamW, zshard.AdamW8bit)
    held = [*map(trained, kinds), averages(), cycles_and_hooks(), loss_of(model()(floats(0)))]
    return [*held, steps_in_backward(), trace(folder), saves(folder), engine()]


def left_open(folder):
    """Iterators and contexts that a script has begun."""
    iterators = [
        iter(zshard.export(model(), bucket=5000)),
        zshard.whole_named_parameters(model()),
        iter(model().join([torch.ones(1)])),
    ]
    contexts = [
        FSDP.summon_full_params(model()),
        zshard.zero.GatheredParameters(list(model().parameters()), 0),
        zshard.EMA(model(), 0.9).swapped(),
        model().no_sync(),
    ]
    begun = [*map(next, iterators), *(context.__enter__() for context in contexts)]
    return iterators, contexts, begun


def holds(those, transport, folder):
    SETTINGS.update(transport=transport, timeout=30)
    vars(sys.modules["__main__"])["held"] = those(folder)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("those", [finished, left_open])
def test_exit_is_quiet(tmp_path, those, transport):
    for result in fork_ranks(holds, 2, those, transport, str(tmp_path)):
        assert not result.stderr and result.returncode == 0
