"""Every reader and writer of a model's values, in every state that the model can be in.

Each cell is a plain model's result, also after the state has ended, or an error that says when to
call instead. TABLE lists the errors; everything else is right.
"""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
import torch.distributed as dist
from compare import differences
from models import COMBINATIONS
from readers import READERS, WRITERS, Case, after_more_steps, gradients
from scenarios import floats
from spawn import on_ranks

from zshard import FSDP

# --- states: functions of a case that call act() in one ------------------------------------------------


def at_rest(case, act):
    act()


def in_forward(case, act):
    with case.hook(case.model.blocks[1], act):
        case.model(floats(1))


def before_forward(case, act):
    with case.hook(case.model.blocks[1], act, "register_forward_pre_hook"):
        case.model(floats(1))


def in_backward(case, act):
    out = case.model(floats(1))
    out.register_hook(lambda _: act())
    out.sum().backward()


def after_accumulation(case, act):
    weight, backward = case.model.blocks[1].up.weight, case.model(floats(1)).sum().backward
    with case.hook(weight, act, "register_post_accumulate_grad_hook"):
        backward()


def between_micro_batches(case, act):
    act()
    if case.reader not in WRITERS:
        case.model(floats(1)).sum().backward()


def before_step(case, act):
    with case.hook(case.optimizer, act, "register_step_pre_hook"):
        case.optimizer.step()


def after_step(case, act):
    with case.hook(case.optimizer, act, "register_step_post_hook"):
        case.optimizer.step()


def after_a_failed_step(case, act):
    group = case.optimizer.param_groups[1]
    betas, group["betas"] = group["betas"], None
    with pytest.raises(TypeError, match="unpack"):
        case.optimizer.step()  # which has stepped the first group
    group["betas"] = betas
    act()


def write(model):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2).add_(1)


def summoned(case, act, writeback=True):
    before = [p.detach().clone() for p in case.parameters()]
    with case.unless_plain(FSDP.summon_full_params(case.model, writeback=writeback)):
        write(case.model)
        act()
    if case.is_plain and not writeback:
        case.set(before)


def summoned_for_now(case, act):
    summoned(case, act, writeback=False)


def summoned_on_rank_0(case, act):
    full = FSDP.summon_full_params(case.model, writeback=False, rank0_only=True)
    with case.unless_plain(full):
        act()


def unsharded_by_hand(case, act):
    if case.is_plain:
        return act()
    case.model.blocks[1].unshard()
    act()
    return case.model.blocks[1].reshard()


def swapped(case, act, calls=False):
    before = [p.detach().clone() for p in case.parameters()]
    if case.is_plain:
        case.set(case.averages.values())
    with contextlib.nullcontext() if case.is_plain else case.ema.swapped():
        if calls:
            case.model(floats(1))
        act()
    if case.is_plain:
        case.set(before)


def swapped_and_called(case, act):
    swapped(case, act, calls=True)


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


def in_inference_mode(case, act):
    with torch.inference_mode():
        act()


STATES = [
    *(at_rest, before_forward, in_forward, in_backward, after_accumulation, between_micro_batches),
    *(before_step, after_step, after_a_failed_step, summoned, summoned_for_now, summoned_on_rank_0),
    *(unsharded_by_hand, swapped, swapped_and_called, kept_for_backward, after_a_failure),
    *(within_no_sync, in_inference_mode),
]
WITHIN_A_PASS = (before_forward, in_forward, in_backward, after_accumulation)
"""States in which a plain model may not be written to or called."""
WITHIN_A_STEP = (before_step, after_step)

GRADIENTS = {"gradients", "norms_of_gradients", "named_gradients", "summon_with_gradients"}

LOADS = {"load", "load_part", "load_from_rank_0", "dcp_load", "load_checkpoint", "load_all"}
LOADS_OF_OPTIMIZERS = {"load_optimizer", "load_optimizer_by_name", "load_optimizer_by_torch"}
SAVES = {"export", "export_to_folder", "save", "save_all"}
COPIES = {"deepcopy", "deepcopy_unit"}
AVERAGES = {"averages", "update_averages"}
WRITES = {"write_in_place", "write_data", "write_detached"}
BETWEEN_STEPS = {*SAVES, *COPIES, *AVERAGES, *LOADS_OF_OPTIMIZERS, "step", "summon_with_gradients"}
IN_A_PASS = {*SAVES, *COPIES, "deepcopy_part", *AVERAGES, "summon"}
CALLS = {**READERS, **WRITERS}
ALL = set(CALLS)

