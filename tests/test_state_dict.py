"""state_dict() and load_state_dict(): whole plain tensors under plain names, in both directions."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from models import (
    CASES,
    COMBINATIONS,
    Nested,
    Net,
    Tied,
    differences,
    loss_of,
    make,
    train,
    wrapped,
)
from spawn import ranks
from torch import nn

from zshard import FSDP, _state

FULL = ("full_shard", "shm")


def sharded(name, combination, seed=1):
    """The sharded model of a case."""
    case = CASES[name]
    strategy, transport = combination
    return FSDP(
        make(case.make, seed),
        strategy=strategy,
        transport=transport,
        auto_wrap_policy=case.policy,
    )


def against_plain(name):
    """{combination: what differs between the state dict of a sharded and of a plain model}."""
    plain = make(CASES[name].make).state_dict()
    found = {}
    for combination in COMBINATIONS:
        state = sharded(name, combination).state_dict()
        found[combination] = differences(state, plain)
        if list(state) != list(plain):
            found[combination].append("the names come in another order")
        found[combination] += [
            f"{key}: {type(value).__name__}, {value.requires_grad=}"
            for key, value in state.items()
            if type(value) is not torch.Tensor or value.requires_grad
        ]
        if state._metadata != plain._metadata:
            found[combination].append("other metadata")
    return found


@pytest.mark.parametrize("name", CASES)
def test_names_and_values_are_those_of_the_plain_model(pool2, name):
    for found in pool2.run(against_plain, name):
        assert not any(found.values()), found


@ranks(3, 4)
def test_more_ranks(pool):
    for found in pool.run(against_plain, "odds"):
        assert not any(found.values()), found


def round_trip(name, source, target):
    """Trains under one combination, carries the state through a file into a plain model and into
    another combination, and back: everything that differs."""
    case, rank = CASES[name], dist.get_rank()
    model = sharded(name, source)
    train(model, case, torch.optim.SGD(model.parameters(), 0.1), rank, steps=2)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)

    plain = make(case.make, seed=2)
    result = [str(plain.load_state_dict(state))]
    other = sharded(name, target, seed=3)
    result.append(str(other.load_state_dict(plain.state_dict())))
    found = differences(plain.state_dict(), state) + differences(other.state_dict(), state)
    with torch.no_grad():
        batch = case.batch(7, rank)
        if not torch.equal(other.eval()(batch), plain.eval()(batch)):
            found.append("the outputs")
    model.load_state_dict(make(case.make, seed=4).state_dict())
    found += differences(model.state_dict(), make(case.make, seed=4).state_dict())
    return result, found


ROUND_TRIPS = [
    ("net", FULL, ("no_shard", "c10d")),
    ("net", ("no_shard", "shm"), FULL),
    ("tied", ("shard_grad_op", "shm"), ("full_shard", "c10d")),
    ("conv", ("shard_grad_op", "c10d"), FULL),
    ("odds", FULL, ("shard_grad_op", "shm")),
    ("dtypes", FULL, ("full_shard", "c10d")),
    ("recurrent", FULL, ("shard_grad_op", "shm")),
]


@pytest.mark.parametrize(("name", "source", "target"), ROUND_TRIPS)
def test_states_pass_between_strategies_and_plain_models(pool2, name, source, target):
    matched = "<All keys matched successfully>"
    assert pool2.run(round_trip, name, source, target) == [([matched, matched], [])] * 2


def loads(state, strict=True, model=None):
    """What load_state_dict returns or raises, in a comparable form."""
    try:
        result = (model or make(Net)).load_state_dict(state, strict=strict)
        return sorted(result.missing_keys), sorted(result.unexpected_keys)
    except RuntimeError as error:
        return str(error)


def damaged_states():
    """State dicts that do not fit, by what is wrong with them."""
    whole = make(Net, seed=2).state_dict()
    missing, extra, both = dict(whole), dict(whole), dict(whole)
    del missing["blocks.1.inner.0.up.weight"], missing["norm.bias"]
    extra["blocks.1.more"] = torch.zeros(3)
    extra["another"] = torch.zeros(3)
    del both["head.bias"]
    both["head.bais"] = torch.zeros(31)
    return {"missing": missing, "extra": extra, "both": both}


def loading_errors(combination):
    """{what is wrong: (as sharded, as plain)}, strictly and not."""
    found = {}
    for what, state in damaged_states().items():
        for strict in (True, False):
            ours = loads(state, strict, wrapped(Net, combination))
            theirs = loads(state, strict)
            if isinstance(ours, str):
                ours = ours.replace("FSDPNet", "Net")
            found[what, strict] = ours, theirs
    return found


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_missing_and_unexpected_names_are_told_as_by_torch(pool2, combination):
    for found in pool2.run(loading_errors, combination):
        for what, (ours, theirs) in found.items():
            assert ours == theirs, what
        assert "norm.bias" in found["missing", True][0]


def partial_load():
    """After a load that is not strict, what was given is there and the rest is as before."""
    model, state = wrapped(Net, FULL), make(Net, seed=2).state_dict()
    part = {key: value for key, value in state.items() if key.startswith("blocks.1")}
    model.load_state_dict(part, strict=False)
    return differences(model.state_dict(), {**make(Net).state_dict(), **part})


def test_a_part_can_be_loaded(pool2):
    assert pool2.run(partial_load) == [[], []]


def misshapen(combination):
    """The errors for a state with two misshapen tensors and a missing one, ours and torch's; and
    whether training goes on."""
    state = make(Net, seed=2).state_dict()
    state["blocks.1.inner.0.up.weight"] = torch.zeros(22, 12)
    state["norm.bias"] = torch.zeros(12)
    del state["head.bias"]
    model = wrapped(Net, combination)
    ours, theirs = loads(state, True, model), loads(state)
    loss = loss_of(model(CASES["net"].batch(0, dist.get_rank())))
    loss.backward()
    return ours, theirs, bool(loss.isfinite())


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_shape_errors_say_what_torchs_say(pool2, combination):
    for ours, theirs, trains in pool2.run(misshapen, combination):
        for line in theirs.splitlines()[1:]:
            name = line.split(":")[0]  # "size mismatch for NAME", "Missing key(s) in state_dict"
            assert name.strip() in ours
        for shape in ("22, 12", "22, 11", "12", "11"):
            assert shape in ours
        assert "head.bias" in ours and "Error(s) in loading state_dict" in ours
        assert trains


def slice_of_another_rank():
    """A state of slices (of parameters, not of state_dict()) is refused, not taken."""
    model = wrapped(Net, FULL)
    slices = {name: param.detach().clone() for name, param in model.named_parameters()}
    return loads(slices, True, model)


def test_a_state_of_slices_is_refused(pool2):
    for message in pool2.run(slice_of_another_rank):
        assert "size mismatch for embed.weight" in message and "31, 11" in message


def tied_aliases():
    """Tied names: both in the state, equal; and loadable with either one alone."""
    model = wrapped(Tied, FULL)
    state = model.state_dict()
    same = [
        torch.equal(state["embed.weight"], state["head.weight"]),
        torch.equal(state["twins.1.one.weight"], state["twins.1.two.weight"]),
        model.head.weight is model.embed.weight,
    ]
    other = make(Tied, seed=2).state_dict()
    found = []
    for left_out in ("embed.weight", "head.weight"):
        part = {key: value for key, value in other.items() if key != left_out}
        fresh = wrapped(Tied, FULL)
        missing = fresh.load_state_dict(part, strict=False).missing_keys
        found.append((missing, differences(fresh.state_dict(), other)))
    return same, found


def test_tied_weights_have_all_their_names(pool2):
    for same, found in pool2.run(tied_aliases):
        assert all(same)
        assert found == [(["embed.weight"], []), (["head.weight"], [])]


class WithBuffers(Net):
    """Buffers, of which one is not saved, and extra state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.blocks[0].register_buffer("mask", torch.rand(4) > 0.5)
        self.note = "first"

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]


