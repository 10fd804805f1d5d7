"""zshard.load_state_dict: from every rank's state, or from rank 0's alone.

The result is bit-identical to plain torch's with the same state, and training continues in the same
way. Mismatches are the same error on all ranks, and change nothing.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from groups import mesh_of
from models import CASES, COMBINATIONS, TRANSPORTS, Net, make, train, wrapped
from rows import all_rows
from scenario import sharded
from scenarios import Stack, loss_of, message_of
from spawn import on_ranks
from torch import nn

import zshard
from benchmarks.memory import high_water, reset_high_water, trim
from zshard import FSDP, MixedPrecision

LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def load_from_rank_0(model, state, **options):
    """Load values that rank 0 alone passes."""
    own = state if dist.get_rank() == 0 else None
    return zshard.load_state_dict(model, own, from_rank0=True, **options)


def state_of(build, seed=7):
    """Return a plain model's state; its integers differ from a new model's."""
    state = make(build, seed).state_dict()
    return type(state)((k, v + 3 if not v.is_floating_point() else v) for k, v in state.items())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("from_rank0", [True, False])
@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("name", ["net", "odds", "tied", "frozen", "dtypes", "conv", "recurrent"])
@on_ranks(2, 3)
def test_values_equal_the_state(name, combination, from_rank0):
    """Also those of tensors that are views, not contiguous."""
    model, state = sharded(name, combination), state_of(CASES[name].make)
    for _ in range(2):  # a second load gives the same
        keys = (load_from_rank_0 if from_rank0 else zshard.load_state_dict)(model, state)
        assert keys.missing_keys == keys.unexpected_keys == []
        assert_same(model.state_dict(), state, "the model")
        state = {key: torch.stack([value, value], -1)[..., 0] for key, value in state.items()}


@pytest.mark.parametrize("from_rank0", [True, False])
@pytest.mark.parametrize("precision", [None, LOW])
def test_single_rank(from_rank0, precision):
    model, state = FSDP(make(Net), mixed_precision=precision), state_of(Net)
    model(torch.zeros(1, 1, dtype=torch.int64))
    zshard.load_state_dict(model, state, from_rank0=from_rank0)
    assert_same(model.state_dict(), state, "the model")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize(
    ("strategy", "transport", "precision"),
    [
        ("full_shard", "shm", LOW),
        ("shard_grad_op", "c10d", LOW),
        ("no_shard", "c10d", LOW),
        ("zero1", "c10d", None),
        ("zero1", "c10d", LOW),
        ("hybrid_shard", "c10d", None),
        ("hybrid_full", "c10d", None),
    ],
)
@on_ranks(2, 4)
def test_training_continues(strategy, transport, precision, in_backward):
    """As after a load by nn.Module's method."""
    states, state, case = [], state_of(Net), CASES["net"]
    options = {"auto_wrap_policy": case.policy, "mixed_precision": precision}
    if strategy.startswith("hybrid"):
        options["device_mesh"] = mesh_of(dist.get_world_size() // 2, 2)
    for load in (load_from_rank_0, lambda model, state: model.load_state_dict(state)):
        model = FSDP(make(Net), strategy=strategy, transport=transport, **options)
        optimizer = zshard.AdamW(model.parameters(), lr=0.01)
        if in_backward:
            model.optimizer_in_backward(optimizer)
        train(model, case, optimizer, dist.get_rank(), 2)
        load(model, state)
        train(model, case, optimizer, dist.get_rank(), 2)
        states.append(copy.deepcopy(model.state_dict()))
    assert_same(*states, "the model")


@on_ranks(2)
def test_units_within():
    """Units by hand below a plain module; and a model whose outer part is wrapped later."""
    state = state_of(Stack)
    model = make(Stack)
    for block in model.blocks:
        FSDP(block)
    load_from_rank_0(model, state)
    assert_same(model.state_dict(), state, "the model")
    outer = FSDP(model)
    load_from_rank_0(outer, state_of(Stack, 8))
    assert_same(outer.state_dict(), state_of(Stack, 8), "the outer model")


@on_ranks(2)
def test_dtypes_are_cast():
    """Cast as nn.Module casts."""
    model, plain = wrapped(Net, ("full_shard", "shm")), make(Net)
    state = {name: value.double() for name, value in state_of(Net).items()}
    load_from_rank_0(model, state)
    plain.load_state_dict(state)
    assert_same(model.state_dict(), plain.state_dict(), "the model")
    state = {name: value.bfloat16() for name, value in state.items()}
    zshard.load_state_dict(model, state)
    plain.load_state_dict(state)
    assert_same(model.state_dict(), plain.state_dict(), "the model")


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_peak_memory_is_a_few_chunks(transport):
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(8)])
    model = FSDP(model, transport=transport, auto_wrap_policy={nn.Linear})
    model.load_state_dict(model.state_dict())  # touch all its pages
    state = model.state_dict()
    if dist.get_rank():
        state = None
    load_from_rank_0(model, state)
    trim()
    reset_high_water()
    before = high_water()
    load_from_rank_0(model, state)
    extra = high_water() - before
    whole = 8 * 2048 * 2048 * 4
    assert extra < 48 * 2**20 < whole / 2


