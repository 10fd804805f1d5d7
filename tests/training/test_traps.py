"""The traps: what sharded training gets silently wrong elsewhere, or hangs on. Each is a test.

Nobody has to know where a trap is tested. TRAPS names the test of each; those that
have no file of their own are below, over both transports.
"""

from __future__ import annotations

import copy
import textwrap

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import CASES, Block, ddp, differences, loss_of, make, train, wrapped
from named import problem_with
from scenarios import WIDTH, Stack, floats, forward_backward, message_of, wrong_in
from spawn import run_ranks
from torch import nn

import zshard
from zshard import FSDP

PARITY = "tests/training/test_parity.py::test_two_ranks_have_the_bits_of_ddp"
GRADS = "tests/training/test_scenarios.py::test_gradients_are_the_mean_of_the_ranks"
UNUSUAL = "tests/training/test_scenarios.py::test_unusual_models"
HERE = "tests/training/test_traps.py"

TRAPS = {
    "clip_grad_norm_ of torch on shards": "tests/optim/test_clip.py::test_the_norm_is_that_of_the_whole_model",
    "training with clipping": "tests/training/test_parity.py::test_clipping_is_by_the_global_norm",
    "its name imported before zshard": f"{HERE}::test_names_imported_before_zshard_give_the_global_norm",
    "clipping of gradients that were replaced": "tests/optim/test_clip.py::test_what_cannot_be_clipped_rightly_is_refused",
    "an inf that one rank alone sees": "tests/optim/test_grad_scaler.py::test_all_ranks_skip_what_one_must",
    "an optimizer made before wrapping": "tests/training/test_semantics.py::test_optimizer_made_before_wrapping_trains",
    "param groups by ndim": "tests/training/test_semantics.py::test_groups_by_ndim",
    "param groups by name and by module": f"{HERE}::test_groups_by_name_and_by_module",
    "unused on all ranks: .grad is None": f"{UNUSUAL}[Unused]",
    "unused on all ranks: no decay, no momentum": f"{PARITY}[unused]",
    "unused on one rank, in a unit that runs": f"{HERE}::test_unused_on_one_rank_counts_as_zero",
    "unused on one rank, in units of its own": "tests/training/test_scenarios.py::test_ranks_may_run_different_units",
    "the same where no right answer exists": f"{HERE}::test_a_unit_that_one_rank_skips_is_right_or_an_error_on_all",
    "ranks that diverge": "tests/ranks/test_failures.py::test_ranks_that_wait_for_each_other_are_told_at_once",
    "a backward that fails on one rank": "tests/ranks/test_failures.py::test_backward_that_fails_on_one_rank_diverges_and_can_be_survived",
    "parameters tied across units": f"{PARITY}[tied]",
    "frozen and trainable in one unit": f"{PARITY}[frozen]",
    "several dtypes in one unit": f"{PARITY}[dtypes]",
    "0-dim and non-contiguous parameters": f"{PARITY}[odds]",
    "all of these in one unit": f"{HERE}::test_all_kinds_of_parameters_in_one_unit",
    "a hybrid mesh with shard size 1": "tests/units/test_hybrid.py::test_a_mesh_of_one_row_or_column",
    "the same with kept parameters": "tests/units/test_kept.py::test_meshes_of_one_row_or_column",
    "a second forward before a backward": f"{GRADS}[two_forwards_one_backward]",
    "two forwards, then their backwards": f"{GRADS}[two_forwards_backwards_the_other_way]",
    "a submodule called twice": f"{UNUSUAL}[CalledTwice]",
    "a submodule called by itself": f"{GRADS}[submodule_by_itself]",
    "retain_graph": f"{GRADS}[retain_graph]",
    "generate": "tests/training/test_architectures.py::test_generation_by_all_ranks",
    "another method than forward": "tests/model/test_forward_methods.py::test_gradients_through_a_method",
    "the same, not registered": f"{HERE}::test_a_method_that_is_not_registered_is_an_error",
    "state_dict is plain": "tests/state_dict/test_state_dict.py::test_names_and_values_are_those_of_the_plain_model",
    "state_dict goes to plain modules and back": "tests/state_dict/test_state_dict.py::test_states_pass_between_strategies_and_plain_models",
    "deepcopy (EMA)": "tests/model/test_deepcopy.py::test_a_moving_average",
    "a parameter read while it is sharded": "tests/wrap/test_reads.py::test_outside_of_forwards_no_operation_gathers",
    "a view kept from a forward": "tests/training/test_semantics.py::test_reading_a_view_from_an_earlier_forward_is_an_error",
    "a penalty over model.parameters()": "tests/training/test_semantics.py::test_penalty_over_parameters_is_right_or_an_error",
    "the supported way to such a penalty": "tests/units/test_unshard.py::test_gradients_are_right_around_unshard[penalty_of_a_held_weight]",
    ".to(), .double() after wrapping": "tests/training/test_training.py::test_cast_after_wrapping_is_an_error",
    "p.data = t": "tests/training/test_training.py::test_replaced_data_is_written_back",
    "changes that cannot be written back": "tests/wrap/test_errors.py::test_changed_parameters_are_named_and_can_be_put_back",
    "load_state_dict(assign=True)": "tests/state_dict/test_state_dict.py::test_assigning_is_refused",
    "auto wrap and MultiheadAttention": "tests/wrap/test_wrap.py::test_nothing_below_a_sealed_module_becomes_a_unit",
    "training of MultiheadAttention": f"{PARITY}[attention]",
    "weights that are read past their module": "tests/wrap/test_reads.py::test_a_forward_that_reaches_past_a_module",
    "deepcopy rebuilds units and hooks": "tests/model/test_deepcopy.py::test_a_copy_is_a_model_of_its_own",
    "deepcopy of a submodule": f"{HERE}::test_a_copied_submodule_does_not_drive_the_original",
    "optimizer.state_dict() on one rank": "tests/state_dict/test_optim_state_errors.py::test_saving_on_one_rank_is_an_error_at_once",
    "an optimizer's state at another number of ranks": "tests/state_dict/test_optim_state.py::test_from_three_ranks_to_two_to_one_and_back",
    "optimizer state after an evaluation": "tests/state_dict/test_optim_state.py::test_after_an_evaluation",
    "models that differ between ranks": "tests/wrap/test_errors.py::test_models_that_differ_are_an_error_on_every_rank",
}  # fmt: skip