def buffers_and_extra_state():
    model, plain = wrapped(WithBuffers, FULL), make(WithBuffers)
    model.count.add_(3)
    model.note = "second"
    state = model.state_dict()
    names = list(state) == list(plain.state_dict())
    plain.load_state_dict(state)
    values = int(plain.count), plain.note, torch.equal(plain.blocks[0].mask, model.blocks[0].mask)
    state["count"] += 4
    state["_extra_state"] = {"note": "third"}
    model.load_state_dict(state)
    return names, values, (int(model.count), model.note)


def test_buffers_and_extra_state(pool2):
    expected = (True, (3, "second", True), (7, "third"))
    assert pool2.run(buffers_and_extra_state) == [expected] * 2


def copies():
    """A state dict is a copy: training on does not change it, nor does it change the model."""
    model = wrapped(Net, FULL)
    state = model.state_dict()
    before = copy.deepcopy(state)
    train(model, CASES["net"], torch.optim.SGD(model.parameters(), 0.1), dist.get_rank(), steps=1)
    kept = differences(state, before) == []
    trained = model.state_dict()
    for value in state.values():
        value.zero_()
    return kept, bool(differences(trained, before)), differences(model.state_dict(), trained)


def test_state_dicts_are_copies(pool2):
    assert pool2.run(copies) == [(True, True, [])] * 2


