"""What scripts do with a model besides forward, backward, step: each has to come to the right numbers
or to an error that says what to do.

Most tests here are a scenario: forwards and backwards of one rank as a script may do them, on a
plain model and on sharded ones. The sharded gradients must be the mean of the plain ones.
"""

from __future__ import annotations

import functools
import gc
import time
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from models import (
    CASES,
    COMBINATIONS,
    Block,
    Net,
    Unused,
    ddp,
    differences,
    loss_of,
    make,
    mean_grads,
    train,
    whole_grads,
    wrapped,
    wrong_grads,
)
from spawn import run_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zshard
from zshard import FSDP
from zshard.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

WIDTH = 9
FULL = ("full_shard", "shm")


def floats(rank, step=0, rows=4):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


class Stack(nn.Module):
    """Blocks one after another, each a unit."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# --- scenarios: (model, rank) -> None, as a script would have it -----------------------------------


def accumulate(model, rank):
    for step in range(3):
        loss_of(model(floats(rank, step))).backward()


def zero_grad_both_ways(model, rank):
    for step, set_to_none in enumerate((True, False, True, False, False)):
        model.zero_grad(set_to_none=set_to_none)
        loss_of(model(floats(rank, step))).backward()


def accumulate_onto_zeros(model, rank):
    loss_of(model(floats(rank))).backward()
    model.zero_grad(set_to_none=False)
    loss_of(model(floats(rank, 1))).backward()
    loss_of(model(floats(rank, 2))).backward()


def scale_the_gradients_between(model, rank):
    loss_of(model(floats(rank))).backward()
    for param in model.parameters():
        param.grad.mul_(0.5)
    loss_of(model(floats(rank, 1))).backward()


def two_forwards_one_backward(model, rank):
    (loss_of(model(floats(rank))) + loss_of(model(floats(rank, 1)))).backward()


def two_forwards_two_backwards(model, rank):
    first, second = loss_of(model(floats(rank))), loss_of(model(floats(rank, 1)))
    first.backward()
    second.backward()


def two_forwards_backwards_the_other_way(model, rank):
    first, second = loss_of(model(floats(rank))), loss_of(model(floats(rank, 1)))
    second.backward()
    first.backward()


def forward_without_backward(model, rank):
    kept = model(floats(rank, 1))
    loss_of(model(floats(rank))).backward()
    del kept
    model(floats(rank, 2))
    loss_of(model(floats(rank, 3))).backward()


def no_grad_forward_between(model, rank):
    loss = loss_of(model(floats(rank)))
    with torch.no_grad():
        model(floats(rank, 1))
    loss.backward()


def retain_graph(model, rank):
    loss = loss_of(model(floats(rank)))
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()


def evaluate_then_train(model, rank):
    model.eval()
    with torch.no_grad():
        model(floats(rank, 1))
    with torch.inference_mode():
        model(floats(rank, 2))
    model(floats(rank, 3))  # with gradients on, and nobody wants them
    model.train()
    loss_of(model(floats(rank))).backward()


def gradient_of_the_input_only(model, rank):
    x = floats(rank).requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(model(x)), x)
    assert grad.abs().sum() > 0
    assert all(param.grad is None for param in model.parameters())
    loss_of(model(grad)).backward()


def input_that_wants_a_gradient(model, rank):
    x = floats(rank).requires_grad_()
    loss_of(model(x)).backward()
    plain = make(Stack)
    y = floats(rank).requires_grad_()
    loss_of(plain(y)).backward()
    assert torch.equal(x.grad, y.grad)


def autocast(model, rank):
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model(floats(rank))) + loss_of(model(floats(rank, 1)))
    loss.backward()


def nothing_to_learn_from(model, rank):
    """A loss that does not depend on the model on rank 1: this rank's part is zero."""
    output = model(floats(rank))
    (output if rank == 0 else output * 0.0).sum().backward()


def freeze_later(model, rank):
    loss_of(model(floats(rank))).backward()
    model.blocks[1].requires_grad_(False)
    model.head.bias.requires_grad_(False)
    model.zero_grad()
    loss_of(model(floats(rank, 1))).backward()


def freeze_and_thaw(model, rank):
    model.blocks[1].requires_grad_(False)
    loss_of(model(floats(rank))).backward()
    model.blocks[1].requires_grad_(True)
    loss_of(model(floats(rank, 1))).backward()


def square_sum(model):
    return sum(p.square().sum() for p in model.parameters())


def kept_statistics(model, rank):
    """Numbers about the parameters, with history that nobody uses, as scripts log them."""
    kept = []
    for step in range(2):
        kept.append(square_sum(model))
        loss_of(model(floats(rank, step))).backward()
        kept.append(square_sum(model))


def submodule_by_itself(model, rank):
    """A block is called without its root, and its output trained on."""
    loss_of(model.blocks[1](floats(rank))).backward()
    loss_of(model(floats(rank, 1))).backward()