COMBINATIONS = [("full_shard", "shm"), ("full_shard", "c10d")]
both_transports = pytest.mark.parametrize("combination", COMBINATIONS)


@pytest.mark.parametrize("trap", TRAPS)
def test_each_trap_has_its_test(trap):
    assert problem_with(TRAPS[trap]) == ""


@pytest.mark.parametrize(
    "reference",
    [
        "tests/optim/test_no.py",
        "tests/lib/named.py",
        f"{HERE}::test_no",
        f"{PARITY}[no]",
        f"{HERE}::floats",
    ],
)
def test_a_test_that_does_not_exist_is_found(reference):
    assert reference in problem_with(reference)


# --- clipping --------------------------------------------------------------------------------------

EARLY = """
    from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

    import torch
    from zshard import FSDP

    for transport in ("shm", "c10d"):
        torch.manual_seed(0)
        model = FSDP(torch.nn.Linear(64, 64), transport=transport)
        model(torch.ones(1, 64)).sum().backward()
        grads = [p.grad for p in model.parameters()]
        whole = (2 * 64 * 64 + 2 * 64) ** 0.5 / 2**0.5  # of ones
        norms = [get_total_norm(grads), clip_grad_norm_(model.parameters(), 1e9)]
        clip_grads_with_norm_(model.parameters(), 1.0, norms[0])
        norms.append(1.0 + whole - get_total_norm(grads))
        assert all(abs(float(norm) - whole) < 1e-3 for norm in norms), (norms, whole)
"""


def test_names_imported_before_zshard_give_the_global_norm(tmp_path):
    """A script that imports torch's clipping functions before zshard clips by the global norm."""
    script = tmp_path / "early.py"
    script.write_text(textwrap.dedent(EARLY))
    run_ranks(script, 2)  # fresh interpreters: elsewhere zshard is imported already


# --- parameter groups ------------------------------------------------------------------------------


def groups_by_name(model):
    """Biases and norms are not decayed, as scripts of transformers have it."""
    plain = ("bias", "norm.weight", "gain")
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if not n.endswith(plain)], "weight_decay": 0.5},
        {"params": [p for n, p in named if n.endswith(plain)], "weight_decay": 0.0},
    ]


def groups_by_module(model):
    """The embedding learns slowly, the head fast."""
    first, last = list(model.embed.parameters()), list(model.head.parameters())
    known = {id(p) for p in (*first, *last)}
    rest = [p for p in model.parameters() if id(p) not in known]
    return [{"params": first, "lr": 0.001}, {"params": rest}, {"params": last, "lr": 0.1}]


def grouped(combination, groups, early):
    """What differs from DDP if the parameters are grouped before or after wrapping."""
    rank, case = dist.get_rank(), CASES["net"]
    plain, model = make(case.make), make(case.make)
    before = groups(model)
    wrapped_model = FSDP(model, strategy=combination[0], transport=combination[1])
    ours = torch.optim.AdamW(before if early else groups(wrapped_model), lr=0.01)
    train(wrapped_model, case, ours, rank)
    train(ddp(plain), case, torch.optim.AdamW(groups(plain), lr=0.01), rank)
    return differences(wrapped_model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("early", [True, False], ids=["before wrapping", "after wrapping"])
@pytest.mark.parametrize("groups", [groups_by_name, groups_by_module])
@both_transports
def test_groups_by_name_and_by_module(pool2, combination, groups, early):
    """Groups hold what they were made for, and each parameter has its group's rate and decay."""
    assert pool2.run(grouped, combination, groups, early) == [[], []]


# --- parameters that are not used --------------------------------------------------------------------


class Branches(nn.Module):
    """A unit of which a rank may leave out a part, and units that a rank may skip."""

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.always = nn.Linear(WIDTH, WIDTH)
            self.sometimes = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, whole):
            x = torch.tanh(self.always(x))
            return x + self.sometimes(x) if whole else x

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Branches.Part() for _ in range(2))
        self.extra = Block(WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, whole=True, skip=False):
        for part in self.parts:
            x = part(x, whole)
        return self.head(x if skip else self.extra(x))


