"""zshard.load_state_dict: from every rank's state, or from rank 0's alone.

The result is bit-identical to plain torch's with the same state, and training continues in the same
way. Mismatches are the same error on all ranks, and change nothing.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from groups import mesh_of
from models import CASES, COMBINATIONS, TRANSPORTS, Net, differences, make, sharded, train, wrapped
from scenarios import Stack, loss_of, message_of
from spawn import on_ranks, ranks
from torch import nn

import zshard
from benchmarks.memory import high_water, reset_high_water, trim
from zshard import FSDP, MixedPrecision

LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def given_to(rank, state):
    """Return the argument of `rank` for load_state_dict(from_rank0=True)."""
    return state if rank == 0 else None


def state_of(build, seed=7):
    """Return a plain model's state; its integers differ from a new model's."""
    state = make(build, seed).state_dict()
    return type(state)((k, v + 3 if not v.is_floating_point() else v) for k, v in state.items())


def loaded(name, combination, from_rank0):
    """Return what differs from the state that was loaded; a second load gives the same."""
    model, rank = sharded(name, combination), dist.get_rank()
    state = state_of(CASES[name].make)
    given = given_to(rank, state) if from_rank0 else state
    for _ in range(2):
        keys = zshard.load_state_dict(model, given, from_rank0=from_rank0)
        assert keys.missing_keys == keys.unexpected_keys == []
    return differences(model.state_dict(), state)


@pytest.mark.sampled(2)
@ranks(2, 3)
@pytest.mark.parametrize("from_rank0", [True, False])
@pytest.mark.parametrize("name", ["net", "odds", "tied", "frozen", "dtypes", "conv", "recurrent"])
def test_values_equal_the_state(pool, name, from_rank0):
    for combination in COMBINATIONS:
        found = pool.run(loaded, name, combination, from_rank0)
        assert found == [[]] * pool.world, combination


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_views(transport):
    """Rank 0 has views that are not contiguous although they have one dimension."""
    model = FSDP(nn.LayerNorm(64), transport=transport, timeout=20)
    state = {"weight": torch.arange(128.0)[::2], "bias": torch.ones(1).expand(64)}
    zshard.load_state_dict(model, given_to(dist.get_rank(), state), from_rank0=True)
    assert differences(model.state_dict(), state) == []


def continued(strategy, options, in_backward):
    """Return what differs, after some training, from a model that nn.Module's method loaded."""
    states, state, case = [], state_of(Net), CASES["net"]
    for streamed in (False, True):
        model = FSDP(make(Net), strategy=strategy, auto_wrap_policy=case.policy, **options())
        optimizer = zshard.AdamW(model.parameters(), lr=0.01)
        if in_backward:
            model.optimizer_in_backward(optimizer)
        train(model, case, optimizer, dist.get_rank(), 2)
        if streamed:
            zshard.load_state_dict(model, given_to(dist.get_rank(), state), from_rank0=True)
        else:
            model.load_state_dict(state)
        train(model, case, optimizer, dist.get_rank(), 2)
        states.append(copy.deepcopy(model.state_dict()))
    return differences(*states)


def over_c10d():
    return {"transport": "c10d"}


def over_shm_low():
    return {"transport": "shm", "mixed_precision": LOW}


def over_c10d_low():
    return {"transport": "c10d", "mixed_precision": LOW}


def on_a_mesh():
    return {"device_mesh": mesh_of(2, 2), "transport": "c10d"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("full_shard", over_shm_low),
        ("shard_grad_op", over_c10d_low),
        ("no_shard", over_c10d_low),
        ("zero1", over_c10d),
        ("zero1", over_c10d_low),
    ],
)
def test_training_continues(pool2, strategy, options, in_backward):
    assert pool2.run(continued, strategy, options, in_backward) == [[], []]


@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_full"])
def test_training_continues_in_groups(pool4, strategy):
    assert pool4.run(continued, strategy, on_a_mesh, False) == [[]] * 4


@on_ranks(2)
def test_units_within():
    """Units by hand below a plain module; and a model whose outer part is wrapped later."""
    state = state_of(Stack)
    model = make(Stack)
    for block in model.blocks:
        FSDP(block)
    zshard.load_state_dict(model, given_to(dist.get_rank(), state), from_rank0=True)
    first = differences(model.state_dict(), state)
    outer = FSDP(model)
    zshard.load_state_dict(outer, given_to(dist.get_rank(), state_of(Stack, 8)), from_rank0=True)
    assert first == []
    assert differences(outer.state_dict(), state_of(Stack, 8)) == []


@on_ranks(2)
def test_dtypes_are_cast():
    """Cast as nn.Module casts."""
    model, plain = wrapped(Net, ("full_shard", "shm")), make(Net)
    state = {name: value.double() for name, value in state_of(Net).items()}
    zshard.load_state_dict(model, given_to(dist.get_rank(), state), from_rank0=True)
    plain.load_state_dict(state)
    first = differences(model.state_dict(), plain.state_dict())
    state = {name: value.bfloat16() for name, value in state.items()}
    zshard.load_state_dict(model, state)
    plain.load_state_dict(state)
    assert first == []
    assert differences(model.state_dict(), plain.state_dict()) == []