SCENARIOS = [
    (accumulate, False),
    (zero_grad_both_ways, True),
    (accumulate_onto_zeros, False),
    (scale_the_gradients_between, False),
    (two_forwards_one_backward, True),
    (two_forwards_two_backwards, False),
    (two_forwards_backwards_the_other_way, False),
    (forward_without_backward, False),
    (no_grad_forward_between, True),
    (retain_graph, False),
    (evaluate_then_train, True),
    (gradient_of_the_input_only, True),
    (input_that_wants_a_gradient, True),
    (autocast, True),
    (nothing_to_learn_from, True),
    (freeze_later, True),
    (freeze_and_thaw, False),
    (kept_statistics, False),
    (submodule_by_itself, False),
]


def wrong_in(build, run, exact, combinations=COMBINATIONS):
    """{combination: the gradients that are not the mean of the ranks'}; {} if all is right.

    exact: to the bit. Else to 1e-6: where sums of several backwards are reduced one by one, the
    plain model adds them up in another order.
    """
    expected = mean_grads(build, run)
    assert any(grad is not None and grad.abs().sum() > 0 for grad in expected.values())
    found = {}
    for combination in combinations:
        model = wrapped(build, combination)
        run(model, dist.get_rank())
        ours = whole_grads(model)
        if not exact:
            ours = {name: near(ours[name], expected.get(name)) for name in ours}
        wrong = wrong_grads(ours, expected)
        if wrong:
            found[combination] = wrong
    return found


def near(ours, expected):
    """`expected` itself where `ours` is no farther from it than rounding."""
    both = ours is not None and expected is not None
    close = both and torch.allclose(ours, expected, rtol=2e-6, atol=1e-6)
    return expected if close else ours


@pytest.mark.parametrize(("run", "exact"), SCENARIOS)
def test_gradients_are_the_mean_of_the_ranks(pool2, run, exact):
    assert pool2.run(wrong_in, Stack, run, exact) == [{}, {}]


@pytest.mark.parametrize(
    "run",
    [accumulate, two_forwards_backwards_the_other_way, retain_graph, forward_without_backward],
)
def test_gradients_on_three_ranks(pool3, run):
    assert pool3.run(wrong_in, Stack, run, False) == [{}] * 3


# --- models that do something unusual inside -------------------------------------------------------


class CalledTwice(nn.Module):
    """Each block runs twice in a forward, and one once more at the end."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(block(x))
        return self.blocks[0](x)


class Checkpointed(nn.Module):
    """Blocks recomputed in backward, from outside or from inside their unit."""

    def __init__(self, reentrant, inside):
        super().__init__()
        self.blocks = nn.ModuleList(Inside(reentrant) if inside else Block(WIDTH) for _ in range(3))
        self.around = None if inside else reentrant
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        x = x.clone().requires_grad_()  # reentrant checkpoints work only below such an input
        for block in self.blocks:
            x = block(x) if self.around is None else checkpoint(block, x, use_reentrant=self.around)
        return self.head(x)


class Inside(nn.Module):
    """Two blocks in one unit, each recomputed by itself."""

    def __init__(self, reentrant):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.reentrant = reentrant

    def forward(self, x):
        for part in self.parts:
            x = x + checkpoint(self._part, part, x, use_reentrant=self.reentrant)
        return x

    def _part(self, part, x):
        return torch.tanh(part(x))


class CheckpointedInTwoLevels(nn.Module):
    """A recomputed stretch of blocks that are recomputed themselves."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(4))

    def stretch(self, x, begin):
        for block in self.blocks[begin : begin + 2]:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    def forward(self, x):
        for begin in (0, 2):
            x = checkpoint(self.stretch, x, begin, use_reentrant=False)
        return x


Pair = namedtuple("Pair", "first second")


@dataclass
class Result:
    logits: torch.Tensor
    extra: dict