def prefixes_and_parts():
    """Prefix, destination and keep_vars arguments, and the states of submodules."""
    plain, model = make(Net), wrapped(Net, FULL, auto_wrap_policy={Nested})
    found = differences(model.state_dict(prefix="a."), plain.state_dict(prefix="a."))
    into: dict = {}
    given = model.state_dict(destination=into, prefix="b.")
    found += differences(into, plain.state_dict(prefix="b."))
    found += [] if given is into else ["another destination"]
    kept = model.state_dict(keep_vars=True)
    found += [key for key, value in kept.items() if not value.requires_grad]
    found += differences(
        model.blocks[1].state_dict(prefix="x."), plain.blocks[1].state_dict(prefix="x.")
    )
    found += differences(model.blocks.state_dict(), plain.blocks.state_dict())
    model.blocks[0].load_state_dict(plain.blocks[1].state_dict())
    found += differences(model.blocks[0].state_dict(), plain.blocks[1].state_dict())
    return found


def test_prefixes_destinations_and_submodules(pool2):
    assert pool2.run(prefixes_and_parts) == [[], []]


def part_that_is_no_unit():
    """The state of a module whose parameters are in the root's unit: whole, or an error."""
    plain, model = make(Net), wrapped(Net, FULL, auto_wrap_policy=None)
    try:
        return differences(model.norm.state_dict(), plain.norm.state_dict())
    except RuntimeError as error:
        return [] if "norm" in str(error) else [str(error)]


def load_of_a_part_that_is_no_unit():
    """The same in the other direction: ("" or the error, what differs then)."""
    plain, model = make(Net), wrapped(Net, FULL, auto_wrap_policy=None)
    other = make(Net, seed=2)
    expected = {**plain.state_dict(), **other.norm.state_dict(prefix="norm.")}
    outcomes = [""] * dist.get_world_size()
    try:
        model.norm.load_state_dict(other.norm.state_dict())
        mine = ""
    except RuntimeError as error:
        mine, expected = str(error), plain.state_dict()
    dist.all_gather_object(outcomes, mine)
    return [bool(outcome) for outcome in outcomes], differences(model.state_dict(), expected)


def test_a_part_that_is_no_unit_never_gives_slices(pool2):
    assert pool2.run(part_that_is_no_unit) == [[], []]


def test_a_part_that_is_no_unit_is_loaded_by_all_ranks_or_none(pool2):
    for refused, wrong in pool2.run(load_of_a_part_that_is_no_unit):
        assert refused[0] == refused[1]
        assert wrong == []


def not_collective():
    """state_dict() on rank 0 alone, while rank 1 trains on with it."""
    rank, case = dist.get_rank(), CASES["net"]
    model, plain = wrapped(case.make, FULL), make(case.make)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = differences(model.state_dict(), plain.state_dict()) if rank == 0 else []
    train(model, case, optimizer, rank)
    return found


