"""zshard.Muon against DDP with torch.optim.Muon, bit for bit, under every strategy and transport."""

import copy

import pytest
import torch
from compare import assert_same
from models import CASES, COMBINATIONS, ddp, make, sharded, train
from optim_states import HYBRID, differ, go_on, wrap
from spawn import on_ranks, ranks
from torch import nn

import zshard
from zshard import FSDP
from zshard.extras.optimizers.matrices import hidden_matrices

# Over shm a shard is a number of pages: the matrices must be larger for their rows to be shared out.

OPTIONS = [
    {},
    {"nesterov": False, "momentum": 0.8, "weight_decay": 0.0},
    {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 2, "lr": torch.tensor(0.02)},
]


def torchs(model, **options):
    """torch.optim.Muon for what zshard.Muon chooses, and zshard.AdamW for the rest, as one."""
    hidden = hidden_matrices(model)
    matrices = [p for p in model.parameters() if id(p) in hidden]
    rest = [p for p in model.parameters() if id(p) not in hidden]
    return Pair(torch.optim.Muon(matrices, **options), zshard.AdamW(rest))


class Pair:
    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def zero_grad(self):
        for each in self.optimizers:
            each.zero_grad()

    def step(self):
        for each in self.optimizers:
            each.step()


def full(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def by_ddp(name, rank, **options):
    case = CASES[name]
    model = make(case.make)
    twin = ddp(model, find_unused_parameters=case.unused)
    losses = train(twin, case, torchs(model, **options), rank)
    return losses, full(model)


def compares(name, combination, options):
    case, rank = CASES[name], torch.distributed.get_rank()
    options = {"lr": 0.05, **options}
    model = sharded(name, combination)
    optimizer = zshard.Muon(model, **options)
    losses, values = train(model, case, optimizer, rank), full(model)
    expected, theirs = by_ddp(name, rank, **options)
    assert losses == expected
    assert_same(values, theirs, f"{name} over {combination}")


@ranks(2)
@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
@pytest.mark.parametrize("name", ["wide", "mlp", "tied", "frozen", "unused", "attention"])
def test_bit_identical_to_ddp(pool, name, combination):
    pool.run(compares, name, combination, {})


@ranks(2)
@pytest.mark.parametrize("number", range(1, len(OPTIONS)))
def test_options(pool, number):
    pool.run(compares, "wide", ("full_shard", "shm"), OPTIONS[number])


def values_after(strategy, transport, **options):
    case = CASES["wide"]
    model = FSDP(make(case.make), strategy=strategy, transport=transport, **options)
    train(model, case, zshard.Muon(model, lr=0.05), torch.distributed.get_rank())
    return full(model)


@ranks(3, 4)
def test_strategies_agree(pool):
    wanted = [("full_shard", "shm"), ("no_shard", "shm"), ("full_shard", "c10d")]
    first, *others = [pool.run(values_after, *each) for each in wanted]
    for ours in others:
        for a, b in zip(first, ours, strict=True):
            assert_same(a, b, "the model")


def values_of_hybrid(combination):
    case = CASES["wide"]
    model = wrap("wide", combination)
    train(model, case, zshard.Muon(model, lr=0.05), torch.distributed.get_rank())
    return full(model)


@pytest.mark.parametrize("combination", HYBRID)
def test_hybrid_agrees(pool4, combination):
    ours = pool4.run(values_of_hybrid, combination)
    theirs = pool4.run(values_after, "full_shard", "c10d")
    for a, b in zip(ours, theirs, strict=True):
        assert_same(a, b, "the model")


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_bfloat16_parameters(transport):
    """All ranks have the same batch: DDP would sum other batches' gradients in bfloat16."""
    found = []
    for shards in (True, False):
        torch.manual_seed(0)
        # Tall, wide and square; whole vectors, since torch rounds the rest of a tensor otherwise.
        layers = [nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 64)]
        model = nn.Sequential(*layers).to(torch.bfloat16)
        model = FSDP(model, transport=transport, auto_wrap_policy=None) if shards else model
        matrices, biases = [m.weight for m in model], [m.bias for m in model]
        groups = [{"params": matrices}, {"params": biases, "use_muon": False}]
        optimizer = (
            zshard.Muon(groups, lr=0.02)
            if shards
            else Pair(torch.optim.Muon(matrices, lr=0.02), zshard.AdamW(biases))
        )
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(8, 64, generator=generator).to(torch.bfloat16)
            optimizer.zero_grad()
            model(x).float().square().mean().backward()
            optimizer.step()
        found.append(full(model))
    assert_same(*found, "the model")


