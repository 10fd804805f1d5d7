"""zshard.Muon against DDP with torch.optim.Muon, bit for bit, under every strategy and transport.

test_whole_matrix.py has its state, and the parts that it shares with WholeMatrix.
"""

import copy
import functools
import itertools

import pytest
import torch
from compare import assert_same
from models import CASES, COMBINATIONS, Case, make
from optim_cases import muon
from scenario import Scenario
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP
from zshard.extras.optimizers.matrices import hidden_matrices
from zshard.extras.optimizers.newton_schulz import orthogonalized

# Over shm a shard is a number of pages: matrices must be larger for their rows to be shared out.

OPTIONS = [
    {},
    {"nesterov": False, "momentum": 0.8, "weight_decay": 0.0},
    {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 2, "lr": torch.tensor(0.02)},
]
EACH_WAY = pytest.mark.parametrize("transport", ["shm", "c10d"])


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
@pytest.mark.parametrize("name", ["wide", "mlp", "tied", "frozen", "unused", "attention"])
@on_ranks(2)
def test_bit_identical_to_ddp(name, combination):
    Scenario(name, combination, muon()).same()


@pytest.mark.parametrize("number", range(1, len(OPTIONS)))
@on_ranks(2)
def test_options(number):
    Scenario("wide", optimizer=muon(**OPTIONS[number])).same()


@on_ranks(3, 4)
def test_strategies_agree():
    ways = [("full_shard", "shm"), ("no_shard", "shm"), ("full_shard", "c10d")]
    first, *others = [Scenario("wide", way, muon()).sharded(None).state() for way in ways]
    for ours in others:
        assert_same(ours, first, "the model")


def linears(*sizes, dtype=torch.float32):
    """A case of linear layers; the last one is the head."""
    layers = list(itertools.pairwise(sizes))
    return Case(
        lambda: nn.Sequential(*(nn.Linear(*each) for each in layers)).to(dtype),
        lambda generator: torch.randn(8, sizes[0], generator=generator).to(dtype),
        None,
    )


@EACH_WAY
@on_ranks(2)
def test_bfloat16_parameters(transport):
    """All ranks have the same batch: DDP would sum other batches' gradients in bfloat16."""
    # Tall, wide and square; whole vectors, since torch rounds the rest of a tensor otherwise.
    case = linears(64, 128, 64, 64, 64, dtype=torch.bfloat16)
    scenario = Scenario(case, ("full_shard", transport), muon(lr=0.02))
    ours = scenario.sharded()
    ours.rank = 0
    assert_same(ours.go(3).state(), scenario.plain(3).state(), "the training")


def test_parameters_and_gradients_that_are_not_contiguous():
    results = []
    for cls in (torch.optim.Muon, zshard.Muon):
        torch.manual_seed(0)
        values = torch.randn(8, 9).t(), torch.randn(6, 8)[:, ::2], torch.randn(6, 4)
        params = [nn.Parameter(each) for each in values]
        optimizer = cls(params, lr=0.1)
        for _ in range(2):
            for param in params:
                param.grad = torch.randn(param.shape[::-1]).t()
            optimizer.step()
        results.append(params)
    assert_same(*results, "the matrices")


@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
def test_schedulers_that_cycle_the_momentum(name):
    results = []
    for cls in (torch.optim.Muon, zshard.Muon):
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(8, 6))
        optimizer = cls([param], lr=0.1)
        if cls is zshard.Muon:
            rest = {"params": [nn.Parameter(torch.ones(3))], "use_muon": False}
            optimizer.add_param_group(rest)
        arguments = (0.1, 10) if name == "OneCycleLR" else (0.01, 0.1)
        scheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, *arguments)
        for step in range(3):
            for group in optimizer.param_groups:
                for each in group["params"]:
                    each.grad = torch.full_like(each, step - 1.5)
            optimizer.step()
            scheduler.step()
        results.append((param, optimizer.param_groups[0]["momentum"]))
    assert results[0][1] != 0.95
    assert_same(*results, "the matrix and the momentum")


# --- what Muon updates ----------------------------------------------------------------------------