def leave_out_on_rank_1(model, rank):
    loss_of(model(floats(rank), whole=rank == 0)).backward()


def skip_on_rank_1(model, rank):
    loss_of(model(floats(rank), skip=rank == 1)).backward()


BRANCHES = {Branches.Part, Block}


def unused_in_a_unit(combination):
    """What is wrong with gradients of which rank 1 has a part only."""
    return wrong_in(Branches, leave_out_on_rank_1, True, [combination], BRANCHES)


@both_transports
def test_unused_on_one_rank_counts_as_zero(pool2, combination):
    """Parameters that rank 1 does not use get half of rank 0's gradient, and no rank hangs."""
    assert pool2.run(unused_in_a_unit, combination) == [{}, {}]


def skipped_unit(combination):
    """("", what is wrong with the gradients) or (the error, {}) if rank 1 skips a unit; then a step
    that all ranks take."""
    try:
        wrong, error = wrong_in(Branches, skip_on_rank_1, True, [combination], BRANCHES), ""
    except zshard.DivergenceError as raised:
        wrong, error = {}, str(raised)
    after = wrong_in(Branches, forward_backward, True, [combination], BRANCHES)
    return error, wrong, after


@both_transports
def test_a_unit_that_one_rank_skips_is_right_or_an_error_on_all(pool2, combination):
    """Where ranks can run units of their own it is right; elsewhere all ranks are told, by names."""
    results = pool2.run(skipped_unit, combination)
    assert [(wrong, after) for _, wrong, after in results] == [({}, {})] * 2
    errors = [error for error, _, _ in results]
    assert errors == ["", ""] or all(
        word in error
        for error in errors
        for word in ("rank 0", "rank 1", "unit 'extra'", "parameters of")
    )
    assert combination[1] != "shm" or errors == ["", ""]


# --- kinds of parameters -----------------------------------------------------------------------------


class AllKinds(nn.Module):
    """In one unit: tied, frozen, of three dtypes, of no dimension, empty, and not contiguous."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.two = nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight
        self.two.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(()) + 1.0)
        self.frozen_scale = nn.Parameter(torch.rand(()) + 1.0, requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.across = nn.Parameter(torch.randn(5, WIDTH).t())
        self.coarse = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.fine = nn.Linear(5, 3).double()

    def forward(self, x):
        x = torch.tanh(self.two(torch.tanh(self.one(x)))) * self.scale * self.frozen_scale
        x = x @ self.across.contiguous() + self.empty.sum()
        return self.fine((x * self.coarse.float()).double())


def all_kinds(combination):
    return wrong_in(AllKinds, forward_backward, True, [combination], None)


@both_transports
def test_all_kinds_of_parameters_in_one_unit(pool2, combination):
    """The gradient of each is the mean of the ranks', and what is frozen has none."""
    assert pool2.run(all_kinds, combination) == [{}, {}]


# --- methods and copies ------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Has a method that uses the root's own weights."""

    def __init__(self):
        super().__init__()
        self.block = Block(WIDTH)
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def encode(self, x):
        return torch.tanh(self.block(x) @ self.mix)

    def forward(self, x):
        return self.encode(x)


def unregistered(combination):
    """The error of a method that was not registered, and what differs in a forward after it."""
    model, x = wrapped(Scaled, combination, auto_wrap_policy={Block}), floats(dist.get_rank())
    message = message_of(lambda: loss_of(model.encode(x)).backward(), RuntimeError)
    return message, differences(model(x), make(Scaled)(x))


@both_transports
def test_a_method_that_is_not_registered_is_an_error(pool2, combination):
    """A method that uses weights while they are sharded raises; nothing is computed with slices."""
    for message, wrong in pool2.run(unregistered, combination):
        assert "shape" in message or "size" in message
        assert wrong == []


def copied_submodule(combination):
    """What a step of a copied unit does to the model that it was copied from."""
    model, x = wrapped(Stack, combination, auto_wrap_policy={Block}), floats(dist.get_rank())
    before = model.state_dict()
    twin = copy.deepcopy(model.blocks[1])
    assert_same(twin(x), model.blocks[1](x), "the copy's output")
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    loss_of(twin(x)).backward()
    optimizer.step()
    moved = differences(twin.state_dict(), model.blocks[1].state_dict()) != []
    found = differences(model.state_dict(), before)
    found += [name for name, param in model.named_parameters() if param.grad is not None]
    return moved, found


@both_transports
def test_a_copied_submodule_does_not_drive_the_original(pool2, combination):
    """A copy of a unit computes the same, has hooks of its own, and trains by itself."""
    assert pool2.run(copied_submodule, combination) == [(True, [])] * 2