def test_parameters_and_gradients_that_are_not_contiguous():
    found = []
    for cls in (torch.optim.Muon, zshard.Muon):
        torch.manual_seed(0)
        params = [
            nn.Parameter(torch.randn(8, 9).t()),
            nn.Parameter(torch.randn(6, 8)[:, ::2]),
            nn.Parameter(torch.randn(6, 4)),
        ]
        optimizer = cls(params, lr=0.1)
        for _ in range(2):
            for param in params:
                param.grad = torch.randn(param.shape[::-1]).t()
            optimizer.step()
        found.append(params)
    for theirs, ours in zip(*found, strict=True):
        assert_same(ours.detach(), theirs.detach(), "the matrix")


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
]


@pytest.mark.parametrize(("split", "parts", "dim"), BLOCKS)
def test_blocks_are_updated_as_matrices(split, parts, dim):
    assert_same(*trained_with(split, parts, dim), "the matrix")


@pytest.mark.parametrize(("split", "dim"), [(3, 0), (("columns", 3), 1)])
def test_tall_blocks_in_bfloat16_are_rounded_as_torch_does(split, dim):
    """The matrix is tall and its blocks are not, or the reverse."""
    assert_same(*trained_with(split, [32] * 3, dim, 64, torch.bfloat16), "the matrix")


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("split", [(20, 5, 5), ("columns", 4)])
@on_ranks(2, 3)
def test_split_of_shards(transport, split):
    found = []
    for strategy in ("full_shard", "no_shard"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 30, bias=False), nn.Linear(30, 3))
        model = FSDP(model, strategy=strategy, transport=transport, auto_wrap_policy=None)
        optimizer = zshard.Muon(model, lr=0.05, split={"0.*": split})
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            model(torch.randn(4, 8, generator=generator)).square().mean().backward()
            optimizer.step()
        found.append(full(model))
    assert_same(*found, "the model")


@on_ranks(2)
def test_split_is_in_a_checkpoint(tmp_path):
    path = str(tmp_path / "there")
    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 3))
    model = FSDP(model, auto_wrap_policy=None)
    found = []
    for split in ({"0.*": ("columns", 4)}, None):
        optimizer = zshard.Muon(model, split=split)
        model(torch.ones(4, 8)).square().mean().backward()
        if split:
            optimizer.step()
            zshard.save(path, model, optimizer)
        else:
            zshard.load(path, model, optimizer)
        found.append(optimizer.state_dict())
        optimizer.step()
    assert found[0]["param_groups"] == found[1]["param_groups"]


# --- transformers' Conv1D -------------------------------------------------------------------------


def gpt2(**options):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=24, n_layer=1, n_head=2, **options
    )
    return transformers.GPT2LMHeadModel(config)


