"""Every reader and writer of a model's values, in every state that the model can be in.

Each cell is what a plain model gives, also after the state has ended, or an error that says when to
call instead. TABLE lists the errors; everything else is right.
"""

from __future__ import annotations

import contextlib
import copy
import io
import re

import pytest
import torch
import torch.distributed as dist
from compare import differences
from models import COMBINATIONS, make, wrapped
from scenarios import Stack, floats
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import zshard
from zshard import FSDP

# --- readers and writers: functions of a case, whose result is compared -------------------------------


def state_dict(case):
    return case.model.state_dict()


def unit_state_dict(case):
    return case.model.blocks[0].state_dict()


def part_state_dict(case):
    return {**case.model.blocks.state_dict(), **case.model.blocks[1].up.state_dict()}


def typed_state_dict(case):
    if case.is_plain:
        return case.model.state_dict()
    with FSDP.state_dict_type(case.model, "FULL_STATE_DICT"):
        return case.model.state_dict()


def dcp_state_dict(case):
    return get_model_state_dict(case.model)


def torch_save(case):
    file = io.BytesIO()
    torch.save(case.model.state_dict(), file)
    return torch.load(io.BytesIO(file.getvalue()))


def export(case):
    if case.is_plain:
        return case.model.state_dict()
    return {name: t for bucket in zshard.export(case.model) for name, t in bucket.items()}


def full_tensor(case):
    with torch.no_grad():
        return {n: zshard.full_tensor(p) for n, p in case.model.named_parameters()}


def summon(case):
    with contextlib.nullcontext() if case.is_plain else FSDP.summon_full_params(case.model):
        return {n: p.detach().clone() for n, p in case.model.named_parameters()}


def deepcopy(case):
    return copy.deepcopy(case.model).state_dict()


def save(case):
    if not case.is_plain:
        zshard.save(f"{case.folder}/saved", case.model)
        zshard.load(f"{case.folder}/saved", case.model)
    return case.model.state_dict()


def averages(case):
    if case.is_plain:
        return case.averages
    return case.ema.state_dict()


def update_averages(case):
    if not case.is_plain:
        case.ema.update()
    return {}


def forward(case):
    with torch.no_grad():
        return {"out": case.model(floats(1))}


def gradients(case):
    grads = {n: p.grad for n, p in case.model.named_parameters() if p.grad is not None}
    return grads if case.is_plain else {n: zshard.full_tensor(g) for n, g in grads.items()}


def optimizer_state(case):
    state = case.optimizer.state_dict()["state"]
    return {f"{n}.{key}": t for n, entries in state.items() for key, t in entries.items()}


def optimizer_state_by_name(case):
    if case.is_plain:
        return optimizer_state(case)
    state = zshard.optim_state_dict(case.model, case.optimizer)["state"]
    return {f"{n}.{k}": t for n, own in enumerate(state.values()) for k, t in own.items()}


def load(case):
    case.model.load_state_dict(case.other)
    return {}


def load_part(case):
    head = {n[5:]: t for n, t in case.other.items() if n.startswith("head.")}
    case.model.head.load_state_dict(head)
    return {}


def load_from_rank_0(case):
    if case.is_plain:
        return load(case)
    zshard.load_state_dict(
        case.model, case.other if dist.get_rank() == 0 else None, from_rank0=True
    )
    return {}


def dcp_load(case):
    set_model_state_dict(case.model, case.other)
    return {}


def load_optimizer(case):
    case.optimizer.load_state_dict(case.other_optimizer)
    return optimizer_state(case)


def step(case):
    case.optimizer.step()
    return {}


READERS = [
    *(state_dict, unit_state_dict, part_state_dict, typed_state_dict, dcp_state_dict, torch_save),
    *(export, full_tensor, summon, deepcopy, save, averages, update_averages, forward, gradients),
    *(optimizer_state, optimizer_state_by_name),
    *(load, load_part, load_from_rank_0, dcp_load, load_optimizer, step),
]

# --- states: functions of a case that call act() in one ------------------------------------------------


def at_rest(case, act):
    act()


def in_forward(case, act):
    with case.hook(case.model.blocks[1], act):
        case.model(floats(1))


def in_backward(case, act):
    out = case.model(floats(1))
    out.register_hook(lambda _: act())
    out.sum().backward()


def write(model):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2).add_(1)


def summoned(case, act, writeback=True):
    before = [p.detach().clone() for p in case.model.parameters()]
    full = FSDP.summon_full_params(case.model, writeback=writeback)
    with contextlib.nullcontext() if case.is_plain else full:
        write(case.model)
        act()
    if case.is_plain and not writeback:
        case.set(before)


def summoned_for_now(case, act):
    summoned(case, act, writeback=False)


def unsharded_by_hand(case, act):
    if case.is_plain:
        return act()
    case.model.blocks[1].unshard()
    act()
    return case.model.blocks[1].reshard()


