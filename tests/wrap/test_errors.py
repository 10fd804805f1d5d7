"""Invalid input: each mistake raises a Python exception of the right type that names the argument
and the remedy.

A message is part of the interface, so each test checks for its words. Errors of one process are
tested in a world of one; where ranks differ, the error must be the same on every rank, since a rank
that continued alone would hang.
"""

import os

import pytest
import torch
import torch.distributed as dist
from compare import assert_same, differences
from nursery import fork_ranks
from safetensors.torch import load_file
from spawn import on_ranks, ranks
from torch import nn

import zshard
from zshard import FSDP, DivergenceError
from zshard.ranks.agreement import first_difference


def error_of(function, *args, **kwargs):
    """Return (name of the exception's type, its message) of a call that must fail."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")


def check(outcome, kind, *words):
    """Check that the `outcome` of `error_of` has type `kind`, and that the message contains all
    `words`."""
    name, message = outcome
    assert name == kind.__name__, f"{name}: {message}"
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"


# --- unsupported models ---------------------------------------------------------------------------


def two_linears():
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


class Holder(nn.Module):
    """Its one parameter is `param`."""

    def __init__(self, param, **kwargs):
        super().__init__()
        self.odd = nn.Parameter(param, **kwargs)

    def forward(self):
        return self.odd.sum()


def many_kinds():
    model = nn.Module()
    for i, dtype in enumerate((torch.float32, torch.float64, torch.bfloat16, torch.float16)):
        for trainable in (False, True):
            param = nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=trainable)
            model.register_parameter(f"p{i}_{trainable}", param)
    model.ninth = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    model.forward = lambda: None
    return model


@pytest.mark.parametrize("thing", [None, "model", torch.ones(2), [nn.Linear(1, 1)], nn.Linear])
def test_argument_that_is_not_a_module(thing):
    check(error_of(FSDP, thing), TypeError, "nn.Module", type(thing).__name__)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.int64, torch.bool])
def test_frozen_parameters_may_be_of_any_dtype(dtype):
    values = torch.tensor([0, 1, 1]).to(dtype)
    model = FSDP(Holder(values.clone(), requires_grad=False))
    assert_same(model.odd, values, "the parameter")


def test_sparse_parameters():
    model = Holder(torch.eye(3).to_sparse())
    check(error_of(FSDP, model), ValueError, "'odd'", "not a dense tensor", "ignored_modules")


def test_too_many_dimensions():
    model = Holder(torch.ones([1] * 17))
    check(error_of(FSDP, model), NotImplementedError, "'odd'", "17 dimensions", "16")


def test_too_many_kinds_of_parameters():
    check(error_of(FSDP, many_kinds()), NotImplementedError, "more than 8 combinations", "dtype")


def test_wrapped_class_constructs_plain_modules():
    """Containers do this when they are sliced; the children stay units."""
    model = FSDP(two_linears(), auto_wrap_policy={nn.Linear})
    assert type(type(model[0])(2, 2)) is nn.Linear
    part = model[:1]
    assert type(part) is nn.Sequential and part[0] is model[0] and isinstance(part[0], FSDP)


def test_parameter_shared_with_a_wrapped_module():
    outer = two_linears()
    inner = FSDP(nn.Linear(2, 3))
    outer[0].weight = inner.weight
    outer.append(inner)
    words = ("'0.weight'", "'2.weight'", "already belongs", "once on a module around both")
    check(error_of(FSDP, outer), ValueError, *words)


def test_refused_model_stays_unchanged():
    model = nn.Sequential(nn.Linear(2, 2), Holder(torch.ones(2, dtype=torch.complex64)))
    before = {name: (param, param.clone()) for name, param in model.named_parameters()}
    check(error_of(FSDP, model, auto_wrap_policy={nn.Linear}), ValueError, "'1.odd'")
    assert type(model) is nn.Sequential and type(model[0]) is nn.Linear
    assert not model[0]._forward_pre_hooks and not model[0]._forward_hooks
    for name, param in model.named_parameters():
        assert param is before[name][0]
        assert_same(param, before[name][1], name)
    model.pop(1)
    FSDP(model, auto_wrap_policy={nn.Linear})(torch.ones(1, 2)).sum().backward()


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sharding_strategy", "strategy"])
def test_unknown_strategy(name):
    outcome = error_of(FSDP, two_linears(), **{name: "full_shrad"})
    check(outcome, ValueError, "'full_shrad'", "'full_shard', 'shard_grad_op', 'no_shard'")
    check(outcome, ValueError, "did you mean 'full_shard'?")
    unlike = error_of(FSDP, two_linears(), **{name: "xyz"})
    check(unlike, ValueError, "'xyz', expected one of")
    assert "did you mean" not in unlike[1]


def test_strategy_of_another_type():
    check(error_of(FSDP, two_linears(), strategy=3), TypeError, "strategy must be", "string", "3")


def test_strategy_given_twice():
    outcome = error_of(FSDP, two_linears(), sharding_strategy="no_shard", strategy="no_shard")
    check(outcome, ValueError, "sharding_strategy", "strategy", "not both")


def test_unknown_transport():
    words = ("'tcp'", "'auto', 'shm', 'hosts', 'c10d'")
    check(
        error_of(FSDP, two_linears(), transport="tcp"), ValueError, "transport of a model", *words
    )


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "soon"])
def test_invalid_timeouts(timeout):
    name, message = error_of(FSDP, two_linears(), timeout=timeout)
    assert name in ("ValueError", "TypeError") and "timeout" in message and repr(timeout) in message


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("use_orig_params", False),
    ],
)
def test_unsupported_features_are_refused(argument, value):
    outcome = error_of(FSDP, two_linears(), **{argument: value})
    assert outcome[0] == "NotImplementedError", outcome
    assert argument in outcome[1]


@pytest.mark.parametrize(
    ("argument", "value", "kind"),
    [
        ("mixed_precision", torch.bfloat16, TypeError),
        ("device_mesh", object(), TypeError),
        ("process_group", (None, None), ValueError),
    ],
)
def test_arguments_of_another_kind(argument, value, kind):
    outcome = error_of(FSDP, two_linears(), **{argument: value})
    check(outcome, kind, argument.replace("_", " ").split()[-1])


@pytest.mark.parametrize("given", ["bf16", torch.bfloat16, {"dtype": torch.bfloat16}])
def test_mixed_precision_by_its_dtype(given):
    words = ("mixed_precision", "MixedPrecision(param_dtype=torch.bfloat16)", repr(given))
    check(error_of(FSDP, two_linears(), mixed_precision=given), TypeError, *words)
    check(error_of(zshard.fully_shard, two_linears(), mp_policy=given), TypeError, *words)


@pytest.mark.parametrize(
    ("function", "given", "meant"),
    [
        (FSDP, "transprot", "transport"),
        (FSDP, "stratgy", "strategy"),
        (zshard.FullyShardedDataParallel, "auto_wrap_polcy", "auto_wrap_policy"),
        (zshard.fully_shard, "mp_polcy", "mp_policy"),
        (zshard.DistributedDataParallel, "brodcast_buffers", "broadcast_buffers"),
        (zshard.DistributedDataParallel, "offlod", "offload"),  # one of FSDP()'s
    ],
)
def test_unknown_argument(function, given, meant):
    model = two_linears()
    words = (f"unexpected argument '{given}': did you mean '{meant}'?",)
    check(error_of(function, model, **{given: "shm"}), TypeError, *words)
    assert type(model) is nn.Sequential
    check(error_of(function, model, qqq=1), TypeError, "unexpected argument 'qqq'")


def test_missing_and_positional_arguments_are_pythons_errors():
    check(error_of(FSDP), TypeError, "missing 1 required positional argument: 'module'")
    check(error_of(FSDP, *range(99)), TypeError, "positional arguments but")


@pytest.mark.parametrize("argument", ["ignored_states", "ignored_modules"])
def test_ignored_things_of_another_type(argument):
    outcome = error_of(FSDP, two_linears(), **{argument: ["0.weight"]})
    check(outcome, TypeError, argument, "'0.weight'")


# --- the environment ------------------------------------------------------------------------------

NONE_SET = dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ZSHARD_TIMEOUT"))


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, ("RANK=2", "WORLD_SIZE=2", "torchrun")),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, ("RANK=-1", "WORLD_SIZE=2", "torchrun")),
        ({"RANK": "first", "WORLD_SIZE": "2"}, ("RANK='first'", "not an integer")),
        ({"RANK": "0", "WORLD_SIZE": "two"}, ("WORLD_SIZE='two'", "not an integer")),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ("MASTER_ADDR",)),
    ],
)
def test_inconsistent_environment(monkeypatch, variables, words):
    for name, value in {**NONE_SET, **variables}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    check(error_of(FSDP, two_linears()), ValueError, *words)


def test_environment_of_a_single_rank(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "rank 0 of 1, transport self" in FSDP(two_linears()).summary()


def wrap_here(**kwargs):
    """Return the outcome of wrapping on this rank."""
    model = two_linears()
    return error_of(lambda: FSDP(model, **kwargs))


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"ZSHARD_TIMEOUT": "soon"},
            ("ZSHARD_TIMEOUT must be a positive number", "seconds, got 'soon'"),
        ),
        ({"ZSHARD_TIMEOUT": "-3"}, ("TIMEOUT", "-3", "positive")),
        ({"ZSHARD_TRANSPORT": "tcp"}, ("'tcp'", "'auto', 'shm', 'hosts', 'c10d'")),
    ],
)
def test_bad_settings_are_errors_on_every_rank(variables, words):
    for result in fork_ranks(wrap_here, 2, env=variables, check=True):
        check(result.value, ValueError, *words)


# --- ranks that differ ----------------------------------------------------------------------------


def different(what, model):
    """Change `model` on the rank that should differ."""
    if what == "shape":
        model[1] = nn.Linear(3, 5)
    elif what == "dtype":
        model[1] = model[1].double()
    elif what == "name":
        model[1] = nn.Linear(3, 2, bias=False)
        model[1].register_parameter("offset", nn.Parameter(torch.zeros(2)))
    elif what == "more":
        model[1].register_parameter("scale", nn.Parameter(torch.ones(2)))
    elif what == "fewer":
        model[1].bias = None
    elif what == "requires_grad":
        model[1].weight.requires_grad_(False)
    elif what == "class":
        model[1] = type("Line", (nn.Linear,), {})(3, 2)
    elif what == "buffer":
        model[1].register_buffer("mean", torch.zeros(2))
    elif what == "value":
        with torch.no_grad():
            model[1].weight[1, 2] += 1
    return model


def wrap_different(what, transport):
    """Wrap a model that differs on the last rank; then an equal one, which must work."""
    torch.manual_seed(0)
    model, kwargs = two_linears(), {"auto_wrap_policy": {nn.Linear}, "transport": transport}
    if dist.get_rank() == dist.get_world_size() - 1:
        model = different(what, model)
        if what == "strategy":
            kwargs["strategy"] = "no_shard"
        if what == "policy":
            kwargs["auto_wrap_policy"] = None
    outcome = error_of(FSDP, model, sync_module_states=what != "value", **kwargs)
    assert type(model) is nn.Sequential
    FSDP(two_linears(), transport=transport)(torch.ones(1, 2)).sum().backward()
    return outcome


DIFFERENCES = {
    "shape": ("'1.weight'", "(2, 3)", "(5, 3)"),
    "dtype": ("'1.weight'", "torch.float32", "torch.float64"),
    "name": ("'1.bias'", "'1.offset'"),
    "more": ("'1.scale'",),
    "fewer": ("'1.bias'",),
    "requires_grad": ("'1.weight'", "trainable"),
    "class": ("unit '1'", "Linear", "Line"),
    "buffer": ("buffer '1.mean'",),
    "value": ("the values of '1.weight'",),
    "strategy": ("strategy", "full_shard", "no_shard"),
    "policy": ("unit '0'",),
}


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("what", DIFFERENCES)
@ranks(2)
def test_models_that_differ_are_an_error_on_every_rank(pool, what, transport):
    outcomes = pool.run(wrap_different, what, transport)
    for outcome in outcomes:
        check(outcome, DivergenceError, "differ between ranks", "rank 1", *DIFFERENCES[what])
    assert len(set(outcomes)) == 1, "the ranks name different things"


class Deep(nn.Module):
    """Blocks, which are units, and a head."""

    def __init__(self, widths, head="head"):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for width in widths)
        self.add_module(head, nn.Linear(2, 2))


class Block(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.Linear(2, width), nn.Linear(width, 2))


def linears(number):
    return nn.Sequential(*[nn.Linear(2, 2) for _ in range(number)])


STRUCTURES = {
    "a block more": (
        lambda: Deep([3, 3]),
        lambda: Deep([3, 3, 3]),
        "{there} has unit 'blocks.2' (a Block), which {here} lacks",
    ),
    "a layer more": (
        lambda: linears(2),
        lambda: linears(3),
        "{there} has parameter '2.weight' (shape (2, 2), torch.float32, trainable), which {here} lacks",
    ),
    "another shape": (
        lambda: Deep([3, 3]),
        lambda: Deep([3, 5]),
        "parameter 'blocks.1.0.weight' is shape",
    ),
    "another class": (
        lambda: Deep([3]),
        lambda: type("Wide", (Deep,), {})([3]),
        "unit '(root)' is a ",
    ),
    "another order": (
        lambda: nn.ModuleDict({"a": Block(3), "b": Block(3)}),
        lambda: nn.ModuleDict({"b": Block(3), "a": Block(3)}),
        "unit '{a}' comes before unit '{b}' on rank 0, but after it on rank 1",
    ),
    "another name": (
        lambda: nn.ModuleDict({"a": Block(3)}),
        lambda: nn.ModuleDict({"b": Block(3)}),
        "rank 0 has unit '{a}' (a Block), but rank 1 has unit '{b}' (a Block)",
    ),
}


def wrap_structures(name, rank_of_other):
    usual, other, _ = STRUCTURES[name]
    model = (other if dist.get_rank() == rank_of_other else usual)()
    return error_of(FSDP, model, auto_wrap_policy={Block} if name != "a layer more" else None)


@pytest.mark.parametrize("rank_of_other", [0, 1])
@pytest.mark.parametrize("name", STRUCTURES)
@ranks(2)
def test_unit_that_a_rank_lacks_is_named(pool, name, rank_of_other):
    a, b = "ab" if rank_of_other else "ba"
    here, there = f"rank {1 - rank_of_other}", f"rank {rank_of_other}"
    words = STRUCTURES[name][2].format(here=here, there=there, a=a, b=b)
    for outcome in pool.run(wrap_structures, name, rank_of_other):
        check(outcome, DivergenceError, f"the models differ between ranks: {words}")


def test_first_difference_of_facts_with_one_subject():
    once, twice = [("x", "1")], [("x", "1"), ("x", "1")]
    assert first_difference(once, once, (0, 1)) is None
    assert first_difference(once, twice, (0, 1)) == "rank 1 has x (1), which rank 0 lacks"
    assert first_difference(twice, once, (0, 2)) == "rank 0 has x (1), which rank 2 lacks"


@ranks(3)
def test_differing_rank_is_named(pool):
    for outcome in pool.run(wrap_different, "shape", "shm"):
        check(outcome, DivergenceError, "on rank 0", "on rank 2", *DIFFERENCES["shape"])


# --- parameters that users change -----------------------------------------------------------------

STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")


def change_and_use(what, strategy):
    """Return the next forward's error about a change to a wrapped model; and the output after the
    change is undone."""
    torch.manual_seed(0)
    x = torch.ones(1, 2)
    model = two_linears()
    expected = model(x).detach()
    FSDP(model, strategy=strategy, auto_wrap_policy={nn.Linear})
    param = model[1].weight
    old = param.data.clone()
    if what == "shape":
        param.data = torch.zeros(100)
    elif what == "order":
        param.data = torch.zeros(3, 2)
    elif what == "double":
        model.double()
    elif what == "parameter":
        model[1].weight = nn.Parameter(torch.ones(2, 3))
    outcome = error_of(model, x)
    if what == "parameter":
        model[1].weight = param
    elif what == "double":
        model.float()
    else:
        param.data = old
    return outcome, differences(model(x), expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("shape", ValueError, ("'1.weight'", "shape (100,)", "its full shape (2, 3)")),
        ("order", ValueError, ("'1.weight'", "shape (3, 2)", "its full shape (2, 3)")),
        ("double", ValueError, ("'0.weight'", "changed its dtype", "before FSDP")),
        ("parameter", ValueError, ("'1.weight'", "replaced")),
    ],
)
def test_changed_parameters_are_named_and_can_be_restored(pool2, what, kind, words, strategy):
    for outcome, wrong in pool2.run(change_and_use, what, strategy):
        check(outcome, kind, *words)
        assert wrong == []


@on_ranks(2)
def test_files_in_another_dtype_by_the_remedy(tmp_path):
    dtype = torch.bfloat16
    folder = str(tmp_path)
    model = FSDP(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    expected = model.state_dict()
    model.to(dtype)
    outcome = error_of(model.state_dict)
    model.float()
    zshard.save(f"{folder}/x", model, dtype=dtype)
    found = load_file(f"{folder}/x/model.safetensors")
    wrong = [n for n, value in expected.items() if not found[n].equal(value.to(dtype))]
    check(outcome, ValueError, "zshard.save(path, model, dtype=...), or cast the tensors of")
    assert wrong == []


def test_exceptions_have_the_bases_that_scripts_catch():
    assert issubclass(zshard.PeerTimeoutError, zshard.PeerError)
    for kind in (zshard.PeerError, zshard.DivergenceError, zshard.NcclError):
        assert issubclass(kind, RuntimeError) and kind.__module__ == "zshard" and kind.__doc__


def test_ranks_are_not_set_here():
    assert "RANK" not in os.environ, "the tests above need a process that torchrun did not start"