# --- mismatches -----------------------------------------------------------------------------------


HEAD, BIAS = "head.weight", "head.bias"


def of_head(name, change):
    """Return a function of a state that changes an entry of the head."""
    return lambda state: state.update({f"head.{name}": change(state[f"head.{name}"])})


WRONG = {  # changes to rank 0's state, by the words of the error
    RuntimeError: {
        'Missing key(s) in state_dict: "head.bias"': lambda state: state.pop("head.bias"),
        'Unexpected key(s) in state_dict: "more"': lambda state: state.update(more=torch.ones(3)),
        "for head.weight: copying a param with shape torch.Size([9, 2])": of_head(
            "weight", lambda _: torch.ones(9, 2)
        ),
        "for head.weight: copying a param with shape torch.Size([18])": of_head(
            "weight", torch.Tensor.flatten
        ),
        "mismatch for head.weight: cannot cast torch.int64 from": of_head(
            "weight", torch.Tensor.long
        ),
        "mismatch for head.bias: cannot cast torch.complex64 from": of_head(
            "bias", torch.Tensor.cfloat
        ),
        'copying the parameter named "head.bias", expected torch.Tensor': of_head("bias", list),
    },
    TypeError: {
        "'head.weight' in the state dict must be a plain strided tensor": of_head(
            "weight", torch.Tensor.to_sparse
        ),
        "'head.weight' in the state dict is on the meta device": of_head(
            "weight", lambda value: value.to("meta")
        ),
        "state must be a mapping from names to tensors, got list": lambda state: [1, 2],
        "state dict keys must be strings, got 3": lambda state: state.update({3: torch.ones(2)}),
    },
    Exception: {"lambda": lambda state: state.update(extra=lambda: 0)},  # it cannot be pickled
}


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_mismatches_are_errors_on_all_ranks(combination):
    model = wrapped(Stack, combination)
    before = copy.deepcopy(model.state_dict())
    with all_rows() as row:
        for kind, table in WRONG.items():
            for words, spoil in table.items():
                state = state_of(Stack)
                result = spoil(state)
                state = result if isinstance(result, list) else state
                with row(words):
                    assert words in message_of(
                        lambda state=state: load_from_rank_0(model, state), kind
                    )
                    assert_same(model.state_dict(), before, "the refused model")
    with pytest.raises(ValueError, match="pass None on all ranks but 0"):
        zshard.load_state_dict(model, before, from_rank0=True)
    load_from_rank_0(model, state_of(Stack))
    assert_same(model.state_dict(), state_of(Stack), "the model")


@on_ranks(2)
def test_all_problems_are_listed_on_every_rank():
    """Including those on one rank alone."""
    model, rank = wrapped(Stack, ("full_shard", "shm")), dist.get_rank()
    before, state = copy.deepcopy(model.state_dict()), state_of(Stack)
    if rank == 1:
        del state["blocks.0.up.bias"]
        state["more"] = state.pop(BIAS)
        state[HEAD] = state[HEAD].int()
    text = message_of(lambda: zshard.load_state_dict(model, state), RuntimeError)
    assert text.startswith("Error(s) in loading" if rank == 1 else "rank 1: Error(s) in loading")
    missing = 'Missing key(s) in state_dict: "blocks.0.up.bias", "head.bias"'
    assert all(words in text for words in (missing, '"more"', "int32"))
    part = {BIAS: torch.ones(2), "x": torch.ones(1)}
    keys = load_from_rank_0(model, part, strict=False)
    before[BIAS].fill_(1.0)
    assert_same(model.state_dict(), before, "the model")
    assert len(keys.missing_keys) == len(before) - 1 and keys.unexpected_keys == ["x"]