def test_conv1d_of_transformers_is_a_matrix_whose_outputs_are_columns():
    model = gpt2()
    optimizer = zshard.Muon(model, split={"*.c_attn.weight": 3, "*.mlp.c_fc.weight": (8, 16)})
    chosen = names_of(model, optimizer)
    assert chosen == {
        f"transformer.h.0.{each}.weight"
        for each in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    assert {group.get("split") for group in optimizer.param_groups} == {
        *(None, ("columns", 3), (8, 16))
    }


def test_a_class_of_another_library_with_that_name_is_not():
    class Conv1D(nn.Module):
        def __init__(self):
            super().__init__()
            self.nf, self.weight = 4, nn.Parameter(torch.ones(4, 4))

    assert not hidden_matrices(nn.Sequential(Conv1D(), nn.Linear(4, 4)))


def gpt2_like_torch(transport):
    """Against torch.optim.Muon over separate matrices for queries, keys and values."""
    torch.manual_seed(0)
    plain = gpt2(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    model = FSDP(copy.deepcopy(plain), transport=transport)
    ours = zshard.Muon(model, lr=0.05, split={"*.c_attn.weight": 3})
    fused = plain.transformer.h[0].attn.c_attn.weight
    pieces = [nn.Parameter(each.contiguous()) for each in fused.detach().split(24, 1)]
    hidden = hidden_matrices(plain)
    others = [p for p in plain.parameters() if id(p) in hidden and p is not fused]
    theirs = Pair(
        torch.optim.Muon([*others, *pieces], lr=0.05),
        zshard.AdamW([p for p in plain.parameters() if id(p) not in hidden]),
    )
    ids = torch.arange(16).view(2, 8)  # the same on all ranks
    for _ in range(2):
        for each, optimizer in ((model, ours), (plain, theirs)):
            each.zero_grad()
            each(input_ids=ids, labels=ids).loss.backward()
            if each is plain:
                for piece, grad in zip(pieces, fused.grad.split(24, 1), strict=True):
                    piece.grad = grad.contiguous()
            optimizer.step()
        fused.data.copy_(torch.cat([piece.detach() for piece in pieces], 1))
    assert_same(full(model), full(plain), "the model")


@ranks(2)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_gpt2_has_the_numbers_of_separate_matrices(pool, transport):
    pytest.importorskip("transformers", reason="transformers is not installed")
    pool.run(gpt2_like_torch, transport)


# --- state ----------------------------------------------------------------------------------------


def saves(path, transport):
    model = sharded("wide", ("full_shard", transport))
    optimizer = zshard.Muon(model, lr=0.05)
    train(model, CASES["wide"], optimizer, 0)
    zshard.save(path, model, optimizer)
    return optimizer.state_dict(), go_on("wide", model, optimizer)


def loads(path, transport, by_path):
    model = sharded("wide", ("full_shard", transport), seed=2)
    optimizer = zshard.Muon(model, lr=0.9)
    zshard.load(path, model, optimizer)
    if not by_path:  # through a state dict
        state = optimizer.state_dict()
        optimizer = zshard.Muon(model, lr=0.8)
        optimizer.load_state_dict(state)
    return optimizer.state_dict()


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("by_path", [True, False])
def test_saved_at_2_ranks_loads_at_3(pool2, pool3, tmp_path, transport, by_path):
    (saved, _), *_ = pool2.run(saves, str(tmp_path / "there"), transport)
    for found in pool3.run(loads, str(tmp_path / "there"), transport, by_path):
        assert not differ(found, saved)
        assert found["param_groups"] == saved["param_groups"]


def continues(transport, theirs):
    """Take the state of torch's optimizer over the plain model, and return it."""
    case = CASES["wide"]
    model = sharded("wide", ("full_shard", transport))
    hidden = hidden_matrices(model)
    optimizer = zshard.Muon([p for p in model.parameters() if id(p) in hidden], lr=0.05)
    optimizer.load_state_dict(theirs)
    train(model, case, optimizer, 0, steps=2)
    return optimizer.state_dict(), full(model)


def test_state_is_torchs(pool2):
    model = make(CASES["wide"].make)
    hidden = hidden_matrices(model)
    optimizer = torch.optim.Muon([p for p in model.parameters() if id(p) in hidden], lr=0.05)
    train(model, CASES["wide"], optimizer, 0, steps=2)
    before = copy.deepcopy(optimizer.state_dict())
    state, values = pool2.run(continues, "shm", before)[0]
    model = make(CASES["wide"].make)
    optimizer = torch.optim.Muon([p for p in model.parameters() if id(p) in hidden_matrices(model)])
    optimizer.load_state_dict(before)
    train(model, CASES["wide"], optimizer, 0, steps=2)
    assert_same(values, full(model), "the model")
    assert not differ(state["state"], optimizer.state_dict()["state"])
    optimizer.load_state_dict(state)


def momentum_of_shards(name, combination):
    model = sharded(name, combination)
    optimizer = zshard.Muon(model, lr=0.05)
    train(model, CASES[name], optimizer, 0, steps=1)
    found = [state.get("momentum_buffer") for state in optimizer.state.values()]
    return sum(each.numel() for each in found if each is not None)


def test_momentum_is_sharded(pool3):
    model = CASES["wide"].make()
    total = sum(p.numel() for p in model.parameters() if id(p) in hidden_matrices(model))
    held = pool3.run(momentum_of_shards, "wide", ("full_shard", "shm"))
    assert sum(held) == total
    assert max(held) < total / 2
