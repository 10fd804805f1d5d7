"""The interface of FSDP(model): its arguments (test_errors.py has the refusals), the wrapped model,
and its reports."""

from __future__ import annotations

import functools
import inspect
import pickle
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from compare import assert_same
from models import (
    COMBINATIONS,
    Block,
    Conv,
    Mlp,
    Nested,
    Net,
    Tied,
    differences,
    loss_of,
    make,
    wrapped,
)
from rows import all_rows
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP, ShardingStrategy
from zshard.units.extensions import EXTENSIONS, Extension

FULL = ("full_shard", "shm")


def units(model):
    """Return {name: strategy} of a model's units, parents first."""
    return {
        m._zshard_state.unit.name: m._zshard_state.unit.strategy for m in FSDP.fsdp_modules(model)
    }


# --- arguments -------------------------------------------------------------------------------------


def test_arguments_match_fsdp1():
    ours = inspect.signature(FSDP).parameters
    theirs = inspect.signature(torch_fsdp.FullyShardedDataParallel).parameters
    positional = [name for name, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == list(theirs)
    changed = {name for name in theirs if ours[name].default != theirs[name].default}
    assert changed == {
        "auto_wrap_policy",  # "auto": a bare FSDP(model) saves memory
        "backward_prefetch",  # a string for torch's member
        "sync_module_states",  # as DDP
        "use_orig_params",  # always
    }
    others = {name: p.kind for name, p in ours.items() if name not in positional}
    assert others == dict.fromkeys(others, inspect.Parameter.KEYWORD_ONLY)


TORCHS = torch_fsdp.ShardingStrategy
NAMES_OF_STRATEGIES = {
    **{
        name: strategy.in_group.value
        for strategy in ShardingStrategy
        for name in (strategy, strategy.value, strategy.name)
    },
    **dict.fromkeys((None, "zero3", "ZeRO-3", "ZeRO-1", "fsdp", "Full-Shard"), "full_shard"),
    **dict.fromkeys(("hsdp", "HFSDP", TORCHS.FULL_SHARD, TORCHS.HYBRID_SHARD), "full_shard"),
    **dict.fromkeys(("ZeRO2", "zero_2", TORCHS.SHARD_GRAD_OP), "shard_grad_op"),
    TORCHS._HYBRID_SHARD_ZERO2: "shard_grad_op",
    **dict.fromkeys(("ZeRO-0", "ddp", TORCHS.NO_SHARD), "no_shard"),
}


def test_names_of_a_strategy():
    with all_rows() as row:
        for name, expected in NAMES_OF_STRATEGIES.items():
            for argument in ("sharding_strategy", "strategy"):
                with row(argument, name):
                    model = FSDP(Mlp(), auto_wrap_policy=None, **{argument: name})
                    assert units(model) == {"": expected}


def test_torch_argument_objects_are_accepted():
    options = {
        "backward_prefetch": torch_fsdp.BackwardPrefetch.BACKWARD_POST,
        "device_id": torch.device("cpu"),
        "forward_prefetch": False,
        "limit_all_gathers": True,
        "use_orig_params": True,
    }
    FSDP(Mlp(), None, TORCHS.FULL_SHARD, torch_fsdp.CPUOffload(offload_params=False), **options)
    assert FSDP(Mlp(), device_id="cpu").state_dict().keys() == Mlp().state_dict().keys()


def test_one_unit_may_differ_in_its_strategy():
    policy = zshard.wrap.CustomPolicy(
        lambda m: {"sharding_strategy": "no_shard"} if isinstance(m, Nested) else False
    )
    model = FSDP(Net(), auto_wrap_policy=policy)
    assert units(model) == {"": "full_shard", **{f"blocks.{n}": "no_shard" for n in range(3)}}


IGNORED = {
    "modules": lambda block: {"ignored_modules": [block]},
    "states": lambda block: {"ignored_states": list(block.parameters())},
    "modules as states": lambda block: {"ignored_states": [block]},
}


@pytest.mark.parametrize("how", IGNORED)
@on_ranks(2)
def test_ignored_modules_stay_unchanged(how):
    model, rank = make(Net), dist.get_rank()
    part = model.blocks[1]
    part.gain.data.fill_(5 + rank)  # not taken from rank 0 either
    before = {name: value.clone() for name, value in part.named_parameters()}
    model = FSDP(model, auto_wrap_policy={Nested}, **IGNORED[how](part))
    loss_of(model(torch.arange(6).reshape(2, 3) + rank)).backward()
    assert_same(dict(part.named_parameters()), before, "the ignored parameters")
    assert {zshard.shard_info(p) for p in part.parameters()} == {None}
    assert list(units(model)) == ["", "blocks.0", "blocks.2"]
    assert list(model.state_dict()) == list(make(Net).state_dict())
    grads = [None, None]
    dist.all_gather_object(grads, [p.grad.sum().item() for p in part.parameters()])
    assert grads[0] != grads[1], "gradients of ignored parameters are not reduced"


# --- the wrapped model -----------------------------------------------------------------------------


class WithExtras(Net):
    """A class with its own attributes and methods."""

    kind = "extra"
    calls = 0

    def forward(self, ids, *, twice=False):
        self.calls += 1
        return super().forward(ids) * (2 if twice else 1)

    def describe(self):
        return f"{type(self).__name__} of {len(self.blocks)}"


def test_model_keeps_its_identity():
    plain = make(WithExtras)
    before = [*map(id, plain.modules()), *map(id, plain.parameters())]
    names = [name for name, _ in plain.named_parameters()]
    model = FSDP(plain)
    assert model is plain and isinstance(model, FSDP) and isinstance(model, WithExtras)
    assert [*map(id, model.modules()), *map(id, model.parameters())] == before
    assert [name for name, _ in model.named_parameters()] == names
    kind = type(model)
    assert kind.__name__ == "WithExtras" and kind.__module__ == WithExtras.__module__
    assert kind.__qualname__ == "FSDPWithExtras", "error messages of Python tell them apart"
    assert kind is type(FSDP(make(WithExtras))), "one class for each class"
    assert model.kind == "extra" and model.describe() == "WithExtras of 3"
    ids = torch.arange(4)[None]
    assert_same(model(ids, twice=True), 2 * model(ids), "the output")
    assert model.calls == 2


def test_module_is_the_model_itself():
    model = FSDP(make(Net))
    plain = model.module
    assert type(plain) is Net
    assert plain.head is model.head
    plain.head.bias.data.fill_(3)
    assert float(model.head.bias.detach()[0]) == 3
    plain.eval()
    plain.kind = "set by way of .module"
    assert (model.training, model.kind) == (False, plain.kind)
    assert differences(plain.state_dict(), model.state_dict()) == []
    ids = torch.arange(4)[None]
    assert_same(plain(ids), model(ids), "the output")


def test_train_eval_apply_and_attributes_work():
    model = FSDP(make(Conv))
    assert not model.eval().training and not model.stages[0][1].training
    assert model.train().training
    seen = []
    model.apply(lambda module: seen.append(type(module)))
    assert len(seen) == len(list(model.modules()))
    model.note = "set"
    model.register_buffer("extra", torch.ones(2))
    assert model.note == "set" and "extra" in model.state_dict()
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing


def test_user_hooks_surround_the_forward():
    order = []
    model = make(Mlp)
    model.register_forward_pre_hook(lambda *_: order.append("before 1"))
    model.register_forward_hook(lambda *_: order.append("after 1"))
    model = FSDP(model)
    model.register_forward_pre_hook(lambda *_: order.append("before 2"))
    handle = model.register_forward_hook(lambda module, args, output: output * 0 + 7)
    assert bool((model(torch.ones(1, 7)) == 7).all())
    assert order == ["before 1", "before 2", "after 1"]
    handle.remove()
    assert not bool((model(torch.ones(1, 7)) == 7).any())


@on_ranks(2)
def test_user_hooks_see_full_weights():
    """Hooks set before and after wrapping."""
    shapes = []
    model = make(Net)
    inner = model.blocks[0].inner[0]
    look = lambda module, *_: shapes.append(tuple(module.up.weight.shape))  # noqa: E731
    inner.register_forward_pre_hook(look)
    inner.register_forward_hook(look)
    model = FSDP(model, auto_wrap_policy={Block})
    inner.register_forward_pre_hook(look)
    model(torch.arange(3)[None])
    assert shapes == [(22, 11)] * 3
    assert inner.up.weight.ndim == 2 and inner.up.weight.shape[1:] == (1,)


@pytest.mark.parametrize("part", [lambda model: model, lambda model: model.blocks[0]])
@pytest.mark.parametrize("save", [pickle.dumps, lambda model: torch.save(model, "/dev/null")])
def test_pickling_is_refused(save, part):
    model = FSDP(make(Net), auto_wrap_policy={Nested})
    with pytest.raises(TypeError, match=r"state_dict\(\)"):
        save(part(model))


def test_each_module_is_wrapped_once():
    model = FSDP(make(Net), auto_wrap_policy={Nested})
    for part in (model, model.blocks[1]):
        with pytest.raises(ValueError, match="already wrapped"):
            FSDP(part)
    outer = FSDP(nn.Sequential(model, nn.Linear(31, 2)), auto_wrap_policy=None)
    assert list(FSDP.fsdp_modules(outer))[1] is model


def test_wrap_takes_the_arguments_of_the_context_around_it():
    wrap = zshard.wrap.wrap
    layer, seen = nn.Linear(2, 2), []
    enabled = functools.partial(zshard.wrap.enable_wrap, wrapper_cls=lambda _, **given: given)
    with pytest.raises(KeyError), enabled(strategy="full_shard", timeout=3):
        with enabled(strategy="zero1"):
            seen.append(wrap(layer))
        seen += [wrap(layer), wrap(layer, strategy="no_shard")]
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(wrap, layer).result() is layer, "the context is this thread's"
        raise KeyError
    assert wrap(layer, strategy="no_shard") is layer
    assert seen == [
        {"strategy": "zero1"},
        {"strategy": "full_shard", "timeout": 3},
        {"strategy": "no_shard", "timeout": 3},
    ]


# --- reports ---------------------------------------------------------------------------------------


def test_fsdp_modules():
    model = FSDP(make(Net), auto_wrap_policy={Nested, nn.Embedding})
    assert FSDP.fsdp_modules(model) == [model, model.embed, *model.blocks]
    assert FSDP.fsdp_modules(model, root_only=True) == [model]
    assert FSDP.fsdp_modules(model.blocks[1]) == [model.blocks[1]]
    both = nn.ModuleList([model, FSDP(make(Mlp), auto_wrap_policy=None)])
    assert FSDP.fsdp_modules(both, root_only=True) == list(both)
    assert FSDP.fsdp_modules(nn.Linear(1, 1)) == []


@pytest.mark.parametrize("combination", [FULL, ("shard_grad_op", "c10d")])
@on_ranks(2)
def test_shard_info(combination):
    model = wrapped(Net, combination, auto_wrap_policy={Nested})
    plain = {name: tuple(p.shape) for name, p in make(Net).named_parameters()}
    infos = {name: zshard.shard_info(p) for name, p in model.named_parameters()}
    for name, param in model.named_parameters():
        info = infos[name]
        assert info["name"] == name and info["shape"] == plain[name]
        assert info["unit"] == (re.match(r"blocks\.\d+", name) or [""])[0]
        assert tuple(param.shape) == (info["numel"], *[1] * (len(plain[name]) - 1))
    both = [None, None]
    dist.all_gather_object(both, infos)
    for name, shape in plain.items():
        first, second = (infos[name] for infos in both)
        assert first["numel"] + second["numel"] == torch.Size(shape).numel()
        assert not second["numel"] or second["begin"] == first["numel"], "elements in ranks' order"
    others = [
        torch.ones(3),
        nn.Parameter(torch.ones(3)),
        *FSDP(Mlp(), strategy="no_shard").parameters(),
    ]
    assert {zshard.shard_info(each) for each in others} == {None}


def units_table(model):
    """Return the first table of a summary; the table of memory follows it."""
    return model.summary().split("\n\n")[0].splitlines()


@on_ranks(2)
def test_summary_and_printing_show_the_units():
    model = wrapped(Net, FULL, auto_wrap_policy={Nested})
    lines = units_table(model)
    assert lines[0] == f"zshard: rank {dist.get_rank()} of 2, transport shm"
    assert lines[1].split() == ["unit", "parameters", "unsharded", "per", "rank", "strategy"]
    rows = {line.split()[0]: line.split() for line in lines[3:-2]}
    assert list(rows) == ["(root)", "blocks.0", "blocks.1", "blocks.2"]
    count = zshard.num_parameters(make(Net).blocks[0])
    assert rows["blocks.1"][1] == f"{count:,}" and rows["blocks.1"][-1] == "full_shard"
    total = zshard.num_parameters(make(Net))
    assert lines[-1].startswith("4 units") and f" {total:,} " in lines[-1]
    text = repr(model)
    assert text.startswith("Net(\n  unit='(root)', full_shard, shm")
    assert text.count("unit=") == 4
    assert "(1): Nested(\n      unit='blocks.1', full_shard, shm" in text
    assert "(norm): LayerNorm((11,), eps=1e-05, elementwise_affine=True" in text
    text = "Linear(in_features=3, out_features=5, bias=True, unit='(root)', full_shard, shm)"
    assert repr(FSDP(nn.Linear(3, 5))) == text
    # 4 x (1 MiB of weight and 2 KiB of bias, rounded up to whole pages for each of two ranks)
    layers = lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))  # noqa: E731
    line = units_table(wrapped(layers, FULL, auto_wrap_policy={nn.Linear}))[-1]
    assert re.split(r"\s{2,}", line.strip()) == ["5 units", "1,050,624", "4.0 MiB", "2.0 MiB"]


