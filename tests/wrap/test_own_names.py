"""A model's names and FSDP's: of each public name of FSDP, the model's own attribute wins.

The model has the name as a child, parameter, buffer, method, property or value, some assigned after
FSDP(), and trains to DDP's bits, with FSDP's methods called as functions.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import COMBINATIONS, ddp, make
from own_names import NAMES, refuse
from rows import all_refused
from scenarios import WIDTH, floats
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP
from zshard.model.own_names import PROTOCOL
from zshard.units.units import bare, class_of


class Model(nn.Module):
    """Uses its attribute `name` in forward. `begin` and `end` set it: at the end of __init__() and
    once the model is wrapped."""

    name = "own"

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.begin()

    def begin(self): ...

    def end(self): ...

    def forward(self, x):
        x = torch.tanh(self.first(x))
        found = getattr(self, self.name)
        return (found(x) if callable(found) else x * found) * self.gain


class Around(nn.Module):
    """Two such models, as inner units."""

    def __init__(self, kind):
        super().__init__()
        self.parts = nn.ModuleList([kind(), kind()])

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


# --- kinds of names: attributes of the model's class ----------------------------------------------


def linear():
    return nn.Linear(WIDTH, WIDTH)


def twice(self, x):
    return 2 * x + self.first.bias


def setting(value: Callable[[], Any]) -> Callable[[nn.Module], None]:
    return lambda self: setattr(self, self.name, value())


def moves(self, x):
    """A forward that reads and assigns a buffer."""
    x = torch.tanh(self.first(x))
    setattr(self, self.name, 0.5 * getattr(self, self.name) + x.detach().mean(0))
    return x * getattr(self, self.name) * self.gain


def counts(self, x):
    """A forward that writes through a property's setter."""
    setattr(self, self.name, getattr(self, self.name) + 1)
    return torch.tanh(self.first(x)) * getattr(self, self.name) * self.gain


def forwards(self, name):
    """__getattr__ of a model that passes names on to a part of it."""
    try:
        return nn.Module.__getattr__(self, name)
    except AttributeError:
        return getattr(nn.Module.__getattr__(self, "first"), name)


def buffer(self):
    self.register_buffer(self.name, torch.full((WIDTH,), 0.5))


def frozen(self):
    self.register_parameter(self.name, nn.Parameter(torch.ones(WIDTH), requires_grad=False))


def late_child(self):
    self.add_module(self.name, nn.Linear(WIDTH, WIDTH).requires_grad_(False))
    with torch.no_grad():
        for param in getattr(self, self.name).parameters():
            param.fill_(0.25)


def late_method(self):
    setattr(class_of(self), self.name, twice)


def of_first(self):
    self.first.note = torch.full((WIDTH,), 3.0)


def kinds_of(name: str) -> dict[str, type[Model]]:
    """Return a class of models for each kind of attribute that the name can be."""
    kept = property(
        lambda self: vars(self).get("_kept", 1.0), lambda self, v: vars(self).update(_kept=v)
    )
    contents: dict[str, dict[str, Any]] = {
        "child": {"begin": setting(linear)},
        "parameter": {"begin": setting(lambda: nn.Parameter(torch.ones(WIDTH)))},
        "buffer": {"begin": buffer, "forward": moves},
        "method": {name: twice},
        "static method": {name: staticmethod(torch.relu)},
        "property": {name: property(lambda self: self.first.bias * 2)},
        "property with a setter": {name: kept, "forward": counts},
        "value": {"begin": setting(lambda: 0.5)},
        "value of the class": {name: 0.5},
        "name that it passes on": {
            "__getattr__": forwards,
            "begin": lambda self: setattr(self.first, name, torch.full((WIDTH,), 3.0)),
        },
        "later child": {"end": late_child},
        "later child by assignment": {"end": setting(lambda: nn.Identity())},
        "later parameter": {"end": frozen},
        "later buffer": {"end": buffer, "forward": moves},
        "later value": {"end": setting(lambda: 0.5)},
        "later function": {"end": setting(lambda: torch.relu)},
        "later method of the class": {"end": late_method},
    }
    return {kind: type("Model", (Model,), {"name": name, **own}) for kind, own in contents.items()}


KINDS = list(kinds_of("own"))


# --- training -------------------------------------------------------------------------------------


def quietly(model, combination, **options):
    """Shard a model without the warning about its names."""
    strategy, transport = combination
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FSDP(model, strategy=strategy, transport=transport, **options)