def test_model_without_units_is_refused():
    with pytest.raises(ValueError, match="this Net has no sharded module"):
        zshard.load_state_dict(make(Net), {})


@on_ranks(2)
def test_ranks_that_would_load_different_tensors():
    """A load hook replaces a tensor on one rank."""
    model = wrapped(Stack, ("full_shard", "shm"))

    def other(state, prefix, *_):
        state[BIAS] = state["more"] if dist.get_rank() == 1 else state[BIAS]
        del state["more"]

    model._register_load_state_dict_pre_hook(other)
    words = "^rank 1 loads other tensors than rank 0: load the same\n"
    with pytest.raises(zshard.DivergenceError, match=words):
        load_from_rank_0(model, {**state_of(Stack), "more": torch.ones(2)})


# --- hooks and extra state ------------------------------------------------------------------------


class Extra(nn.Linear):
    """It has extra state, an old name, and a post hook."""

    def __init__(self):
        super().__init__(5, 3)
        self.seen, self.note = [], "none"
        self.register_load_state_dict_post_hook(Extra.after)

    def get_extra_state(self):
        return {"note": self.note, "numbers": torch.arange(3)}

    def set_extra_state(self, state):
        self.note = state["note"]

    def after(self, keys):
        self.seen.append((self.note, zshard.shard_info(self.weight) is not None, keys.missing_keys))

    def _load_from_state_dict(self, state_dict, prefix, *args):
        if prefix + "old" in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "old")
        super()._load_from_state_dict(state_dict, prefix, *args)


@on_ranks(2)
def test_extra_state_and_post_hooks_come_last():
    model, plain = wrapped(lambda: nn.Sequential(Extra(), Extra()), ("full_shard", "shm")), Extra()
    plain.note = "from rank 0"
    state = {f"{i}.{name}": value for i in range(2) for name, value in plain.state_dict().items()}
    state["0.old"] = state.pop("0.weight")
    with pytest.raises(RuntimeError, match=r"size mismatch for 1.bias"):
        load_from_rank_0(model, {**state, "1.bias": torch.ones(4)})
    assert [(each.note, each.seen) for each in model] == [("none", [])] * 2
    load_from_rank_0(model, state)
    loaded = model.state_dict()
    for i, part in enumerate(model):
        assert_same(loaded[f"{i}.weight"], plain.weight, "a weight")
        assert (part.note, part.seen) == ("from rank 0", [("from rank 0", True, [])])


@on_ranks(2)
def test_hook_that_reads_values():
    model, state = wrapped(Stack, ("full_shard", "shm")), state_of(Stack)

    def double(state, prefix, *_):
        state[prefix + "weight"] = state[prefix + "weight"] * 2

    model.head._register_load_state_dict_pre_hook(double)
    zshard.load_state_dict(model, state)
    assert_same(model.state_dict()[HEAD], state[HEAD] * 2, "the head")
    text = message_of(lambda: load_from_rank_0(model, state))
    assert "cannot call mul() on 'head.weight', whose values are read only after all" in text


@on_ranks(2)
def test_old_versions_of_modules():
    """nn.Module's own old versions: no counter, and no `_metadata` with a version."""
    state = state_of(CASES["conv"].make)
    old = {k: v for k, v in state.items() if not k.endswith("num_batches_tracked")}
    model = sharded("conv", ("full_shard", "shm"))
    load_from_rank_0(model, old)
    ours = model.state_dict()
    assert_same({key: ours[key] for key in old}, old, "the model")
    assert loss_of(model(CASES["conv"].batch(0, 0))).isfinite()


@on_ranks(2)
def test_ranks_stay_in_step_after_one_refused_its_extra_state():
    model = FSDP(Extra())
    state = model.state_dict()
    if dist.get_rank() == 1:
        state["_extra_state"] = {}
    with pytest.raises((KeyError, RuntimeError), match="note"):
        zshard.load_state_dict(model, state)
    model(torch.ones(2, 5)).sum().backward()