def test_single_rank():
    model, state = FSDP(make(Net)), state_of(Net)
    zshard.load_state_dict(model, state, from_rank0=True)
    assert differences(model.state_dict(), state) == []
    low = FSDP(make(Net), mixed_precision=LOW)
    low(torch.zeros(1, 1, dtype=torch.int64))
    zshard.load_state_dict(low, state)
    assert differences(low.state_dict(), state) == []


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_peak_memory_is_a_few_chunks(transport):
    """Return (most extra bytes on this rank, bytes of the full model)."""
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(8)])
    model = FSDP(model, transport=transport, auto_wrap_policy={nn.Linear})
    model.load_state_dict(model.state_dict())  # touch all its pages
    state = given_to(dist.get_rank(), model.state_dict())
    zshard.load_state_dict(model, state, from_rank0=True)
    trim()
    reset_high_water()
    before = high_water()
    zshard.load_state_dict(model, state, from_rank0=True)
    extra = high_water() - before
    whole = 8 * 2048 * 2048 * 4
    assert extra < 48 * 2**20 < whole / 2


# --- mismatches -----------------------------------------------------------------------------------


def spoiled(what):
    """Return (rank 0's state, rank 1's, names that must be missing)."""
    state = state_of(Stack)
    other = None
    if what == "missing":
        del state["blocks.1.up.weight"]
    elif what == "unexpected":
        state["blocks.7.up.weight"] = torch.ones(3)
    elif what == "shape":
        state["head.weight"] = torch.ones(9, 2)
    elif what == "flat":
        state["head.weight"] = state["head.weight"].reshape(-1)
    elif what == "dtype":
        state["head.weight"] = state["head.weight"].long()
    elif what == "complex":
        state["head.bias"] = state["head.bias"].to(torch.complex64)
    elif what == "no tensor":
        state["head.bias"] = [1.0, 2.0]
    elif what == "sparse":
        state["head.weight"] = state["head.weight"].to_sparse()
    elif what == "meta":
        state["head.weight"] = state["head.weight"].to("meta")
    elif what == "no dict":
        state = [1, 2]
    elif what == "no name":
        state[3] = torch.ones(2)
    elif what == "two states":
        other = state
    elif what == "no pickle":
        state["extra"] = lambda: 0
    return state, other


WRONG = {
    "missing": (RuntimeError, 'Missing key(s) in state_dict: "blocks.1.up.weight"'),
    "unexpected": (RuntimeError, 'Unexpected key(s) in state_dict: "blocks.7.up.weight"'),
    "shape": (
        RuntimeError,
        "size mismatch for head.weight: copying a param with shape torch.Size([9",
    ),
    "flat": (
        RuntimeError,
        "size mismatch for head.weight: copying a param with shape torch.Size([1",
    ),
    "dtype": (RuntimeError, "dtype mismatch for head.weight: cannot cast torch.int64 from"),
    "complex": (RuntimeError, "dtype mismatch for head.bias: cannot cast torch.complex64 from"),
    "no tensor": (RuntimeError, 'copying the parameter named "head.bias", expected torch.Tensor'),
    "sparse": (TypeError, "'head.weight' in the state dict must be a plain strided tensor"),
    "meta": (TypeError, "'head.weight' in the state dict is on the meta device"),
    "no dict": (TypeError, "state must be a mapping from names to tensors, got list"),
    "no name": (TypeError, "state dict keys must be strings, got 3"),
    "two states": (ValueError, "pass None on all ranks but 0"),
    "no pickle": (Exception, "lambda"),
}


def refused(what, combination):
    """Return (message, what has changed, can it be loaded afterwards?)."""
    model, rank = wrapped(Stack, combination), dist.get_rank()
    before = copy.deepcopy(model.state_dict())
    state, other = spoiled(what)
    given = state if rank == 0 else other
    said = message_of(lambda: zshard.load_state_dict(model, given, from_rank0=True), WRONG[what][0])
    changed = differences(model.state_dict(), before)
    zshard.load_state_dict(model, given_to(rank, state_of(Stack)), from_rank0=True)
    return said, changed, differences(model.state_dict(), state_of(Stack))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", WRONG)
def test_mismatches_are_errors_on_all_ranks(pool2, what):
    for combination in COMBINATIONS:
        for said, changed, after in pool2.run(refused, what, combination):
            assert WRONG[what][1] in said
            assert changed == after == []