class Outputs(nn.Module):
    """Returns its tensors in containers of a kind; so do its blocks."""

    class Part(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.kind = kind

        def forward(self, x):
            a, b = self.linear(x), self.linear(x * 2)
            return {
                "tuple": (a, b),
                "list": [a, "text", b],
                "dict": {"a": a, "n": 3, "b": b},
                "namedtuple": Pair(a, b),
                "dataclass": Result(a, {"deep": [b, None]}),
                "object": PlainResult(a, b),
            }[self.kind]

    def __init__(self, kind):
        super().__init__()
        self.parts = nn.ModuleList(Outputs.Part(kind) for _ in range(3))

    def forward(self, x):
        for part in self.parts:
            result = part(x)
            first, second = tensors_of(result)
            x = first + second
        return result


class PlainResult:
    def __init__(self, first, second):
        self.first, self.second = first, second


def tensors_of(result):
    if isinstance(result, Result):
        return result.logits, result.extra["deep"][0]
    if isinstance(result, dict):
        return result["a"], result["b"]
    if isinstance(result, PlainResult):
        return result.first, result.second
    return result[0], result[-1]


class Detours(nn.Module):
    """A unit that only sometimes runs, in a root that holds a weight of its own."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x, skip=None, shifted=True):
        for number, block in enumerate(self.blocks):
            if number != skip:
                x = block(x)
        return x + self.shift if shifted else x


def forward_backward(model, rank):
    loss_of(model(floats(rank))).backward()


def use_one_of_the_outputs(model, rank):
    tensors_of(model(floats(rank)))[1].square().mean().backward()


def use_both_outputs(model, rank):
    first, second = tensors_of(model(floats(rank)))
    (first.square().mean() + second.sin().mean()).backward()


def skip_on_rank_1(model, rank):
    loss_of(model(floats(rank), skip=1 if rank == 1 else None)).backward()


def leave_out_the_roots_weight_on_rank_1(model, rank):
    loss_of(model(floats(rank), shifted=rank == 0)).backward()


def skip_another_on_each_rank(model, rank):
    for step in range(2):
        loss_of(model(floats(rank, step), skip=(rank + step) % 3)).backward()


def run_only_a_block_on_rank_1(model, rank):
    loss_of(model.blocks[2](floats(rank)) if rank == 1 else model(floats(rank))).backward()


# (model, arguments, scenario, to the bit?)
UNUSUAL = [
    (CalledTwice, (), forward_backward, True),
    (CalledTwice, (), accumulate, False),
    *((Checkpointed, (reentrant, inside), forward_backward, True)
      for reentrant in (True, False) for inside in (True, False)),
    (Checkpointed, (True, False), two_forwards_one_backward, True),
    (CheckpointedInTwoLevels, (), forward_backward, True),
    (CheckpointedInTwoLevels, (), accumulate, False),
    (Unused, (), forward_backward, True),
    (Unused, (), accumulate, False),
    *((Outputs, (kind,), use_both_outputs, True)
      for kind in ("tuple", "list", "dict", "namedtuple", "dataclass", "object")),
    (Outputs, ("tuple",), use_one_of_the_outputs, True),
    (Detours, (), leave_out_the_roots_weight_on_rank_1, True),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "args", "run", "exact"), UNUSUAL)
def test_unusual_models(pool2, cls, args, run, exact):
    build = functools.partial(cls, *args)
    assert pool2.run(wrong_in, build, run, exact) == [{}, {}]


# Where each rank runs its own units: the transports on which that is possible.
ON_SHM = [(strategy, transport) for strategy, transport in COMBINATIONS if transport == "shm"]


@pytest.mark.parametrize(
    ("run", "exact"),
    [
        (skip_on_rank_1, True),
        (skip_another_on_each_rank, False),
        (run_only_a_block_on_rank_1, True),
    ],
)
def test_ranks_may_run_different_units(pool2, run, exact):
    combinations = [*ON_SHM, ("no_shard", "c10d")]
    assert pool2.run(wrong_in, Detours, run, exact, combinations) == [{}, {}]


# --- after a failure -------------------------------------------------------------------------------


class Planted(RuntimeError):
    pass


def fail_in_forward(model, rank):
    def fail(*_):
        raise Planted

    handle = model.blocks[1].down.register_forward_hook(fail)
    with pytest.raises(Planted):
        model(floats(rank))
    handle.remove()


def fail_in_backward(model, rank):
    def fail(*_):
        raise Planted

    handle = model.blocks[1].up.weight.register_hook(fail)
    with pytest.raises(Planted):
        loss_of(model(floats(rank))).backward()
    handle.remove()


def after_failures(combination):
    """The wrong gradients of a right backward that follows failed passes."""
    expected = mean_grads(Stack, forward_backward)
    model = wrapped(Stack, combination)
    found = []
    for fail in (fail_in_forward, fail_in_backward, fail_in_backward, fail_in_forward):
        fail(model, dist.get_rank())
        model.zero_grad()
        forward_backward(model, dist.get_rank())
        found += wrong_grads(whole_grads(model), expected)
    return found


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_training_goes_on_after_exceptions(pool2, combination):
    assert pool2.run(after_failures, combination) == [[], []]


def fail_in_a_users_hook(combination):
    """A hook that sees the reduced gradient raises; then a right step."""

    def fail(_):
        raise Planted

    model = wrapped(Stack, combination)
    handle = model.head.weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(Planted):
        forward_backward(model, dist.get_rank())
    handle.remove()
    model.zero_grad()
    forward_backward(model, dist.get_rank())
    return wrong_grads(whole_grads(model), mean_grads(Stack, forward_backward))


def test_training_goes_on_after_an_exception_in_a_users_hook(pool2):
    assert pool2.run(fail_in_a_users_hook, FULL) == [[], []]


# --- hooks and optimizers of the user --------------------------------------------------------------


def tensor_hooks(combination, early):
    """What a hook on a weight sees, set before or after wrapping: the full local gradient?"""
    rank, seen = dist.get_rank(), []
    model = make(Stack)

    def hook(grad):
        seen.append(grad.clone())
        return grad * 2

    if early:
        model.blocks[1].up.weight.register_hook(hook)
    model = FSDP(model, strategy=combination[0], transport=combination[1])
    if not early:
        model.blocks[1].up.weight.register_hook(hook)
    forward_backward(model, rank)

    plain = make(Stack)
    forward_backward(plain, rank)
    local = plain.blocks[1].up.weight.grad
    expected = mean_grads(Stack, forward_backward)
    expected["blocks.1.up.weight"] *= 2
    return len(seen), torch.equal(seen[0], local), wrong_grads(whole_grads(model), expected)


@pytest.mark.parametrize("early", [True, False], ids=["before wrapping", "after wrapping"])
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_tensor_hooks_see_the_full_local_gradient(pool2, combination, early):
    assert pool2.run(tensor_hooks, combination, early) == [(1, True, [])] * 2


def accumulate_hooks(combination, early):
    """(calls of a post-accumulate hook per backward, wrong gradients it saw)."""
    rank, seen = dist.get_rank(), []
    model = make(Stack)

    def watch():
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(
                lambda p, name=name: seen.append((name, p.grad.shape == p.shape, p.grad.clone()))
            )

    if early:
        watch()
    model = FSDP(model, strategy=combination[0], transport=combination[1])
    if not early:
        watch()
    problems = []
    for step in range(3):
        seen.clear()
        model.zero_grad()
        loss_of(model(floats(rank, step))).backward()
        grads = {name: grad for name, _, grad in seen}
        counts = sorted(name for name, _, _ in seen)
        if counts != sorted(name for name, _ in model.named_parameters()):
            problems.append(f"step {step}: called for {counts}")
        problems += [f"{name}: not its slice" for name, fits, _ in seen if not fits]
        for name, param in model.named_parameters():
            if not torch.equal(grads[name], param.grad):
                problems.append(f"step {step}: {name} was not final")
    return problems


@pytest.mark.parametrize("early", [True, False], ids=["before wrapping", "after wrapping"])
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_post_accumulate_hooks_run_once_with_the_reduced_shard(pool2, combination, early):
    assert pool2.run(accumulate_hooks, combination, early) == [[], []]


def optimizer_in_backward():
    """Stepping each parameter from its own hook (then .grad is None) trains as one step does."""
    rank, case = dist.get_rank(), CASES["net"]
    plain, model = make(case.make), wrapped(case.make, FULL)
    parallel = ddp(plain)
    optimizers = {p: torch.optim.SGD([p], 0.1, momentum=0.9) for p in model.parameters()}

    def step(param):
        optimizers[param].step()
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    whole = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    for number in range(3):
        loss_of(model(case.batch(number, rank))).backward()
        whole.zero_grad()
        loss_of(parallel(case.batch(number, rank))).backward()
        whole.step()
    return differences(model.state_dict(), plain.state_dict())


def test_optimizer_steps_in_post_accumulate_hooks(pool2):
    assert pool2.run(optimizer_in_backward) == [[], []]


def early_optimizer(combination, cls):
    """What differs from DDP if the optimizer was made before the model was wrapped."""
    rank, case = dist.get_rank(), CASES["net"]
    plain, model = make(case.make), make(case.make)
    optimizer = cls(model.parameters(), lr=0.01)
    before = list(model.parameters())
    model = FSDP(model, strategy=combination[0], transport=combination[1])
    same = all(a is b for a, b in zip(before, model.parameters(), strict=True))
    train(model, case, optimizer, rank)
    train(ddp(plain), case, cls(plain.parameters(), lr=0.01), rank)
    return same, differences(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("cls", [torch.optim.AdamW, zshard.SGD])
def test_optimizer_made_before_wrapping_trains(pool2, combination, cls):
    assert pool2.run(early_optimizer, combination, cls) == [(True, [])] * 2


def grouped_by_ndim(combination):
    """What differs from DDP if only matrices are decayed."""
    rank, case = dist.get_rank(), CASES["net"]
    plain, model = make(case.make), wrapped(case.make, combination)

    def optimizer_of(model):
        groups = [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.5},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    dims = [p.ndim for p in plain.parameters()] == [p.ndim for p in model.parameters()]
    train(model, case, optimizer_of(model), rank)
    train(ddp(plain), case, optimizer_of(plain), rank)
    return dims, differences(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_groups_by_ndim(pool2, combination):
    assert pool2.run(grouped_by_ndim, combination) == [(True, [])] * 2


def scheduled():
    """What differs from DDP under a learning-rate schedule and momentum."""
    rank, case = dist.get_rank(), CASES["mlp"]
    plain, model = make(case.make), wrapped(case.make, FULL)
    for each, forward in ((model, model), (plain, ddp(plain))):
        optimizer = zshard.AdamW(each.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(forward(case.batch(step, rank))).backward()
            optimizer.step()
            schedule.step()
    return differences(model.state_dict(), plain.state_dict())


def test_schedulers_drive_the_optimizer(pool2):
    assert pool2.run(scheduled) == [[], []]


# --- what is used where it must not be -------------------------------------------------------------


def message_of(action, kind=Exception):
    """The text of the exception that `action` raises; fails if it raises none."""
    with pytest.raises(kind) as caught:
        action()
    return str(caught.value)


class Reader(nn.Module):
    """A root that reads the weight of a unit without calling it."""

    def __init__(self, read):
        super().__init__()
        self.part = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.read = read

    def forward(self, x):
        return self.read(self.other(x), self.part.weight)


def as_matrix(x, weight):
    return F.linear(x, weight)


def as_number(x, weight):
    return x * weight.square().sum()  # of a shard as good as of a whole weight, and wrong


def read_outside(transport, read):
    """The message for a weight that is read while its unit is sharded."""
    model = FSDP(
        make(functools.partial(Reader, read)), transport=transport, auto_wrap_policy={nn.Linear}
    )
    return message_of(lambda: loss_of(model(floats(dist.get_rank()))).backward())


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_reading_a_sharded_weight_is_an_error(pool2, transport):
    assert all("shape" in message for message in pool2.run(read_outside, transport, as_matrix))
    for message in pool2.run(read_outside, transport, as_number):
        assert "'part.weight'" in message and "'part'" in message


def kept_view(combination):
    """A whole weight that was kept from a forward is read after it: an error, with the unit."""
    rank, kept = dist.get_rank(), []
    model = wrapped(Stack, combination)
    model.blocks[1].register_forward_pre_hook(lambda m, _: kept.append(m.up.weight.view(-1)))
    forward_backward(model, rank)
    return message_of(lambda: kept[0].sum(), RuntimeError)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_reading_a_view_from_an_earlier_forward_is_an_error(pool2, transport):
    for message in pool2.run(kept_view, ("full_shard", transport)):
        assert "'blocks.1'" in message and "sharded" in message


def loss_and_penalty(model, rank):
    loss = loss_of(model(floats(rank)))
    (loss + 0.1 * square_sum(model)).backward()


def penalty_and_loss(model, rank):
    squares = square_sum(model)
    (loss_of(model(floats(rank))) + 0.1 * squares).backward()


def penalized(combination, run):
    """(message, wrong gradients) of a loss with a penalty over model.parameters(); one of them is
    empty. Then a step without."""
    rank = dist.get_rank()
    model, message, wrong = wrapped(Stack, combination), "", []
    try:
        run(model, rank)
    except RuntimeError as error:
        message = str(error)
    else:
        ours, expected = whole_grads(model), mean_grads(Stack, run)
        wrong = wrong_grads({n: near(g, expected[n]) for n, g in ours.items()}, expected)
    model.zero_grad()
    forward_backward(model, rank)
    model.zero_grad()
    forward_backward(model, rank)
    after = wrong_grads(whole_grads(model), mean_grads(Stack, forward_backward))
    return message, wrong, after


@pytest.mark.parametrize("run", [loss_and_penalty, penalty_and_loss])
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_penalty_over_parameters_is_right_or_an_error(pool2, combination, run):
    for message, wrong, after in pool2.run(penalized, combination, run):
        assert wrong == after == []
        assert combination[0] != "full_shard" or message, "slices cannot have given the penalty"
        assert combination[0] != "no_shard" or not message


def penalty_alone(combination):
    model = wrapped(Stack, combination)
    return message_of(lambda: square_sum(model).backward(), RuntimeError)


@pytest.mark.parametrize("combination", [c for c in COMBINATIONS if c[0] != "no_shard"])
def test_penalty_on_shards_names_parameter_and_unit(pool2, combination):
    for message in pool2.run(penalty_alone, combination):
        assert "is sharded" in message and "model.parameters()" in message
        assert "'head." in message or "'blocks." in message


def changed_in_forward():
    model = make(Stack)

    def forward(x, block=model.blocks[1], plain=model.blocks[1].forward):
        with torch.no_grad():
            block.up.weight.mul_(0.5)
        return plain(x)

    model.blocks[1].forward = forward
    model = FSDP(model, auto_wrap_policy={Block})
    return message_of(lambda: forward_backward(model, dist.get_rank()), RuntimeError)


def test_weight_changed_inside_forward_is_an_error(pool2):
    for message in pool2.run(changed_in_forward):
        assert "'blocks.1.up.weight'" in message and "changed in place" in message


# --- lifetimes -------------------------------------------------------------------------------------


def orphaned_loss(combination):
    """A backward after the model is gone: no crash; and the next model trains."""
    model = wrapped(Stack, combination)
    loss = loss_of(model(floats(dist.get_rank())))
    del model
    gc.collect()
    loss.backward()
    del loss
    model = wrapped(Stack, combination)
    forward_backward(model, dist.get_rank())
    return wrong_grads(whole_grads(model), mean_grads(Stack, forward_backward))


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_loss_may_outlive_the_model(pool2, combination):
    assert pool2.run(orphaned_loss, combination) == [[], []]


def orphaned_parameters(combination):
    """Parameters and gradients kept by an optimizer after the model is gone can be read."""
    model = wrapped(Stack, combination)
    forward_backward(model, dist.get_rank())
    kept = list(model.parameters())
    values = [(p.detach().clone(), p.grad.clone()) for p in kept]
    del model
    gc.collect()
    return all(
        torch.equal(p, value) and torch.equal(p.grad, grad)
        for p, (value, grad) in zip(kept, values, strict=True)
    )


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_parameters_may_outlive_the_model(pool2, combination):
    assert pool2.run(orphaned_parameters, combination) == [True, True]


def two_models(combination):
    """What differs from DDP for two models that train on each other's outputs, as GANs do."""
    rank = dist.get_rank()

    def trained(maker, learner, forward):
        slow, fast = (
            torch.optim.SGD(maker.parameters(), 0.05),
            torch.optim.SGD(learner.parameters(), 0.1),
        )
        for step in range(3):
            made = forward[0](floats(rank, step))
            fast.zero_grad()
            loss_of(forward[1](made.detach())).backward()
            fast.step()
            slow.zero_grad()
            loss_of(forward[1](made)).backward()  # reaches into the maker
            slow.step()
        return [*maker.state_dict().values(), *learner.state_dict().values()]

    plain = make(lambda: Detours()), make(Stack, seed=2)
    expected = trained(*plain, [ddp(each) for each in plain])
    strategy, transport = combination
    ours = [
        FSDP(make(Detours), strategy=strategy, transport=transport),
        FSDP(make(Stack, seed=2), strategy=strategy, transport=transport),
    ]
    return [torch.equal(a, b) for a, b in zip(trained(*ours, ours), expected, strict=True)]


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_two_models_train_on_one_another(pool2, combination):
    for same in pool2.run(two_models, combination):
        assert all(same)


# --- how it is wrapped -----------------------------------------------------------------------------


class WrapsItself(nn.Module):
    """Nested FSDP(...) in __init__, as scripts for FSDP1 have it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(FSDP(Block(WIDTH)) for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    forward = Stack.forward


class WrapsInContext(nn.Module):
    """enable_wrap and wrap."""

    def __init__(self):
        super().__init__()
        with enable_wrap(wrapper_cls=FSDP):
            self.blocks = nn.ModuleList(wrap(Block(WIDTH)) for _ in range(3))
            self.head = wrap(nn.Linear(WIDTH, 2))

    forward = Stack.forward


def trained_state(build, **options):
    """(names of the units, state dict after some steps)."""
    rank = dist.get_rank()
    model = FSDP(make(build), **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model(floats(rank, step))).backward()
        optimizer.step()
    named = {module: name for name, module in model.named_modules()}
    return [named[unit] for unit in FSDP.fsdp_modules(model)], model.state_dict()


BLOCKS = ["", "blocks.0", "blocks.1", "blocks.2"]
POLICIES = {
    "auto": ("auto", [*BLOCKS, "head"]),
    "none": (None, [""]),
    "classes": ({Block, nn.LayerNorm}, None),
    "module policy": (ModuleWrapPolicy({Block}), BLOCKS),
    "custom": (CustomPolicy(lambda m: isinstance(m, Block)), BLOCKS),
    "override": (
        CustomPolicy(lambda m: isinstance(m, Block) and {"sharding_strategy": "shard_grad_op"}),
        BLOCKS,
    ),
    "size": (functools.partial(size_based_auto_wrap_policy, min_num_params=300), BLOCKS),
    "transformer": (
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        BLOCKS,
    ),
    "lambda policy": (
        functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, Block)),
        BLOCKS,
    ),
    "lambda": (lambda m: isinstance(m, Block), BLOCKS),
    "always": (always_wrap_policy, None),
}


def train_with_each_policy():
    """{policy: (units, what differs from DDP)}."""
    rank = dist.get_rank()
    plain = make(Stack)
    parallel = ddp(plain)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(parallel(floats(rank, step))).backward()
        optimizer.step()
    found = {}
    for name, (policy, _) in POLICIES.items():
        units, state = trained_state(Stack, auto_wrap_policy=policy)
        found[name] = units, differences(state, plain.state_dict())
    for build in (WrapsItself, WrapsInContext):
        for policy in (None, "auto"):
            units, state = trained_state(build, auto_wrap_policy=policy)
            found[f"{build.__name__}, {policy}"] = units, differences(state, plain.state_dict())
    return found


def test_all_ways_to_wrap_train_alike(pool2):
    for found in pool2.run(train_with_each_policy):
        assert {name: wrong for name, (_, wrong) in found.items() if wrong} == {}
        for name, (_, units) in POLICIES.items():
            if units is not None:
                assert found[name][0] == units, name
        assert len(found["always"][0]) == 1 + 3 * 3 + 1  # and no unit for a Block: nothing is left
        assert found["WrapsItself, None"][0] == BLOCKS
        assert found["WrapsInContext, None"][0] == [*BLOCKS, "head"]


# --- ranks that differ in what they do, or when ------------------------------------------------------


def evaluate_on_rank_0(combination):
    """Rank 0 evaluates alone between the steps: (right losses?, what differs from DDP)."""
    rank, case = dist.get_rank(), CASES["net"]

    def trained(model, forward):
        optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
        for step in range(4):
            if step > 0 and rank == 0:
                with torch.no_grad():
                    losses += [float(loss_of(model(case.batch(100 + n, 0)))) for n in range(step)]
            optimizer.zero_grad()
            loss_of(forward(case.batch(step, rank))).backward()
            optimizer.step()
        return losses

    plain, model = make(case.make), wrapped(case.make, combination)
    same = trained(plain, ddp(plain)) == trained(model, model)
    return same, differences(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_one_rank_evaluates_while_the_other_trains(pool2, strategy):
    assert pool2.run(evaluate_on_rank_0, (strategy, "shm"), timeout=30) == [(True, [])] * 2


def evaluate_while_the_other_waits():
    """Rank 0 evaluates alone while rank 1 stands at a barrier: (message, what differs from DDP after
    both have trained on)."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank, case, message = dist.get_rank(), CASES["net"], ""
    plain = make(case.make)
    model = wrapped(case.make, FULL, timeout=3)
    parallel = ddp(plain)
    train(model, case, torch.optim.SGD(model.parameters(), 0.1), rank)
    train(parallel, case, torch.optim.SGD(plain.parameters(), 0.1), rank)
    if rank == 0:
        with torch.no_grad():
            message = message_of(lambda: model(case.batch(100, 0)), zshard.PeerTimeoutError)
    dist.barrier()
    return message


def test_evaluation_by_one_rank_ends_where_the_other_never_comes(pool2):
    # Nobody can tell it from an evaluation by all for which rank 1 is late.
    message = run_ranks(evaluate_while_the_other_waits, 2)[0].value
    assert "rank 1" in message and "3.0 s" in message and "forward" in message


def slow_rank(combination):
    """(seconds that a backward took, wrong gradients) where rank 1 comes a second late."""
    rank = dist.get_rank()
    model = wrapped(Stack, combination)
    dist.barrier()
    started = time.monotonic()
    if rank == 1:
        time.sleep(1)
    forward_backward(model, rank)
    return time.monotonic() - started, wrong_grads(
        whole_grads(model), mean_grads(Stack, forward_backward)
    )


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_a_slow_rank_is_waited_for(pool2, combination):
    (fast, wrong), (_, other) = pool2.run(slow_rank, combination)
    assert fast >= 0.9, "rank 0 cannot have had rank 1's gradients"
    assert wrong == other == []


def swap_in_the_average(combination):
    """Training with an average of the weights that is swapped in for evaluation; what differs from
    DDP in it: the evaluations' losses, or the state in the end."""
    rank, case = dist.get_rank(), CASES["net"]

    def trained(model, forward):
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        averages = [p.detach().clone() for p in model.parameters()]
        losses = []
        for step in range(4):
            optimizer.zero_grad()
            loss_of(forward(case.batch(step, rank))).backward()
            optimizer.step()
            with torch.no_grad():
                for average, param in zip(averages, model.parameters(), strict=True):
                    average.lerp_(param, 0.1)
                kept = [p.detach().clone() for p in model.parameters()]
                for average, param in zip(averages, model.parameters(), strict=True):
                    param.data.copy_(average)
                losses.append(float(loss_of(forward(case.batch(50, rank)))))
                for value, param in zip(kept, model.parameters(), strict=True):
                    param.data.copy_(value)
        return losses

    plain, model = make(case.make), wrapped(case.make, combination)
    same = trained(model, model) == trained(plain, ddp(plain))
    return same, differences(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_averaged_weights_can_be_swapped_in(pool2, combination):
    assert pool2.run(swap_in_the_average, combination) == [(True, [])] * 2


def replaced_data(whole):
    """p.data = tensor between steps, of the whole shape or of the slice's; what differs then."""
    model, plain = wrapped(Stack, FULL), make(Stack)
    param, other = model.head.weight, plain.head.weight
    value = torch.randn(other.shape, generator=torch.Generator().manual_seed(5))
    other.data = value.clone()
    if whole:
        param.data = value.clone()
    else:
        info = zshard.shard_info(param)
        part = value.flatten()[info["begin"] : info["begin"] + info["numel"]]
        param.data = part.reshape(param.shape).clone()
    rank = dist.get_rank()
    same = torch.equal(model(floats(rank)), plain(floats(rank)))
    return same, differences(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("whole", [True, False])
def test_replaced_data_is_written_back(pool2, whole):
    assert pool2.run(replaced_data, whole) == [(True, [])] * 2


def cast_after_wrapping():
    model = wrapped(Stack, FULL)
    model.double()
    return message_of(lambda: model(floats(dist.get_rank()).double()), ValueError)


def test_cast_after_wrapping_is_an_error(pool2):
    for message in pool2.run(cast_after_wrapping):
        assert "'blocks.0.norm.weight'" in message and "before wrapping" in message


# --- buffers and the start ---------------------------------------------------------------------------


def train_with_buffers(combination, sync):
    """(what differs from DDP with the same choice, are the buffers equal on all ranks?)."""
    rank, case = dist.get_rank(), CASES["conv"]
    strategy, transport = combination
    plain, model = make(case.make, seed=1 + rank), make(case.make, seed=1 + rank)
    if rank == 1:  # both take rank 0's
        for each in (plain, model):
            for buffer in each.buffers():
                buffer.fill_(7)
    model = FSDP(model, strategy=strategy, transport=transport, forward_sync_buffers=sync)
    train(model, case, torch.optim.SGD(model.parameters(), 0.1), rank)
    parallel = ddp(plain, sync_buffers=sync)
    train(parallel, case, torch.optim.SGD(plain.parameters(), 0.1), rank)
    model.eval()
    parallel.eval()
    with torch.no_grad():
        evaluated = torch.equal(model(case.batch(9, rank)), parallel(case.batch(9, rank)))
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {n: b.clone() for n, b in model.named_buffers()})
    same = differences(everyone[0], everyone[1]) == []
    return evaluated, differences(model.state_dict(), plain.state_dict()), same


@pytest.mark.parametrize("sync", [True, False], ids=["synced", "local"])
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_buffers_are_those_of_ddp(pool2, combination, sync):
    for evaluated, wrong, same in pool2.run(train_with_buffers, combination, sync):
        assert evaluated and wrong == []
        assert same is sync


def start_of(combination, sync):
    """This rank's values before and after wrapping, whole."""
    model = make(Net, seed=1 + dist.get_rank())
    model.register_buffer("offset", torch.full((3,), float(dist.get_rank())))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    strategy, transport = combination
    model = FSDP(model, strategy=strategy, transport=transport, sync_module_states=sync)
    return before, model.state_dict()


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_everything_starts_from_rank_0(pool2, combination):
    (first, start), (second, other) = pool2.run(start_of, combination, True)
    assert differences(first, second), "the ranks have to start from different values"
    assert differences(start, first) == differences(other, first) == []


def unequal_start():
    return message_of(lambda: start_of(FULL, False), zshard.DivergenceError)


def test_unequal_starts_are_an_error_if_nothing_is_taken_from_rank_0(pool2):
    for message in pool2.run(unequal_start):
        assert "'embed.weight'" in message and "rank 1" in message


def unequal_models(what):
    """The message where rank 1 has another model."""
    rank = dist.get_rank()
    model = make(Stack)
    if rank == 1 and what == "shape":
        model.blocks[1].up = nn.Linear(WIDTH, 2 * WIDTH + 1)
    if rank == 1 and what == "name":
        model.tail = model.head
        del model.head
    if rank == 1 and what == "dtype":
        model.blocks[2].norm.double()
    if rank == 1 and what == "frozen":
        model.blocks[0].norm.bias.requires_grad_(False)
    if rank == 1 and what == "more":
        model.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    if rank == 1 and what == "buffer":
        model.register_buffer("extra", torch.zeros(1))
    options = {"strategy": "no_shard"} if rank == 1 and what == "strategy" else {}
    message = message_of(lambda: FSDP(model, auto_wrap_policy={Block}, **options))
    forward_backward(wrapped(Stack, FULL), rank)  # the transport is as good as before
    return message


@pytest.mark.parametrize(
    ("what", "part"),
    [
        ("shape", "blocks.1.up.weight"),
        ("name", "tail"),
        ("dtype", "blocks.2.norm.weight"),
        ("frozen", "blocks.0.norm.bias"),
        ("more", "extra"),
        ("buffer", "extra"),
        ("strategy", "no_shard"),
    ],
)
def test_ranks_with_different_models_are_told_the_first_difference(pool2, what, part):
    first, second = pool2.run(unequal_models, what)
    assert first == second
    assert part in first and "rank 1" in first
