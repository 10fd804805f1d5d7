"""Invalid input of FSDP(): each mistake raises an exception of the right type that names the argument
and the remedy. Where ranks differ, all get the same error: a rank that continued alone would hang."""

import functools
import os

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from nursery import fork_ranks
from rows import all_rows
from safetensors.torch import load_file
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP, DivergenceError
from zshard.ranks.agreement import first_difference


def refused(kind, call, *words):
    """Fail unless the call raises an exception of just this type, with all words in its message."""
    with pytest.raises(kind) as caught:
        call()
    assert caught.type is kind
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    return str(caught.value)


def two_linears():
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


class Holder(nn.Module):
    """Its one parameter is `odd`."""

    def __init__(self, param, **kwargs):
        super().__init__()
        self.odd = nn.Parameter(param, **kwargs)


def many_kinds():
    model = nn.Module()
    for i, dtype in enumerate((torch.float32, torch.float64, torch.bfloat16, torch.float16)):
        for trainable in (False, True):
            param = nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=trainable)
            model.register_parameter(f"p{i}_{trainable}", param)
    model.ninth = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    model.forward = lambda: None
    return model


def shared_with_a_wrapped_module():
    outer, inner = two_linears(), FSDP(nn.Linear(2, 3))
    outer[0].weight = inner.weight
    return outer.append(inner)


def linears(**options):
    return lambda: FSDP(two_linears(), **options)


BF16 = "MixedPrecision(param_dtype=torch.bfloat16)"
REFUSED = [
    *[
        (TypeError, lambda thing=thing: FSDP(thing), "nn.Module", type(thing).__name__)
        for thing in (None, "model", torch.ones(2), [nn.Linear(1, 1)], nn.Linear)
    ],
    (ValueError, lambda: FSDP(Holder(torch.eye(3).to_sparse())), "'odd'", "not a dense tensor"),
    (NotImplementedError, lambda: FSDP(Holder(torch.ones([1] * 17))), "'odd'", "17 dimensions"),
    (NotImplementedError, lambda: FSDP(many_kinds()), "more than 8 combinations", "dtype"),
    (
        ValueError,
        lambda: FSDP(shared_with_a_wrapped_module()),
        *("'0.weight'", "'2.weight'", "already belongs", "once on a module around both"),
    ),
    *[
        (ValueError, linears(**{name: "full_shrad"}), "'full_shrad'", "did you mean 'full_shard'?")
        for name in ("sharding_strategy", "strategy")
    ],
    (ValueError, linears(strategy="xyz"), "'xyz', expected one of 'full_shard', 'shard_grad_op'"),
    (TypeError, linears(strategy=3), "strategy must be", "string", "3"),
    (ValueError, linears(sharding_strategy="no_shard", strategy="no_shard"), "not both"),
    (ValueError, linears(transport="tcp"), "'tcp'", "'auto', 'shm', 'hosts', 'c10d'"),
    *[
        (ValueError, linears(timeout=value), "timeout", repr(value))
        for value in (0, -1, torch.nan, "soon")
    ],
    (NotImplementedError, linears(use_orig_params=False), "use_orig_params"),
    (TypeError, linears(device_mesh=object()), "mesh"),
    (ValueError, linears(process_group=(None, None)), "group"),
    (TypeError, linears(ignored_states=["0.weight"]), "ignored_states", "'0.weight'"),
    (TypeError, linears(ignored_modules=["0.weight"]), "ignored_modules", "'0.weight'"),
    *[
        (TypeError, call, "mixed_precision", BF16, repr(value))
        for value in ("bf16", torch.bfloat16, {"dtype": torch.bfloat16})
        for call in (
            linears(mixed_precision=value),
            lambda value=value: zshard.fully_shard(two_linears(), mp_policy=value),
        )
    ],
    (ValueError, linears(device_id="gpu"), "is not a valid device"),
    (ValueError, linears(device_id="xpu"), "CUDA"),
    (TypeError, linears(device_id=True), "index"),
    *[
        (ValueError, linears(**{name: value}), name)  # what only an extra takes
        for name, value in [
            *(("deterministic", ""), ("micro_batches", 0), ("nonfinite", ""), ("nonfinite", False)),
            *(("check_replicas", False), ("check_replicas", None)),
        ]
    ],
    *[
        (RuntimeError, linears(device_id=device), "device_id=", "run `python -m zshard doctor`")
        for device in (0, "cuda", torch.device("cuda", 1))
        if not torch.cuda.is_available()
    ],
    (TypeError, lambda: FSDP(), "missing 1 required positional argument: 'module'"),
    (TypeError, lambda: FSDP(*range(99)), "positional arguments but"),
]