def all_at_once():
    """All problems are listed, including those on one rank alone."""
    model, rank = wrapped(Stack, ("full_shard", "shm")), dist.get_rank()
    before = copy.deepcopy(model.state_dict())
    state = state_of(Stack)
    if rank == 1:
        del state["blocks.0.up.bias"]
        state["more"] = state.pop("head.bias")
        state["head.weight"] = state["head.weight"].int()
    said = message_of(lambda: zshard.load_state_dict(model, state), RuntimeError)
    keys = zshard.load_state_dict(
        model, given_to(rank, {"head.bias": torch.ones(2), "x": torch.ones(1)}), strict=False,
        from_rank0=True,
    )  # fmt: skip
    before["head.bias"].fill_(1.0)
    wrong = differences(model.state_dict(), before)
    return said, wrong, len(keys.missing_keys), keys.unexpected_keys


def test_all_problems_are_listed_on_every_rank(pool2):
    for rank, (said, wrong, missing, unexpected) in enumerate(pool2.run(all_at_once)):
        assert said.startswith(
            "Error(s) in loading" if rank == 1 else "rank 1: Error(s) in loading"
        )
        words = ('Missing key(s) in state_dict: "blocks.0.up.bias", "head.bias"', '"more"', "int32")
        for word in words:
            assert word in said
        assert wrong == [] and missing == len(state_of(Stack)) - 1 and unexpected == ["x"]


def test_model_without_units_is_refused():
    with pytest.raises(ValueError, match="this Net has no sharded module"):
        zshard.load_state_dict(make(Net), {})


def other_tensors():
    """A load hook replaces a tensor on one rank."""
    model = wrapped(Stack, ("full_shard", "shm"))

    def other(state, prefix, *_):
        state["head.bias"] = state["more"] if dist.get_rank() == 1 else state["head.bias"]
        del state["more"]

    model._register_load_state_dict_pre_hook(other)
    state = {**state_of(Stack), "more": torch.ones(2)}
    return message_of(
        lambda: zshard.load_state_dict(model, given_to(dist.get_rank(), state), from_rank0=True),
        zshard.DivergenceError,
    )


def test_ranks_that_would_load_different_tensors(pool2):
    expected = "rank 1 loads other tensors than rank 0: load the same"
    found = pool2.run(other_tensors)
    assert [message.partition("\n")[0] for message in found] == [expected] * 2


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
    spoiled = {**state, "1.bias": torch.ones(4)}
    given = given_to(dist.get_rank(), spoiled)
    said = message_of(lambda: zshard.load_state_dict(model, given, from_rank0=True), RuntimeError)
    untouched = [(each.note, list(each.seen)) for each in model]
    zshard.load_state_dict(model, given_to(dist.get_rank(), state), from_rank0=True)
    whole = model.state_dict()
    wrong = differences([whole[f"{i}.weight"] for i in range(2)], [plain.weight] * 2)
    after = [(each.note, each.seen) for each in model]
    assert "size mismatch for 1.bias" in said
    assert untouched == [("none", [])] * 2 and wrong == []
    assert after == [("from rank 0", [("from rank 0", True, [])])] * 2


def asking_for_values(from_rank0):
    model = wrapped(Stack, ("full_shard", "shm"))

    def double(state, prefix, *_):
        state[prefix + "weight"] = state[prefix + "weight"] * 2

    model.head._register_load_state_dict_pre_hook(double)
    state, rank = state_of(Stack), dist.get_rank()
    if from_rank0:
        given = given_to(rank, state)
        return message_of(lambda: zshard.load_state_dict(model, given, from_rank0=True))
    zshard.load_state_dict(model, state)
    return differences(model.state_dict()["head.weight"], state["head.weight"] * 2)


def test_hook_that_reads_values(pool2):
    assert pool2.run(asking_for_values, False) == [[], []]
    for said in pool2.run(asking_for_values, True):
        assert "cannot call mul() on 'head.weight', whose values are read only after all" in said


@on_ranks(2)
def test_old_versions_of_modules():
    """nn.Module's own old versions: no counter, and no `_metadata` with a version."""
    state = state_of(CASES["conv"].make)
    old = {k: v for k, v in state.items() if not k.endswith("num_batches_tracked")}
    model = sharded("conv", ("full_shard", "shm"))
    zshard.load_state_dict(model, given_to(dist.get_rank(), old), from_rank0=True)
    ours = model.state_dict()
    wrong = differences({key: ours[key] for key in old}, old)  # a forward changes the averages
    assert loss_of(model(CASES["conv"].batch(0, 0))).isfinite()
    assert wrong == []


class Picky(nn.Linear):
    refuses = False

    def get_extra_state(self):
        return 1

    def set_extra_state(self, state):
        if self.refuses:
            raise ValueError("not these")


@on_ranks(2)
def test_ranks_stay_in_step_after_one_refused_its_extra_state():
    model = FSDP(Picky(3, 3))
    state = model.state_dict()
    model.refuses = dist.get_rank() == 1
    with pytest.raises(ValueError, match="not these"):
        zshard.load_state_dict(model, state)
    model(torch.ones(2, 3)).sum().backward()
