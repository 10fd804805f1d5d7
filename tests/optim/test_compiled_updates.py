"""Optimizers of other libraries: updates that torch.compile compiles per parameter, kernels, and
state in its own dtype.

An elementwise one trains as on the plain model; any other is refused with a remedy for optimizers.
"""

import pytest
import torch
from compare import assert_same
from models import COMBINATIONS, Case
from scenario import Scenario
from scenarios import message_of
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP, ShardError

EACH_COMBINATION = pytest.mark.parametrize("combination", COMBINATIONS)
WIDE = Case(
    lambda: nn.Sequential(nn.Linear(9, 600), nn.Tanh(), nn.Linear(600, 2)),
    lambda generator: torch.randn(4, 9, generator=generator),
)


def elementwise(param, grad, momentum):
    momentum.lerp_(grad, 0.1)
    param.sub_(momentum.sign() * 0.01)


def by_norm(param, grad, momentum):
    param.sub_(grad / grad.norm())


class PerParameter(torch.optim.Optimizer):
    """An optimizer in torchao's style: one parameter at a time, state in its own dtype."""

    def __init__(self, params, update=elementwise, dtype=None):
        super().__init__(params, {"momentum_dtype": dtype})
        self.update = update

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(param, dtype=group["momentum_dtype"])
                self.update(param, param.grad, state["momentum"])


def compiled(update, **options):
    return torch.compile(update, backend="eager", **options)


def trains(combination, ours, theirs):
    """Fail unless `ours` trains on shards as `theirs` does under DDP."""

    def optimizer(model):
        return PerParameter(model.parameters(), ours if isinstance(model, FSDP) else theirs)

    return Scenario(WIDE, combination, optimizer).same()


@pytest.mark.sampled(3)
@EACH_COMBINATION
@on_ranks(2)
def test_compiled_elementwise_update_trains(combination):
    trains(combination, compiled(elementwise), elementwise)


@pytest.mark.parametrize("transport", ("shm", "c10d"))
@on_ranks(2)
def test_compiled_update_with_a_norm_is_refused(transport):
    scenario = Scenario(
        WIDE, ("full_shard", transport), lambda m: PerParameter(m.parameters(), compiled(by_norm))
    )
    said = message_of(lambda: scenario.sharded(1), ShardError)
    assert "norm()" in said and "elementwise one" in said and "no_shard" in said


@on_ranks(2, fresh=True)
def test_functions_compiled_before_sharding():
    """Functions that were compiled before the process's first FSDP(...)."""
    torch.distributed.init_process_group("gloo")
    loose, strict = compiled(elementwise), compiled(elementwise, fullgraph=True)
    Scenario(WIDE, optimizer=lambda model: PerParameter(model.parameters(), loose)).ddp(3)
    for update in (loose, strict):
        trains(("full_shard", "c10d"), update, elementwise)


BNB = ("AdamW", "PagedAdamW32bit", "Lion", "SGD", "RMSprop", "Adagrad", "AdEMAMix")


def with_bitsandbytes(combination, name):
    import bitsandbytes

    options = {"lr": 0.01, **({"momentum": 0.9} if name == "SGD" else {})}
    kind = getattr(bitsandbytes.optim, name)
    Scenario(WIDE, combination, lambda model: kind(model.parameters(), **options)).same()


@pytest.mark.parametrize("name", BNB)
@EACH_COMBINATION
def test_32_bit_optimizers_of_bitsandbytes_train(pool2, combination, name):
    pytest.importorskip("bitsandbytes", reason="needs zshard[trainers]: make test-trainers")
    pool2.run(with_bitsandbytes, combination, name)


class Kernel:
    """A library's operation, as torch passes it to the guard."""

    _qualified_op_name = "bitsandbytes::optimizer_update_32bit"
    __name__ = "optimizer_update_32bit"

    def __call__(self, *args):
        if torch.overrides.has_torch_function(args[1:]):
            return torch.overrides.handle_torch_function(self, args[1:], *args)
        return args[2].sub_(args[1], alpha=0.1)


@EACH_COMBINATION
@on_ranks(2)
def test_library_kernel_gets_matching_shards(combination):
    def update(param, grad, momentum):
        Kernel()("sgd", grad, param, momentum)

    model = trains(combination, update, update)[0].model
    if combination[0] != "no_shard":
        message_of(lambda: Kernel()("sgd", model[0].bias, model[0].weight), ShardError)


@pytest.mark.parametrize("strategy", ("full_shard", "no_shard"))
@on_ranks(2)
def test_sparse_adam_is_refused_by_name(strategy):
    model = FSDP(nn.Embedding(11, 4, sparse=True), strategy=strategy)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer = torch.optim.SparseAdam(model.parameters())
    said = message_of(optimizer.step, NotImplementedError)
    assert "SparseAdam needs sparse gradients" in said and "torch.optim.Adagrad" in said


# --- state in its own dtype, as AnyPrecisionAdamW has it ------------------------------------------

BF16 = torch.bfloat16


def halved(model):
    def update(param, grad, momentum):
        param.add_(momentum.mul_(0.9).add_(grad), alpha=-0.1)

    return PerParameter(model.parameters(), update, BF16)


def resumes(make, folder):
    """Fail unless a loaded run continues with its state, which torch's load_state_dict() would have
    cast to the parameters' dtype."""
    training, again = make(1).go(2), make(2)
    zshard.save(folder / "x", training.model, training.optimizer)
    zshard.load(folder / "x", again.model, again.optimizer)
    assert {own["momentum"].dtype for own in again.optimizer.state.values()} == {BF16}
    assert again.optimizer.param_groups[0]["momentum_dtype"] == BF16
    again.losses += training.losses
    assert_same(again.go(2).state(), training.go(2).state(), "the resumed run")


@pytest.mark.filterwarnings("ignore:.*is updating sharded parameters")
@pytest.mark.parametrize("combination", [("full_shard", "shm"), ("zero1", "c10d")], ids=str)
@on_ranks(2)
def test_state_keeps_its_dtype(combination, tmp_path):
    scenario = Scenario("net", combination, halved)
    resumes(lambda seed: scenario.sharded(seed=seed), tmp_path)


def test_state_of_a_plain_model_keeps_its_dtype(tmp_path):
    scenario = Scenario("net", optimizer=halved)
    resumes(lambda seed: scenario.plain(seed=seed), tmp_path)


@on_ranks(2)
def test_state_for_parameters_of_a_different_dtype_is_refused(tmp_path):
    training = Scenario("mlp", optimizer=halved).sharded(1)
    zshard.save(tmp_path / "x", training.model, training.optimizer)
    other = FSDP(Scenario("mlp").plain().model.double())
    optimizer = halved(other)
    with pytest.raises(RuntimeError, match=r"has dtype torch\.bfloat16, expected torch\.float64"):
        zshard.load(tmp_path / "x", other, optimizer)
    assert len(optimizer.state) == 0