def test_each_mistake_is_named():
    with all_rows() as row:
        for number, (kind, call, *words) in enumerate(REFUSED):
            with row(number, *words):
                refused(kind, call, *words)


UNKNOWN = [
    (FSDP, "transprot", "transport"),
    (FSDP, "stratgy", "strategy"),
    (zshard.FullyShardedDataParallel, "auto_wrap_polcy", "auto_wrap_policy"),
    (zshard.fully_shard, "mp_polcy", "mp_policy"),
    (zshard.DistributedDataParallel, "brodcast_buffers", "broadcast_buffers"),
    (zshard.DistributedDataParallel, "offlod", "offload"),  # one of FSDP()'s
]


def test_unknown_argument():
    model = two_linears()
    for function, written, meant in UNKNOWN:
        text = f"unexpected argument '{written}': did you mean '{meant}'?"
        refused(TypeError, functools.partial(function, model, **{written: "shm"}), text)
        refused(TypeError, functools.partial(function, model, qqq=1), "unexpected argument 'qqq'")
    assert type(model) is nn.Sequential


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.int64, torch.bool])
def test_frozen_parameters_may_be_of_any_dtype(dtype):
    values = torch.tensor([0, 1, 1]).to(dtype)
    assert_same(FSDP(Holder(values.clone(), requires_grad=False)).odd, values, "the parameter")


def test_wrapped_class_constructs_plain_modules():
    """Containers do this when they are sliced; the children stay units."""
    model = FSDP(two_linears(), auto_wrap_policy={nn.Linear})
    assert type(type(model[0])(2, 2)) is nn.Linear
    part = model[:1]
    assert type(part) is nn.Sequential and part[0] is model[0] and isinstance(part[0], FSDP)


def test_refused_model_stays_unchanged():
    model = nn.Sequential(nn.Linear(2, 2), Holder(torch.ones(2, dtype=torch.complex64)))
    before = {name: (param, param.clone()) for name, param in model.named_parameters()}
    refused(ValueError, lambda: FSDP(model, auto_wrap_policy={nn.Linear}), "'1.odd'")
    assert type(model) is nn.Sequential and type(model[0]) is nn.Linear
    assert not model[0]._forward_pre_hooks and not model[0]._forward_hooks
    for name, param in model.named_parameters():
        assert param is before[name][0]
        assert_same(param, before[name][1], name)
    model.pop(1)
    FSDP(model, auto_wrap_policy={nn.Linear})(torch.ones(1, 2)).sum().backward()


# --- the environment ------------------------------------------------------------------------------

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ZSHARD_TIMEOUT")
ENVIRONMENTS = [
    ({"RANK": "2", "WORLD_SIZE": "2"}, ("RANK=2", "WORLD_SIZE=2", "torchrun")),
    ({"RANK": "-1", "WORLD_SIZE": "2"}, ("RANK=-1", "WORLD_SIZE=2", "torchrun")),
    ({"RANK": "first", "WORLD_SIZE": "2"}, ("RANK='first'", "not an integer")),
    ({"RANK": "0", "WORLD_SIZE": "two"}, ("WORLD_SIZE='two'", "not an integer")),
    ({"RANK": "0", "WORLD_SIZE": "2"}, ("MASTER_ADDR",)),
]


def test_inconsistent_environment():
    assert "RANK" not in os.environ, "this needs a process that torchrun did not start"
    with all_rows() as row:
        for variables, words in ENVIRONMENTS:
            with row(*variables.values()), pytest.MonkeyPatch.context() as patch:
                for name in VARIABLES:
                    patch.delenv(name, raising=False)
                for name, value in variables.items():
                    patch.setenv(name, value)
                refused(ValueError, linears(), *words)