def train(model, no_sync, clip=lambda model, most: 0):
    """Two steps of two micro-batches each; return the losses and norms."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, norms = [], []
    for step in range(2):
        for micro in range(2):
            with contextlib.nullcontext() if micro else no_sync(model):
                loss = model(floats(dist.get_rank(), 2 * step + micro)).square().mean()
                loss.backward()
            losses.append(loss.detach())
        norms.append(clip(model, 1e9))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


WHERE = [
    (False, ("full_shard", "shm")),
    (True, ("shard_grad_op", "c10d")),
    (False, ("zero1", "c10d")),
    (True, ("no_shard", "shm")),
    (True, ("full_shard", "c10d")),
]


@pytest.mark.sampled(len(KINDS))
@pytest.mark.parametrize(("inside", "combination"), WHERE)
@pytest.mark.parametrize("first", range(12))
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_a_models_own_attribute_wins(kind, inside, combination, first):
    for name in NAMES[first::12]:
        cls, what = kinds_of(name)[kind], f"with {name} as a {kind}"
        build = (lambda cls=cls: Around(cls)) if inside else cls
        plain, model = make(build), make(build)
        theirs = ddp(plain)
        quietly(model, combination, auto_wrap_policy={cls} if inside else {nn.Linear})
        for each in (plain, model):
            for part in each.parts if inside else [each]:
                part.end()
        clip = lambda m, most: nn.utils.clip_grad_norm_(m.parameters(), most)  # noqa: E731
        losses, norms = train(theirs, type(theirs).no_sync, clip)
        our_losses, our_norms = train(model, FSDP.no_sync, FSDP.clip_grad_norm_)
        assert_same(our_losses, losses, f"the losses {what}")
        torch.testing.assert_close(our_norms, norms)
        assert_same(model.state_dict(), plain.state_dict(), f"the state {what}")
        assert_same(copy.deepcopy(model).state_dict(), plain.state_dict(), f"a copy {what}")
        assert FSDP.memory(model)["total"] > 0 and combination[1] in FSDP.summary(model)


# --- flags ----------------------------------------------------------------------------------------


def flips(self, x):
    """A forward with its own flag, which FSDP has for scripts of DDP."""
    self.require_backward_grad_sync = not self.require_backward_grad_sync
    return torch.tanh(self.first(x)) * (2 if self.require_backward_grad_sync else 1) * self.gain


FLAGS = {
    "set in __init__()": {"begin": lambda self: setattr(self, self.name, True)},
    "of the class": {"require_backward_grad_sync": True},
}


@pytest.mark.parametrize("how", FLAGS)
@on_ranks(2)
def test_a_flag_of_the_model_does_not_stop_reductions(how):
    name = "require_backward_grad_sync"
    kind = type("Model", (Model,), {"name": name, "forward": flips, **FLAGS[how]})
    plain, model = make(kind), FSDP(make(kind))
    theirs = ddp(plain)
    expected = train(theirs, type(theirs).no_sync)
    assert_same(train(model, FSDP.no_sync), expected, "the losses")
    assert_same(model.state_dict(), plain.state_dict(), "the state")
    assert FSDP.require_backward_grad_sync(model) is True
    assert model.require_backward_grad_sync == plain.require_backward_grad_sync


def test_a_bool_sets_ddps_flag_of_a_model_without_its_own():
    model = FSDP(make(linear))
    model.require_backward_grad_sync = False
    assert FSDP.require_backward_grad_sync(model) is False
    model.require_backward_grad_sync = torch.ones(2).numpy()[0] > 0  # NumPy's bool
    assert FSDP.require_backward_grad_sync(model) is True
    model.require_backward_grad_sync = 0.5
    assert model.require_backward_grad_sync == 0.5 and model._zshard_state.unit.sync
    del model.require_backward_grad_sync
    assert model.require_backward_grad_sync is True


# --- names of wrappers ----------------------------------------------------------------------------

WRAPPERS = ["module", "_fsdp_wrapped_module", "_fpw_module", "_forward_module"]


class Holder(Model):
    def __init__(self, name):
        self.name = name
        super().__init__()

    def begin(self):
        setattr(self, self.name, linear())


@pytest.mark.parametrize("combination", COMBINATIONS, ids=" ".join)
@pytest.mark.parametrize("name", WRAPPERS)
@on_ranks(2)
def test_a_child_may_have_the_name_that_wrappers_give(name, combination, tmp_path):
    plain, model = (make(lambda: Holder(name)) for _ in range(2))
    theirs = ddp(plain)
    quietly(model, combination, auto_wrap_policy={nn.Linear})
    train(theirs, type(theirs).no_sync)
    train(model, FSDP.no_sync)
    assert_same(model.state_dict(), plain.state_dict(), "the state")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    model(floats(0)).sum().backward()
    optimizer.step()
    assert len(zshard.optim_state_dict(model, optimizer)["state"]) == len([*plain.parameters()])
    zshard.save(f"{tmp_path}/saved", model, optimizer)
    other = make(lambda: Holder(name), seed=2)
    zshard.load(f"{tmp_path}/saved", other)
    assert_same(other.state_dict(), plain.state_dict(), "a loaded plain model")
    zero = {key: torch.zeros_like(value) for key, value in plain.state_dict().items()}
    for source in (zero, theirs.state_dict(), model.state_dict()):
        model.load_state_dict(source)
        assert_same([*model.state_dict().values()], [*source.values()], "the loaded state")


def test_a_child_called_orig_mod_is_not_compiled():
    model = Holder("_orig_mod")
    assert bare(model) is model


def test_private_names_are_refused():
    def wrap(name, value, on=lambda layer: layer):
        model = nn.Sequential(type("Mine", (nn.Linear,), {})(2, 2))
        setattr(on(model[0]), name, value)
        return lambda: FSDP(model)

    child, param = nn.Identity(), nn.Parameter(torch.ones(2))
    refused = {"_zshard_state": (child, param, 3), "_zshard_other": (child, param)}
    refused |= {"_orig_mod": (child,), "_checkpoint_wrapped_module": (child,)}
    rows = {f"{n} = {v}": (n, wrap(n, v)) for n, values in refused.items() for v in values}
    rows["of the class"] = "_zshard_state", wrap("_zshard_state", 3, type)
    says = "a Mine has an attribute '{}'"
    all_refused({row: (call, ValueError, says.format(n)) for row, (n, call) in rows.items()})


# --- the protocol ---------------------------------------------------------------------------------


class Protocol(Model):
    """Overrides the same names as FSDP."""

    own = 1.0
    calls: ClassVar[list[str]] = []


def counting(name):
    def method(self, *args, **kwargs):
        self.calls.append(name)
        return getattr(super(Protocol, self), name)(*args, **kwargs)

    return method


OVERRIDDEN = ["__call__", "state_dict", "load_state_dict", "apply", "to_empty", "extra_repr"]
OVERRIDDEN += ["register_buffer", "register_parameter", "add_module"]
for each in OVERRIDDEN:
    setattr(Protocol, each, counting(each))


@on_ranks(2)
def test_methods_of_the_protocol_call_the_models():
    fsdps = {
        name for cls in FSDP.__mro__[:-2] for name, each in vars(cls).items() if callable(each)
    }
    shared = {name for name in fsdps & PROTOCOL if not name.startswith("_")}
    assert shared | {"__call__"} == set(OVERRIDDEN)
    model = FSDP(Protocol())
    model.calls.clear()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(torch.ones(1, WIDTH))
    model.load_state_dict(model.state_dict())
    model.apply(lambda module: None)
    model.to_empty(device="cpu")
    repr(model)
    model.register_buffer("metrics", torch.ones(1), persistent=False)
    model.register_parameter("memory", None)
    model.add_module("join", nn.Identity())
    assert set(OVERRIDDEN) == set(model.calls)
    assert_same(model.state_dict(), before, "the state after to_empty()")
    assert type(model.join) is nn.Identity and model.memory is None


# --- one warning ----------------------------------------------------------------------------------


class Clashing(Model):
    name = "summary"

    def __init__(self):
        super().__init__()
        self.metrics = nn.ModuleDict({"accuracy": nn.Identity()})
        self.device, self.rank = torch.device("cpu"), 3  # which many models have

    def summary(self, x):
        return x


def clashes(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught if "hide FSDP's" in str(each.message)]


def test_one_warning_names_what_hides_names_of_fsdp():
    texts = clashes(lambda: FSDP(Around(Clashing), auto_wrap_policy={Clashing}))
    assert len(texts) == 1
    assert "'metrics' of Clashing, 'summary' of Clashing" in texts[0]
    assert "FSDP.metrics(model)" in texts[0] and "rank" not in texts[0]
    assert clashes(lambda: FSDP(make(linear))) == []


def test_a_function_of_fsdp_says_which_models_it_takes():
    with pytest.raises(TypeError, match="a Linear is no sharded module: pass FSDP"):
        FSDP.memory(linear())


# --- zshard calls FSDP's names as functions -------------------------------------------------------


class Hostile(Model):
    """Raises where another than FSDP itself reads one of FSDP's names."""

    own = 1.0