def swapped(case, act):
    before = [p.detach().clone() for p in case.model.parameters()]
    if case.is_plain:
        case.set(case.averages.values())
    with contextlib.nullcontext() if case.is_plain else case.ema.swapped():
        act()
    if case.is_plain:
        case.set(before)


def kept_for_backward(case, act):
    out = case.model(floats(1))
    act()
    if case.reader not in WRITERS:
        out.sum().backward()


def after_a_failure(case, act):
    def fail():
        raise ValueError("stumbled")

    with case.hook(case.model.blocks[2], fail), pytest.raises(ValueError, match="stumbled"):
        case.model(floats(1))
    act()


def within_no_sync(case, act):
    case.optimizer.zero_grad()
    with contextlib.nullcontext() if case.is_plain else case.model.no_sync():
        case.model(floats(1)).sum().backward()
        act()


STATES = [
    *(at_rest, in_forward, in_backward, summoned, summoned_for_now, unsharded_by_hand, swapped),
    *(kept_for_backward, after_a_failure, within_no_sync),
]
WRITERS = (load, load_part, load_from_rank_0, dcp_load, load_optimizer, step, save)
WITHIN_A_PASS = (in_forward, in_backward)  # where a plain model may not be written to or called

LOADS = {"load", "load_part", "load_from_rank_0", "dcp_load", "save"}
BETWEEN_STEPS = {"export", "averages", "update_averages", "step", "load_optimizer", "deepcopy"}

TABLE = {
    "in_forward": {"deepcopy", "export", "summon", "averages", "update_averages"},
    "in_backward": {"averages", "update_averages"},
    "summoned": {*BETWEEN_STEPS, *LOADS},
    "summoned_for_now": {*BETWEEN_STEPS, *LOADS},
    "unsharded_by_hand": {*BETWEEN_STEPS, "save"},
    "swapped": {*LOADS, "averages", "update_averages", "step"},
    "within_no_sync": {"step"},
}
"""What is refused of sharded parameters, by state; everything else is right."""
SAY_WHEN = re.compile(r"cannot .*|.*(before|outside|after).*")

# --- cells --------------------------------------------------------------------------------------------


class Case:
    """A model after a step of training, with its optimizer and averages."""

    def __init__(self, combination, folder="", averages=None):
        self.is_plain, self.reader = combination is None, None
        self.model = make(Stack) if combination is None else wrapped(Stack, combination)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.ema = None if combination is None else zshard.EMA(self.model, 0.5)
        self.folder, self.averages = folder, averages
        self.learn()
        if self.ema is not None:
            self.ema.update()
            self.averages = self.ema.state_dict()
        self.other = {n: t + 1 for n, t in self.model.state_dict().items()}
        self.other_optimizer = copy.deepcopy(self.optimizer.state_dict())
        self.model(floats(1)).sum().backward()

    def learn(self):
        self.model(floats(1)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def set(self, values):
        with torch.no_grad():
            for param, value in zip(self.model.parameters(), values, strict=True):
                param.copy_(value)

    @contextlib.contextmanager
    def hook(self, module, act):
        handle = module.register_forward_hook(lambda *_: act())
        yield
        handle.remove()


def outcome(case, reader, state):
    """Return what the reader gives in the state, and its error."""
    case.reader, found, said = reader, [{}], []

    def act():
        try:
            got = case.reader(case)
            found[0] = {n: t.clone() for n, t in got.items()} if case.is_plain else got
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")

    state(case, act)
    return found[0], said


def cells(state, combination, folder):
    """Return the readers that are refused, and those that are wrong.

    A reader that has changed nothing leaves its models to the next one.
    """
    refused, wrong, both = set(), {}, None
    for reader in READERS:
        if state in WITHIN_A_PASS and (reader in WRITERS or reader is forward):
            continue
        if both is None:
            case = Case(combination, folder)
            both = case, Case(None, averages=case.averages)
        case, plain = both
        got, said = outcome(case, reader, state)
        want, failed = outcome(plain, reader, state)
        assert not failed, failed
        if said:
            refused.add(reader.__name__)
            both = None
            if len(said) > 1 or not SAY_WHEN.search(said[0]):
                wrong[reader.__name__] = said
            continue
        bad = differences(got, want)
        bad += differences(case.model.state_dict(), plain.model.state_dict())
        if bad:
            wrong[reader.__name__] = bad
        if reader in (*WRITERS, update_averages, summon):
            case.learn()  # the ranks are in step
            both = None
    return refused, wrong


@pytest.mark.sampled(6)
@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_each_reader_is_right_or_says_when_to_call(pool2, tmp_path, state, combination):
    for refused, wrong in pool2.run(cells, state, combination, str(tmp_path)):
        assert wrong == {}
        if combination[0] == "no_shard":
            assert refused <= TABLE.get(state.__name__, set())
        else:
            assert refused == TABLE.get(state.__name__, set())
