"""Which optimizers may step on shards: elementwise ones, not those that need whole parameters."""

import timeit
import warnings

import pytest
import torch
from torch import nn

import zshard
from zshard import _optim_guard

ELEMENTWISE = [
    *(getattr(torch.optim, name) for name in _optim_guard._ELEMENTWISE if name != "SparseAdam"),
    *(zshard.AdamW, zshard.Adam, zshard.SGD),
]


class LAMB(torch.optim.AdamW):
    """Of a refused name, whatever it is derived from."""

    def step(self, closure=None):
        raise AssertionError("the guard let it step")


class DistributedShampoo(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        raise AssertionError("the guard let it step")


class MyLBFGS(torch.optim.LBFGS):
    """Derived from a refused one, with a step of its own."""

    def step(self, closure=None):
        raise AssertionError("the guard let it step")


class PlainSubclass(torch.optim.AdamW):
    """Inherits its step."""


class OwnStep(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


class Lambda(torch.optim.Optimizer):
    """Unknown; its name only begins like LAMB's."""

    def __init__(self, params):
        super().__init__(params, {})
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1


@pytest.fixture
def sharded(monkeypatch):
    """Parameters that the core takes for shards."""
    shards = [nn.Parameter(torch.ones(6, 1)), nn.Parameter(torch.ones(0, 1))]
    monkeypatch.setattr(_optim_guard._core, "is_shard", lambda p: any(p is s for s in shards))
    monkeypatch.setattr(_optim_guard, "_kinds", {})
    for shard in shards:
        shard.grad = torch.ones_like(shard)
    return shards


@pytest.mark.parametrize(
    "cls", [*ELEMENTWISE, PlainSubclass], ids=lambda c: f"{c.__module__}.{c.__name__}"
)
def test_elementwise_ones_step_in_silence(sharded, cls):
    optimizer = cls(sharded, lr=0.1)
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # wraps step once more
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert not torch.equal(sharded[0], torch.ones(6, 1))


def refused(params):
    yield torch.optim.Adafactor(params)
    yield torch.optim.LBFGS(params)
    yield MyLBFGS(params)
    yield LAMB(params)
    yield DistributedShampoo(params)
    if hasattr(torch.optim, "Muon"):
        yield torch.optim.Muon([p for p in params if p.ndim == 2])


def test_others_are_refused_by_name_with_reason_and_advice(sharded):
    for optimizer in refused(sharded):
        name = type(optimizer).__name__
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=rf"^{name} cannot .*: it .*zshard\.AdamW.*no_shard"
            ):
                optimizer.step(lambda: None)
    assert torch.equal(sharded[0], torch.ones(6, 1))


def test_refused_even_if_only_the_last_parameter_is_a_shard(sharded):
    plain = nn.Parameter(torch.ones(3, 3))
    optimizer = LAMB([{"params": [plain]}, {"params": [sharded[1]]}])
    with pytest.raises(RuntimeError, match="LAMB cannot"):
        optimizer.step()


@pytest.mark.parametrize("cls", [OwnStep, Lambda])
def test_unknown_ones_warn_once_per_class(sharded, cls):
    with pytest.warns(UserWarning, match=rf"test_optim_guard\.{cls.__name__} is updating sharded"):
        cls(sharded).step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls(sharded).step()


def test_a_warning_points_at_the_step_call(sharded):
    with pytest.warns(UserWarning) as caught:
        Lambda(sharded).step()
    assert caught[0].filename == __file__


def test_whole_parameters_pass_everything(sharded):
    plain = [nn.Parameter(torch.ones(4, 4))]
    plain[0].grad = torch.ones(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.optim.Adafactor(plain).step()
        torch.optim.LBFGS(plain).step(lambda: torch.tensor(0.0, requires_grad=True))
        optimizer = Lambda(plain)
        optimizer.step()
    assert optimizer.steps == 1


def test_parameters_that_become_shards_after_the_first_step(sharded, monkeypatch):
    """An optimizer made before FSDP(model), and used."""
    is_shard = _optim_guard._core.is_shard
    monkeypatch.setattr(_optim_guard._core, "is_shard", lambda p: False)
    optimizer = torch.optim.Adafactor(sharded[:1])
    optimizer.step()
    monkeypatch.setattr(_optim_guard._core, "is_shard", is_shard)
    with pytest.raises(RuntimeError, match="Adafactor cannot"):
        optimizer.step()


def test_every_optimizer_of_torch_is_known_one_way_or_the_other():
    """A new torch brings new optimizers: each must be put into a list, not warned of."""
    classes = [
        c
        for c in vars(torch.optim).values()
        if isinstance(c, type)
        and issubclass(c, torch.optim.Optimizer)
        and c is not torch.optim.Optimizer
    ]
    unknown = [
        c.__name__ for c in classes if _optim_guard._kind_of(c) is _optim_guard._Kind.UNKNOWN
    ]
    assert len(classes) >= 14
    assert unknown == []


def test_names_are_words():
    has = _optim_guard._has_word
    assert all(has(name, "lamb") for name in ("LAMB", "Lamb", "FusedLAMB", "LambW", "Lamb2"))
    assert not any(has(name, "lamb") for name in ("Lambda", "Clamber", "Adam"))
    assert has("DAdaptAdam", "dadapt") and has("MuonClip", "muon") and not has("Collars", "lars")


def test_costs_microseconds(sharded):
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1)) for _ in range(1000)])
    seconds = min(timeit.repeat(lambda: _optim_guard._before_step(optimizer, (), {}), number=1000))
    assert seconds / 1000 < 10e-6