def test_state_dict_on_one_rank_while_the_other_trains(pool2):
    assert pool2.run(not_collective, timeout=30) == [[], []]


def assign():
    model = wrapped(Net, FULL)
    with pytest.raises(ValueError, match="assign=True"):
        model.load_state_dict(make(Net, seed=2).state_dict(), assign=True)
    return differences(model.state_dict(), make(Net).state_dict())


def test_assigning_is_refused(pool2):
    assert pool2.run(assign) == [[], []]


# --- parts of a model -----------------------------------------------------------------------------


def every_part(name, combination):
    """What differs between the state of each module and that of its plain twin; and after each was
    loaded with other values, the whole model from its twin."""
    model, (plain, other) = sharded(name, combination), [make(CASES[name].make, s) for s in (1, 2)]
    found = []
    for (where, part), twin in zip(model.named_modules(), plain.modules(), strict=True):
        for options in ({}, {"keep_vars": True, "prefix": "a.b."}):
            ours, theirs = part.state_dict(**options), twin.state_dict(**options)
            found += [f"{where}: {text}" for text in differences(ours, theirs)]
            found += [where] if list(ours) != list(theirs) else []
            for key, value in theirs.items():
                same_kind = type(ours[key]) is type(value)
                same_grad = ours[key].requires_grad == value.requires_grad
                found += [] if same_kind and same_grad else [f"{where}: {key} is of another kind"]
    for part, twin, source in reversed(
        list(zip(model.modules(), plain.modules(), other.modules(), strict=True))
    ):
        part.load_state_dict(source.state_dict())
        twin.load_state_dict(source.state_dict())
        found += differences(model.state_dict(), plain.state_dict())
    return found


PARTS = ["one unit", "tied", "odds", "dtypes", "frozen", "attention", "recurrent", "conv"]


@pytest.mark.parametrize("name", PARTS)
def test_every_part_saves_and_loads_as_that_of_a_plain_model(pool2, name):
    for combination in [FULL, ("shard_grad_op", "c10d")]:
        assert pool2.run(every_part, name, combination) == [[], []]


@ranks(3, 4)
def test_parts_on_more_ranks(pool):
    assert pool.run(every_part, "odds", FULL) == [[]] * pool.world


def gathers(name, policy):
    """How often a unit is gathered for the state of the model, of a list in it, and of one layer."""
    model, counts = FSDP(make(CASES[name].make), auto_wrap_policy=policy), []
    method = _state._UnitParams.copies

    def counted(self, wanted):
        made = method(self, wanted)
        counts[-1].append((self.unit.name, len(made)))
        return made

    _state._UnitParams.copies = counted
    try:
        for part in (model, model.blocks, model.norm):
            counts.append([])
            part.state_dict()
    finally:
        _state._UnitParams.copies = method
    return counts


def test_a_unit_is_gathered_once_for_what_is_asked(pool2):
    each = len(list(Nested(11).parameters()))
    for counts in pool2.run(gathers, "net", {Nested}):
        blocks = [(f"blocks.{i}", each) for i in range(3)]
        assert counts == [[("", 5), *blocks], blocks, [("", 2)]]
    for counts in pool2.run(gathers, "net", None):
        assert counts == [[("", 5 + 3 * each)], [("", 3 * each)], [("", 2)]]