refuse(Hostile)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=" ".join)
@on_ranks(2)
def test_nothing_reads_a_models_attributes_for_fsdps(combination, tmp_path):
    folder = str(tmp_path / "saved")
    model = quietly(make(Hostile), combination, nonfinite="skip")
    optimizer, ema = zshard.AdamW(model.parameters(), lr=0.1), zshard.EMA(model, 0.9)
    with zshard.profile():
        for step in FSDP.join(model, range(2)):
            with FSDP.no_sync(model):
                model(torch.ones(2, WIDTH)).sum().backward()
            model(torch.ones(2, WIDTH) + step).sum().backward()
            FSDP.clip_grad_norm_(model, 0.1)
            optimizer.step()
            ema.update()
            optimizer.zero_grad()
    zshard.save(folder, model, optimizer, ema=ema)
    zshard.load(folder, model, optimizer, ema=ema)
    zshard.load_optim_state_dict(model, optimizer, zshard.optim_state_dict(model, optimizer))
    list(zshard.export(model)), list(zshard.whole_named_parameters(model))
    zshard.named_norms(model), zshard.num_parameters(model), FSDP.metrics(model)
    with FSDP.summon_full_params(model):
        model.first.weight.sum()
    with ema.swapped():
        model(torch.ones(2, WIDTH))
    with FSDP.state_dict_type(model, "FULL_STATE_DICT"):
        model.load_state_dict(model.state_dict())
    FSDP.unshard(model), FSDP.reshard(model)
    other = quietly(make(Hostile), combination)
    handle = FSDP.optimizer_in_backward(other, zshard.SGD(other.parameters(), lr=0.1))
    other(torch.ones(2, WIDTH)).sum().backward()
    handle.remove()