def names_of(model, optimizer):
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)] for g in optimizer.param_groups if g["use_muon"] for p in g["params"]}


@pytest.mark.parametrize("name", ["net", "tied", "attention", "conv", "recurrent"])
def test_choice(name):
    """Embeddings, heads, convolutions, recurrent weights, norms and biases are AdamW's."""
    model = CASES[name].make()
    chosen = names_of(model, zshard.Muon(model))
    expected = {
        "net": {n for n, _ in model.named_parameters() if n.endswith(("up.weight", "down.weight"))},
        "tied": {f"twins.{i}.one.weight" for i in range(3)},
        "attention": {
            f"encoder.layers.{i}.{each}"
            for i in range(2)
            for each in (
                *("self_attn.in_proj_weight", "self_attn.out_proj.weight"),
                *("linear1.weight", "linear2.weight"),
            )
        },
        "conv": set(),
        "recurrent": set(),
    }
    assert chosen == expected[name]


def test_choice_is_printed_once(capsys):
    zshard.extras.optimizers.muon._announce.cache_clear()
    for _ in range(2):
        zshard.Muon(CASES["net"].make())
    assert capsys.readouterr().err.count("Muon updates 12 matrices") == 1


def test_param_groups_choose():
    model = CASES["net"].make()
    head = {"params": [model.head.weight], "lr": 0.5}
    rest = {"params": [model.embed.weight], "use_muon": False, "betas": (0.8, 0.9)}
    optimizer = zshard.Muon([head, rest], lr=0.1, adamw={"lr": 0.2})
    first, second = optimizer.param_groups
    assert (first["lr"], first["momentum"], "betas" in first) == (0.5, 0.95, False)
    assert (second["lr"], second["betas"], "momentum" in second) == (0.2, (0.8, 0.9), False)


# --- matrices that consist of several -------------------------------------------------------------


def trained_with(split, parts, dim, other=12, dtype=torch.float32):
    """Train a matrix that consists of `parts` with the option, and separate matrices."""
    torch.manual_seed(1)
    shape = (sum(parts), other) if dim == 0 else (other, sum(parts))
    whole = nn.Parameter(torch.randn(shape).to(dtype))
    pieces = [nn.Parameter(each.clone()) for each in whole.detach().split(parts, dim)]
    pieces = [nn.Parameter(each.detach().contiguous()) for each in pieces]
    optimizers = [zshard.Muon([whole], lr=0.05, split=split), torch.optim.Muon(pieces, lr=0.05)]
    for _ in range(3):
        whole.grad = torch.randn_like(whole)
        for piece, grad in zip(pieces, whole.grad.split(parts, dim), strict=True):
            piece.grad = grad.contiguous()
        for each in optimizers:
            each.step()
    return whole.detach(), torch.cat([each.detach() for each in pieces], dim)


BLOCKS = [
    (3, [6, 6, 6], 0),
    ((24, 4, 4), [24, 4, 4], 0),
    (("columns", 3), [6, 6, 6], 1),
    (["columns", 2], [20, 20], 1),
    (("columns", 1), [20], 1),
    # The matrix is tall and its blocks are not, or the reverse: torch rounds one of them otherwise.
    (3, [32] * 3, 0, 64, torch.bfloat16),
    (("columns", 3), [32] * 3, 1, 64, torch.bfloat16),
]


@pytest.mark.parametrize("arguments", BLOCKS)
def test_blocks_are_updated_as_matrices(arguments):
    assert_same(*trained_with(*arguments), "the matrix")


@on_ranks(2)
def test_split_is_in_a_checkpoint(tmp_path):
    model = FSDP(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 3)), auto_wrap_policy=None)
    groups = []
    for split in ({"0.*": ("columns", 4)}, None):
        optimizer = zshard.Muon(model, split=split)
        model(torch.ones(4, 8)).square().mean().backward()
        if split:
            optimizer.step()
            zshard.save(tmp_path / "there", model, optimizer)
        else:
            zshard.load(tmp_path / "there", model, optimizer)
        groups.append(optimizer.state_dict()["param_groups"])
        optimizer.step()
    assert groups[0] == groups[1]