def test_environment_of_a_single_rank(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "rank 0 of 1, transport self" in FSDP(two_linears()).summary()


SETTINGS = [
    ({"ZSHARD_TIMEOUT": "soon"}, ("ZSHARD_TIMEOUT must be a positive number", "got 'soon'")),
    ({"ZSHARD_TIMEOUT": "-3"}, ("TIMEOUT", "-3", "positive")),
    ({"ZSHARD_TRANSPORT": "tcp"}, ("'tcp'", "'auto', 'shm', 'hosts', 'c10d'")),
]


@pytest.mark.parametrize(("variables", "words"), SETTINGS)
def test_bad_settings_are_errors_on_every_rank(variables, words):
    wrap = functools.partial(FSDP, two_linears())
    fork_ranks(refused, 2, ValueError, wrap, *words, env=variables, check=True)


# --- ranks that differ ----------------------------------------------------------------------------


def other_layer(layer):
    def change(model):
        model[1] = layer(model[1])

    return change


def adds_a_value(model):
    with torch.no_grad():
        model[1].weight[1, 2] += 1


def renames_the_bias(layer):
    layer = nn.Linear(3, 2, bias=False)
    layer.register_parameter("offset", nn.Parameter(torch.zeros(2)))
    return layer


DIFFERENCES = {
    "shape": (other_layer(lambda _: nn.Linear(3, 5)), "'1.weight'", "(2, 3)", "(5, 3)"),
    "dtype": (other_layer(nn.Module.double), "'1.weight'", "torch.float32", "torch.float64"),
    "name": (other_layer(renames_the_bias), "'1.bias'", "'1.offset'"),
    "more": (
        lambda model: model[1].register_parameter("scale", nn.Parameter(torch.ones(2))),
        "'1.scale'",
    ),
    "fewer": (lambda model: setattr(model[1], "bias", None), "'1.bias'"),
    "requires_grad": (lambda m: m[1].weight.requires_grad_(False), "'1.weight'", "trainable"),
    "class": (
        other_layer(lambda _: type("Line", (nn.Linear,), {})(3, 2)),
        *("unit '1'", "Linear", "Line"),
    ),
    "buffer": (lambda m: m[1].register_buffer("mean", torch.zeros(2)), "buffer '1.mean'"),
    "value": (adds_a_value, "the values of '1.weight'"),
    "strategy": ({"strategy": "no_shard"}, "strategy", "full_shard", "no_shard"),
    "policy": ({"auto_wrap_policy": None}, "unit '0'"),
    "extra": ({"nonfinite": "skip"}, "nonfinite is None on rank 0, but 'skip' on rank 1"),
}


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("what", DIFFERENCES)
@on_ranks(2)
def test_models_that_differ_are_an_error_on_every_rank(what, transport):
    """A model differs on the last rank; then an equal one works."""
    torch.manual_seed(0)
    model, options = two_linears(), {"auto_wrap_policy": {nn.Linear}, "transport": transport}
    change, *words = DIFFERENCES[what]
    if dist.get_rank() == 1:
        if callable(change):
            change(model)
        else:
            options |= change
    wrap = lambda: FSDP(model, sync_module_states=what != "value", **options)  # noqa: E731
    text = refused(DivergenceError, wrap, *words, "differ between ranks", "rank 1")
    texts = [None, None]
    dist.all_gather_object(texts, text)
    assert texts[0] == texts[1], "the ranks name different things"
    assert type(model) is nn.Sequential
    FSDP(two_linears(), transport=transport)(torch.ones(1, 2)).sum().backward()


@on_ranks(3)
def test_differing_rank_is_named():
    model = nn.Sequential(nn.Linear(2, 5 if dist.get_rank() == 2 else 3))
    refused(DivergenceError, lambda: FSDP(model), "differ between ranks", "rank 2")


class Block(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.Linear(2, width), nn.Linear(width, 2))


def blocks(*widths):
    return nn.Sequential(*map(Block, widths))


def in_order(*names):
    return nn.ModuleDict({name: Block(3) for name in names})


STRUCTURES = {  # on one rank, on the other one, the text
    "a block more": (
        lambda: blocks(3, 3),
        lambda: blocks(3, 3, 3),
        "{there} has unit '2' (a Block), which {here} lacks",
    ),
    "a layer more": (
        two_linears,
        lambda: two_linears().append(nn.Linear(2, 2)),
        "{there} has parameter '2.weight' (shape (2, 2), torch.float32, trainable), which {here} lacks",
    ),
    "another shape": (lambda: blocks(3, 3), lambda: blocks(3, 5), "parameter '1.0.weight' is shape"),
    "another class": (
        lambda: blocks(3),
        lambda: type("Wide", (nn.Sequential,), {})(Block(3)),
        "unit '(root)' is a ",
    ),
    "another order": (
        lambda: in_order("a", "b"),
        lambda: in_order("b", "a"),
        "unit '{a}' comes before unit '{b}' on rank 0, but after it on rank 1",
    ),
    "another name": (
        lambda: in_order("a"),
        lambda: in_order("b"),
        "rank 0 has unit '{a}' (a Block), but rank 1 has unit '{b}' (a Block)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("rank_of_other", [0, 1])
@pytest.mark.parametrize("name", STRUCTURES)
@on_ranks(2)
def test_unit_that_a_rank_lacks_is_named(name, rank_of_other):
    usual, other, text = STRUCTURES[name]
    model = (other if dist.get_rank() == rank_of_other else usual)()
    a, b = "ab" if rank_of_other else "ba"
    here, there = f"rank {1 - rank_of_other}", f"rank {rank_of_other}"
    words = "the models differ between ranks: " + text.format(here=here, there=there, a=a, b=b)
    policy = {Block} if name != "a layer more" else None
    refused(DivergenceError, lambda: FSDP(model, auto_wrap_policy=policy), words)


def test_first_difference_of_facts_with_one_subject():
    once, twice = [("x", "1")], [("x", "1"), ("x", "1")]
    assert first_difference(once, once, (0, 1)) is None
    assert first_difference(once, twice, (0, 1)) == "rank 1 has x (1), which rank 0 lacks"
    assert first_difference(twice, once, (0, 2)) == "rank 0 has x (1), which rank 2 lacks"


# --- parameters that users change -----------------------------------------------------------------

SHAPE = "its full shape (2, 3)"
CHANGES = {  # a script's change, the words of the next forward's error, and the remedy
    "shape": (
        lambda layer: setattr(layer.weight, "data", torch.zeros(100)),
        ("'1.weight'", "shape (100,)", SHAPE),
    ),
    "order": (
        lambda layer: setattr(layer.weight, "data", torch.zeros(3, 2)),
        ("'1.weight'", "shape (3, 2)", SHAPE),
    ),
    "double": (lambda layer: layer.double(), ("'1.weight'", "changed its dtype", "before FSDP")),
    "parameter": (
        lambda layer: setattr(layer, "weight", nn.Parameter(torch.ones(2, 3))),
        ("'1.weight'", "replaced"),
    ),
}


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("what", CHANGES)
@on_ranks(2)
def test_changed_parameters_are_named_and_can_be_restored(what, strategy):
    torch.manual_seed(0)
    x, model = torch.ones(1, 2), two_linears()
    expected = model(x).detach()
    FSDP(model, strategy=strategy, auto_wrap_policy={nn.Linear})
    change, words = CHANGES[what]
    param = model[1].weight
    before = param.data.clone()
    change(model[1])
    refused(ValueError, lambda: model(x), *words)
    model.float()
    model[1].weight = param
    if what in ("shape", "order"):
        param.data = before
    assert_same(model(x), expected, "the output")


@on_ranks(2)
def test_files_in_another_dtype_by_the_remedy(tmp_path):
    model = FSDP(two_linears())
    expected = model.state_dict()
    model.to(torch.bfloat16)
    remedy = "zshard.save(path, model, dtype=...), or cast the tensors of"
    refused(ValueError, model.state_dict, remedy)
    model.float()
    zshard.save(f"{tmp_path}/x", model, dtype=torch.bfloat16)
    low = {name: value.to(torch.bfloat16) for name, value in expected.items()}
    assert_same(load_file(f"{tmp_path}/x/model.safetensors"), low, "the file")


def test_exceptions_have_the_bases_that_scripts_catch():
    assert issubclass(zshard.PeerTimeoutError, zshard.PeerError)
    for kind in (zshard.PeerError, zshard.DivergenceError, zshard.NcclError):
        assert issubclass(kind, RuntimeError) and kind.__module__ == "zshard" and kind.__doc__