def copies_of_a_part():
    """A copied or unpickled part is a plain module, with what it has."""
    model = wrapped(Net, FULL, auto_wrap_policy=None)
    found = []
    for part in (model.norm, model.blocks[0], model.blocks):
        for made in (copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
            own = {name: param.detach() for name, param in part.named_parameters()}
            found += differences(made.state_dict(), own)
            made.load_state_dict({name: value + 1 for name, value in own.items()})
            found += differences(made.state_dict(), {n: v + 1 for n, v in own.items()})
    return found + differences(model.state_dict(), make(Net).state_dict())


def test_copies_of_parts_are_plain_modules(pool2):
    assert pool2.run(copies_of_a_part) == [[], []]


def tied_too_late(how):
    """What state_dict() raises after a parameter got another place."""
    model = wrapped(Net, FULL, auto_wrap_policy={Nested})
    if how == "tied":
        model.head.weight = model.embed.weight
    else:
        model.other = model.blocks[0].gain
    with pytest.raises(RuntimeError, match="slice") as caught:
        model.state_dict()
    return str(caught.value)


@pytest.mark.parametrize("how", ["tied", "given away"])
def test_a_slice_in_a_state_dict_is_an_error(pool2, how):
    name = {"tied": "head.weight", "given away": "other"}[how]
    for message in pool2.run(tied_too_late, how):
        assert f"'{name}'" in message and "after FSDP" in message


# --- hooks ----------------------------------------------------------------------------------------


def hooks_of_the_user(early):
    """What is wrong with a state whose names a hook of the user changes, as many models do it."""

    def rename(module, state, prefix, local_metadata):
        for key in list(state):
            if "up" in key:
                state["renamed." + key] = state.pop(key) * 2

    plain, model = make(Net), make(Net)
    plain._register_state_dict_hook(rename)
    if early:
        model._register_state_dict_hook(rename)
    model = FSDP(model, auto_wrap_policy={nn.LayerNorm})
    if not early:
        model._register_state_dict_hook(rename)
    return differences(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("early", [True, False], ids=["before wrapping", "after wrapping"])
def test_state_dict_hooks_work_on_whole_tensors(pool2, early):
    assert pool2.run(hooks_of_the_user, early) == [[], []]


def load_hooks_of_the_user(early):
    """The same for a hook that renames on loading."""

    def rename(state, prefix, *_):
        for key in list(state):
            if key.startswith("old."):
                state[key.removeprefix("old.")] = state.pop(key) * 2

    state = {"old." + key: value for key, value in make(Net, seed=2).state_dict().items()}
    plain, model = make(Net), make(Net)
    plain._register_load_state_dict_pre_hook(rename)
    if early:
        model._register_load_state_dict_pre_hook(rename)
    model = FSDP(model, auto_wrap_policy={nn.LayerNorm})
    if not early:
        model._register_load_state_dict_pre_hook(rename)
    plain.load_state_dict(state)
    model.load_state_dict(state)
    return differences(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("early", [True, False], ids=["before wrapping", "after wrapping"])
def test_load_hooks_work_on_whole_tensors(pool2, early):
    assert pool2.run(load_hooks_of_the_user, early) == [[], []]


class Own(nn.Module):
    """Saves and loads in its own way: transposed, under another name, if it is of that shape."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))
        self.scale = nn.Parameter(torch.rand(()))

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "kernel"] = destination.pop(prefix + "weight").t() * self.scale

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        state_dict[prefix + "weight"] = state_dict.pop(prefix + "kernel").t()
        assert state_dict[prefix + "weight"].shape == self.weight.shape
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, x):
        return x @ self.weight * self.scale


def owns():
    return nn.Sequential(Own(), nn.Sequential(Own(), nn.Linear(3, 5)), Own())


def methods_of_the_users_class(combination, policy):
    model, plain = wrapped(owns, combination, auto_wrap_policy=policy), make(owns)
    found = differences(model.state_dict(), plain.state_dict())
    found += differences(model[1].state_dict(), plain[1].state_dict())
    state = make(owns, 2).state_dict()
    model.load_state_dict(state)
    plain.load_state_dict(state)
    return found + differences(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("policy", [None, {Own}], ids=["one unit", "units"])
def test_methods_of_the_users_classes_work_on_whole_tensors(pool2, policy):
    for combination in [FULL, ("full_shard", "c10d")]:
        assert pool2.run(methods_of_the_users_class, combination, policy) == [[], []]


def shapes_in_hooks(early):
    """{kind: {name: shape}} that hooks on each module see of its own entries; and a load, of which
    the hooks double each value."""
    seen = {"save": {}, "load": {}, "self": {}}

    def on_save(module, state, prefix, local_metadata):
        own = [prefix + name for name in module._parameters]
        seen["save"].update({key: tuple(state[key].shape) for key in own})

    def on_load(module, state, prefix, *_):
        for name, param in module._parameters.items():
            seen["load"][prefix + name] = tuple(state[prefix + name].shape)
            seen["self"][prefix + name] = tuple(param.shape)
            state[prefix + name] = state[prefix + name] * 2

    def register(model):
        for module in model.modules():
            module.register_state_dict_post_hook(on_save)
            module.register_load_state_dict_pre_hook(on_load)

    model, plain, state = make(Net), make(Net), make(Net, seed=2).state_dict()
    if early:
        register(model)
    model = FSDP(model, auto_wrap_policy={Nested})
    if not early:
        register(model)
    model.load_state_dict(state)
    plain.load_state_dict({name: value * 2 for name, value in state.items()})
    return seen, differences(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("early", [True, False], ids=["before wrapping", "after wrapping"])
def test_hooks_on_all_modules_see_whole_shapes(pool2, early):
    shapes = {name: tuple(value.shape) for name, value in make(Net).state_dict().items()}
    for seen, found in pool2.run(shapes_in_hooks, early):
        assert seen == {"save": shapes, "load": shapes, "self": shapes}
        assert found == []


class Positions(nn.Module):
    """Takes positions of another number, as vision models do."""

    def __init__(self, n=12):
        super().__init__()
        self.table = nn.Parameter(torch.randn(n, 2))
        self.more = nn.Parameter(torch.randn(3))
        self.register_load_state_dict_pre_hook(self.fit)

    @staticmethod
    def fit(module, state, prefix, *_):
        given = state[prefix + "table"]
        if given.shape != module.table.shape:
            n = module.table.size(0)
            state[prefix + "table"] = given[:n] if len(given) > n else given.repeat(2, 1)[:n]
        if prefix + "more" not in state:  # an older file: it keeps what it has
            state[prefix + "more"] = module.more.data

    def forward(self, x):
        return x + self.table.sum() + self.more.sum()


def resized():
    found = []
    for n in (9, 12, 17):
        plain = make(Positions)
        model = FSDP(nn.Sequential(make(Positions)), auto_wrap_policy=None)
        state = make(lambda n=n: Positions(n), 2).state_dict()
        del state["more"]
        plain.load_state_dict(state)
        model.load_state_dict({f"0.{name}": value for name, value in state.items()})
        found += differences(model[0].state_dict(), plain.state_dict())
    return found


def test_a_load_hook_may_ask_for_shapes(pool2):
    assert pool2.run(resized) == [[], []]


def values_in_a_load_hook(ask):
    """The error of a load hook that asks for what is not there, and that nothing has changed."""
    asks = {
        "clone": lambda param, given: param.clone(),
        "copy_": lambda param, given: param.data.copy_(given),
        "fill_": lambda param, given: nn.init.zeros_(param),
        "cat": lambda param, given: torch.cat([given[:1], param[1:]]),
        "data": lambda param, given: setattr(param, "data", given),
    }
    model = wrapped(Net, FULL, auto_wrap_policy=None)
    model.norm.register_load_state_dict_pre_hook(
        lambda module, state, prefix, *_: asks[ask](module.weight, state[prefix + "weight"])
    )
    before = dict(model.norm._parameters), dict(model.norm._load_state_dict_pre_hooks)
    with pytest.raises(RuntimeError, match=r"'norm\.weight'") as caught:
        model.norm.load_state_dict(make(Net, 2).norm.state_dict())
    after = dict(model.norm._parameters), dict(model.norm._load_state_dict_pre_hooks)
    kept = all(
        a[key] is value for a, b in zip(after, before, strict=True) for key, value in b.items()
    )
    tidy = kept and [len(each) for each in after] == [len(each) for each in before]
    return str(caught.value), tidy, differences(model.state_dict(), make(Net).state_dict())


@pytest.mark.parametrize("ask", ["clone", "copy_", "fill_", "cat", "data"])
def test_a_load_hook_that_asks_for_values_gets_an_error(pool2, ask):
    for message, tidy, found in pool2.run(values_in_a_load_hook, ask):
        assert "state_dict()" in message
        assert tidy
        assert found == []


def patched_methods():
    """Methods that the user put on instances, and which call the old ones, as PEFT does."""
    model, plain = make(Net), make(Net)
    for each in (model, plain):
        old, blocks, save = each.state_dict, each.blocks.state_dict, each.norm._save_to_state_dict

        def saved(state, prefix, keep_vars, save=save):
            save(state, prefix, keep_vars)
            state[prefix + "weight"] = state[prefix + "weight"] * 2

        each.state_dict = lambda old=old: {"only." + k: v for k, v in old().items()}
        each.blocks.state_dict = lambda *args, old=blocks, **kwargs: old(*args, **kwargs) and None
        each.norm._save_to_state_dict = saved
    model = FSDP(model, auto_wrap_policy=None)
    found = differences(model.state_dict(), plain.state_dict())
    found += differences(model.norm.state_dict(), plain.norm.state_dict())
    return found if model.blocks.state_dict() is None else [*found, "not the user's"]


def test_patched_methods_get_whole_tensors(pool2):
    assert pool2.run(patched_methods) == [[], []]


# --- at odd times ---------------------------------------------------------------------------------


def load_after_forward(combination):
    """A load after a forward that has kept its units for a backward that never comes."""
    model, state = wrapped(Net, combination), make(Net, seed=2).state_dict()
    model(CASES["net"].batch(0, dist.get_rank()))
    model.load_state_dict(state)
    found = differences(model.state_dict(), state)
    loss_of(model(CASES["net"].batch(0, dist.get_rank()))).backward()
    return found


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_loading_between_a_forward_and_a_backward(pool2, combination):
    assert pool2.run(load_after_forward, combination) == [[], []]


def saved_in_forward(combination):
    """A state dict that a hook takes within a forward; the forward goes on with its weights."""
    model, plain = wrapped(Net, combination), make(Net)
    states = []
    model.blocks[1].register_forward_pre_hook(lambda *_: states.append(model.state_dict()))
    batch = CASES["net"].batch(0, 0)
    loss = loss_of(model(batch))
    loss.backward()
    same = torch.equal(loss, loss_of(plain(batch)))
    return same, differences(states[0], plain.state_dict())


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_saving_within_a_forward(pool2, combination):
    assert pool2.run(saved_in_forward, combination) == [(True, [])] * 2


def saved_in_inference_mode():
    model = wrapped(Net, FULL)
    with torch.inference_mode():
        state = model.state_dict()
    return [name for name, value in state.items() if value.is_inference()]


def test_saving_in_inference_mode_gives_usual_tensors(pool2):
    assert pool2.run(saved_in_inference_mode) == [[], []]


def scalars_of_old_files():
    model, state = sharded("odds", FULL), make(CASES["odds"].make, 2).state_dict()
    model.load_state_dict({**state, "scale": state["scale"].reshape(1)})
    return differences(model.state_dict(), state)


def test_scalars_of_old_files_are_taken(pool2):
    assert pool2.run(scalars_of_old_files) == [[], []]


def what_is_put_on_modules(combination):
    model = wrapped(Net, combination)
    return [name for module in model.modules() for name in vars(module) if "state_dict" in name]


def test_what_is_not_sharded_is_left_alone(pool2):
    plain = [
        name for module in make(Net).modules() for name in vars(module) if "state_dict" in name
    ]
    assert pool2.run(what_is_put_on_modules, ("no_shard", "shm")) == [plain] * 2
    model = FSDP(make(Net))
    assert [n for module in model.modules() for n in vars(module) if "state_dict" in n] == plain


def test_world_of_one():
    plain = make(WithBuffers)
    model = FSDP(copy.deepcopy(plain))
    assert differences(model.state_dict(), plain.state_dict()) == []
    other = make(WithBuffers, seed=2)
    model.load_state_dict(other.state_dict())
    assert differences(model.state_dict(), other.state_dict()) == []
    plain.load_state_dict(model.state_dict())
    assert differences(plain.state_dict(), other.state_dict()) == []