TABLE = {
    "before_forward": {*IN_A_PASS, "summon_with_gradients"},
    "in_forward": {*IN_A_PASS, "summon_with_gradients"},
    "in_backward": IN_A_PASS,
    "after_accumulation": IN_A_PASS,
    "summoned": {*BETWEEN_STEPS, *LOADS, "deepcopy_part"},
    "summoned_for_now": {*BETWEEN_STEPS, *LOADS, "deepcopy_part"},
    "unsharded_by_hand": {*BETWEEN_STEPS, *WRITES},
    "swapped": {*LOADS, *AVERAGES, "save_all", "step"},
    "within_no_sync": {"clip", "unscale", "norms_of_gradients", "step"},
}
"""Calls that are refused for sharded parameters, by state; all others are right."""
MAY = {
    "before_step": ALL,  # over shm, where peers read the memory that is written
    "after_step": ALL,
    "summoned_on_rank_0": ALL,  # on the other ranks
    "swapped_and_called": {*TABLE["swapped"], *WRITES},  # where the forward has left units full
    "kept_for_backward": WRITES,
    "after_a_failure": WRITES,
}
"""The same, but for some combinations and ranks only."""
SAY_WHEN = re.compile(r"cannot .*|.*(before|outside|after|leave).*")

# --- cells --------------------------------------------------------------------------------------------


def is_possible(state, reader):
    """Return whether a script may do so with a plain model."""
    if state in WITHIN_A_STEP and reader == "step":
        return False
    if state is summoned_on_rank_0 and reader in WRITERS:
        return False  # which ranks would do unlike things
    if state is after_accumulation and reader in GRADIENTS:
        return False  # these hooks run at the end of backward, when all gradients are there
    return not (state in WITHIN_A_PASS and (reader in WRITERS or reader == "forward"))


def changes(reader, state):
    return reader in (*WRITERS, "update_averages", "summon") or state in WITHIN_A_STEP


def any_rank(found):
    """Return whether something was found on a rank."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, bool(found))
    return any(everyone)


def outcome(case, reader, state):
    """Return the reader's tensors in the state, if any, the model's values after it, and errors.
    Without a reader, there is the state alone."""
    case.reader, found, said = reader, [None, None], []

    def act():
        try:
            got = CALLS[reader](case) if reader else None
            if isinstance(got, dict):
                found[0] = {name: tensor.clone() for name, tensor in got.items()}
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")

    for call in (lambda: state(case, act), lambda: found.__setitem__(1, after(case))):
        try:
            call()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        if said if case.is_plain else any_rank(said):
            break
    return *found, said


def after(case):
    return {**case.model.state_dict(), "gradients": gradients(case)}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
@on_ranks(2)
def test_each_reader_is_right_or_says_when_to_call(state, combination, tmp_path):
    """A reader that has changed nothing leaves its models to the next one."""
    refused, wrong, both = set(), {}, None
    later = after_more_steps(combination, tmp_path)
    for reader in CALLS:
        if not is_possible(state, reader):
            continue
        if both is None:
            case = Case(combination, tmp_path, later)
            both = case, Case(None, tmp_path, later, case.averages)
        case, plain = both
        got, left, said = outcome(case, reader, state)
        want, expected, failed = outcome(plain, reader, state)
        assert not failed, failed
        if said:
            refused.add(reader)
            if len(said) > 1 or not SAY_WHEN.search(said[0]):
                wrong[reader] = said
        if any_rank(said):
            both = None
            continue
        bad = differences(left, expected)
        bad += [] if got is None or want is None else differences(got, want)
        if bad:
            wrong[reader] = bad
        if changes(reader, state) or any_rank(bad):
            case.learn()  # the ranks are in step
            both = None
    assert wrong == {}
    name = state.__name__
    if combination[0] == "no_shard" or name in MAY:
        assert refused <= {**TABLE, **MAY}.get(name, set())
    else:
        assert refused == TABLE.get(name, set())


# --- one rank alone -----------------------------------------------------------------------------------

ALONE = [
    *(
        "state_dict",
        "unit_state_dict",
        "part_state_dict",
        "typed_state_dict",
        "torch_save",
        "export",
    ),
    *("full_tensor", "named_values", "forward", "optimizer_state", "optimizer_state_by_name"),
]
MOMENTS = [at_rest, kept_for_backward, within_no_sync, after_a_failure, swapped]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("combination", [c for c in COMBINATIONS if c[1] == "shm"])
@pytest.mark.parametrize("state", MOMENTS, ids=lambda state: state.__name__)
@on_ranks(2)
def test_one_rank_alone_reads_what_a_plain_model_has(state, combination, rank, tmp_path):
    wrong, later = {}, after_more_steps(combination, tmp_path)
    case = Case(combination, tmp_path, later)
    plain = Case(None, tmp_path, later, case.averages)
    for reader in ALONE:
        got, left, said = outcome(case, reader if dist.get_rank() == rank else None, state)
        want, expected, _ = outcome(plain, reader, state)
        bad = said or differences(left, expected)
        bad += [] if got is None else differences(got, want)
        if bad:
            wrong[reader] = bad
        for each in (case, plain):
            each.optimizer.zero_grad()
            each.learn()
            each.model(floats(1)).sum().backward()
    assert wrong == {}