# --- transformers' Conv1D -------------------------------------------------------------------------


def test_conv1d_of_transformers_is_a_matrix_whose_outputs_are_columns():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 24, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    optimizer = zshard.Muon(model, split={"*.c_attn.weight": 3, "*.mlp.c_fc.weight": (8, 16)})
    matrices = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert names_of(model, optimizer) == {f"transformer.h.0.{each}.weight" for each in matrices}
    splits = {group.get("split") for group in optimizer.param_groups}
    assert splits == {None, ("columns", 3), (8, 16)}


def test_a_class_of_another_library_with_that_name_is_not():
    class Conv1D(nn.Module):
        def __init__(self):
            super().__init__()
            self.nf, self.weight = 4, nn.Parameter(torch.ones(4, 4))

    assert not hidden_matrices(nn.Sequential(Conv1D(), nn.Linear(4, 4)))


# --- Newton-Schulz steps --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str
)
@pytest.mark.parametrize("shape", [(300, 520), (520, 300), (256, 256), (1, 7), (128, 130)])
def test_symmetric_products_change_an_update_by_less_than_the_bound(shape, dtype, bound):
    generator = torch.Generator().manual_seed(0)
    for power in (1, 9):  # singular values of about one size, and of several
        update = (torch.randn(shape, generator=generator) ** power).to(dtype)
        options = {"ns_coefficients": (3.4445, -4.7750, 2.0315), "eps": 1e-7, "ns_steps": 5}
        whole, halves = (
            orthogonalized(update.clone(), {**options, "symmetric": symmetric}).double()
            for symmetric in (False, True)
        )
        assert (halves - whole).norm() <= bound * whole.norm()


SYMMETRIC = {"ns_dtype": "float32", "symmetric": True}
SPLITS = [
    ((8, 30, 3), {"split": {"0.*": (20, 5, 5)}}),
    ((8, 30, 3), {"split": {"0.*": ("columns", 4)}}),
    ((260, 300, 3), SYMMETRIC),
]


@EACH_WAY
@pytest.mark.parametrize(("sizes", "options"), SPLITS)
@on_ranks(2, 3)
def test_split_and_symmetric_products_of_shards(transport, sizes, options):
    states = []
    for strategy in ("full_shard", "no_shard"):
        optimizer = functools.partial(zshard.Muon, lr=0.05, **options)
        training = Scenario(linears(*sizes), (strategy, transport), optimizer).sharded(3)
        states.append(training.state())
    assert_same(*states, "the training")


def test_float32_is_close_to_bfloat16():
    results = []
    for dtype in ("bfloat16", "float32"):
        model = make(lambda: nn.Sequential(nn.Linear(48, 96), nn.Linear(96, 48), nn.Linear(48, 5)))
        optimizer = zshard.Muon(model, lr=0.05, ns_dtype=dtype)
        torch.manual_seed(0)
        model(torch.randn(7, 48)).square().mean().backward()
        optimizer.step()
        results.append(dict(model.named_parameters()))
    assert not torch.equal(results[0]["0.weight"], results[1]["0.weight"])
    torch.testing.assert_close(*results, rtol=0.05, atol=0.02)


def test_ns_dtype_of_a_loaded_state_counts_after_steps():
    optimizer = zshard.Muon([nn.Parameter(torch.ones(48, 24))], ns_dtype="bfloat16")
    fresh = zshard.Muon([nn.Parameter(torch.ones(48, 24))], ns_dtype="float32")
    grad = torch.randn(48, 24, generator=torch.Generator().manual_seed(0))
    params = [each.param_groups[0]["params"][0] for each in (optimizer, fresh)]
    params[0].grad = grad.clone()
    optimizer.step()
    state = optimizer.state_dict()
    state["param_groups"][0]["ns_dtype"] = "float32"
    for each in (optimizer, fresh):
        each.load_state_dict(copy.deepcopy(state))
    with torch.no_grad():
        params[1].copy_(params[0])
    for param, each in zip(params, (optimizer, fresh), strict=True):
        param.grad = grad.flip(0)
        each.step()
    assert_same(*params, "the matrix")
