"""What a script still holds when it ends dies while Python empties modules, and says nothing then.

Python empties the modules that were imported last first: what the script's own module holds dies
after zshard's modules have been emptied.
"""

import copy
import sys

import pytest
import torch
from models import loss_of, make
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


def optimizers():
    return [trained(each) for each in (torch.optim.AdamW, zshard.AdamW, zshard.AdamW8bit)]


def averages():
    model, optimizer = trained()
    return zshard.EMA(model, 0.9), copy.deepcopy((model, optimizer))


def cycles_and_hooks():
    model, optimizer = trained(zshard.AdamW)
    model.itself, optimizer.model = [model], model

    def hook(*_, held=(model, optimizer)):
        pass

    model.register_forward_hook(hook)
    optimizer.register_step_post_hook(hook)
    return torch.nn.modules.module.register_module_forward_hook(hook)


def graph():
    model, _ = trained()
    return loss_of(model(floats(0)))


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


def begun(iterator):
    return next(iterator), iterator


def entered(context):
    return context.__enter__(), context


def half_an_export():
    return begun(iter(zshard.export(trained()[0], bucket=5000)))


def half_the_parameters():
    return begun(zshard.whole_named_parameters(trained()[0]))


def summoned():
    return entered(FSDP.summon_full_params(trained()[0]))


def gathered():
    return entered(zshard.zero.GatheredParameters(list(trained()[0].parameters()), 0))


def swapped():
    return entered(zshard.EMA(trained()[0], 0.9).swapped())


def joined():
    return begun(iter(trained()[0].join([torch.ones(1)])))


def without_sync():
    return entered(trained()[0].no_sync())


HELD = [optimizers, averages, cycles_and_hooks, graph, steps_in_backward, trace, saves, engine]
LEFT_OPEN = [half_an_export, half_the_parameters, summoned, gathered, swapped, without_sync, joined]


def holds(those, transport, folder):
    SETTINGS.update(transport=transport, timeout=30)
    held = [each(folder) if each in (trace, saves) else each() for each in those]
    vars(sys.modules["__main__"])["held"] = held


def is_quiet(*arguments):
    for result in fork_ranks(holds, 2, *arguments):
        assert not result.stderr and result.returncode == 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("those", [HELD, LEFT_OPEN])
def test_exit_is_quiet(tmp_path, those, transport):
    is_quiet(those, transport, str(tmp_path))


@pytest.mark.thorough
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("make_them", [*HELD, *LEFT_OPEN])
def test_exit_is_quiet_with_one_thing(tmp_path, make_them, transport):
    is_quiet([make_them], transport, str(tmp_path))