@on_ranks(2)
def test_model_without_parameters():
    model = FSDP(nn.Sequential(nn.ReLU(), nn.Flatten()))
    x = torch.ones(2, 3, requires_grad=True)
    model(x).sum().backward()
    assert_same(x.grad, torch.ones(2, 3), "the gradient")
    assert dict(model.state_dict()) == {}
    assert model.memory()["shards"] == 0 and units_table(model)[-1].startswith("1 unit")


class TiedAndFrozen(Tied):
    def __init__(self):
        super().__init__()
        self.twins[1].requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0))


def counts(model):
    parts = (model, model.twins, model.twins[1], nn.ModuleDict({"of both": model}))
    return [zshard.num_parameters(part, trainable_only=t) for part in parts for t in (False, True)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_count_equals_the_plain_model(combination):
    expected = counts(TiedAndFrozen())
    total = sum(p.numel() for p in TiedAndFrozen().parameters())
    assert expected[:2] == [total, total - 99]
    model = wrapped(TiedAndFrozen, combination, auto_wrap_policy={nn.Linear})
    assert counts(model) == expected and f" {total:,} " in units_table(model)[-1]
    model(torch.arange(4)).sum().backward()
    assert counts(model) == expected
    with FSDP.summon_full_params(model):
        assert counts(model) == expected
    with torch.no_grad():
        model(torch.arange(4))
    assert counts(model) == expected


class Counting(nn.Sequential):
    """Counts as transformers' models do."""

    def num_parameters(self):
        return sum(p.numel() for _, p in self.named_parameters())


@on_ranks(2)
def test_non_unit_submodules_count_full_parameters():
    import zshard.integrations.transformers  # noqa: F401 - as FSDP() does if transformers is imported

    model = FSDP(nn.Sequential(Counting(nn.Linear(7, 7))), auto_wrap_policy=None)
    assert model[0].num_parameters() == 56


# --- extensions ------------------------------------------------------------------------------------


class Scaled(nn.Linear):
    """A library's layer: its weight has a scale that is not a parameter."""

    def __init__(self, scale=2.0):
        super().__init__(4, 4, bias=False)
        self.weight.scale = torch.tensor([scale])

    def forward(self, x):
        self.seen = self.weight.dtype
        return super().forward(x.to(self.weight.dtype)) * self.weight.scale


class OfScales(Extension):
    """The extension that such a library needs."""

    def methods(self, original):
        return {"describe": lambda model: "sharded"} if issubclass(original, Scaled) else {}

    def check(self, name, ref):
        if self.tensors(ref.param) and not ref.param.scale:
            raise ValueError(f"parameter '{name}' has no scale")

    def keeps_dtype(self, ref):
        return bool(self.tensors(ref.param))

    def tensors(self, param):
        return [param.scale] if hasattr(param, "scale") else []

    def finish(self, model):
        model.finished = True


@on_ranks(2)
def test_an_integration_adds_to_sharding():
    EXTENSIONS.append(OfScales())
    try:
        low = zshard.MixedPrecision(torch.bfloat16)
        model = FSDP(Scaled(1.0 + dist.get_rank()), mixed_precision=low)
        with pytest.raises(ValueError, match="parameter 'weight' has no scale"):
            FSDP(Scaled(0.0))
    finally:
        EXTENSIONS.pop()
    assert model.describe() == "sharded" and model.finished
    assert float(model.weight.scale) == 1.0, "attached tensors come from rank 0"
    model(torch.ones(1, 4))
    assert model.seen == torch.float32
