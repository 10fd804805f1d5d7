"""Small models that tests share, their inputs, and a loop that trains them under any library."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from compare import differences as differences  # most users of these models want this as well
from torch import Tensor, nn
from torch.nn import functional as F

import zshard
from zshard import FSDP

# Strategies and transports; each combination must give bit-identical results.
STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")
TRANSPORTS = ("shm", "c10d")
COMBINATIONS = [(strategy, transport) for transport in TRANSPORTS for strategy in STRATEGIES]
COMBINATIONS.append(("zero1", "c10d"))  # over shm it is full_shard


# --- models ---------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """Odd sizes everywhere: no parameter divides evenly by 2, 3 or 4. Wide enough for each of 4
    ranks to have a shard over shared memory, where shards are entire pages."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.second = nn.Linear(13, 401, bias=False)
        self.third = nn.Linear(401, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(F.gelu(self.second(torch.tanh(self.first(x)))))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class Nested(nn.Module):
    """A block with inner blocks, and its own weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Block(width) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inner:
            x = block(x) * self.gain
        return x


class Net(nn.Module):
    """Embedding, nested blocks, LayerNorm, head: (batch, length) numbers below 31 -> logits."""

    def __init__(self, width: int = 11, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, width)
        self.blocks = nn.ModuleList(Nested(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 31)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Tied(nn.Module):
    """Tied weights: embedding and head across the model, two linears within each block."""

    class Twin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(9, 9)
            self.two = nn.Linear(9, 9)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return x + self.two(torch.tanh(self.one(x)))

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 9)
        self.twins = nn.ModuleList(Tied.Twin() for _ in range(3))
        self.head = nn.Linear(9, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for twin in self.twins:
            x = twin(x)
        return self.head(x)


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(*(self._stage(3 if i == 0 else 5) for i in range(3)))
        self.head = nn.Linear(5, 3)

    @staticmethod
    def _stage(channels: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(x).mean((2, 3)))


class Odds(nn.Module):
    """Parameters of 0 dimensions, without elements, and not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.rand(()) + 1.0)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.across = nn.Parameter(torch.randn(5, 4).t())
        self.last = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        # Contiguous, so that sums run in the same order in every layout.
        rows = self.linear(x)[:, :, None] * self.across.contiguous()
        return rows * self.scale + self.last + self.empty.sum()


class Dtypes(nn.Module):
    """Parameters of three dtypes in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.usual = nn.Linear(7, 7)
        self.coarse = nn.Linear(7, 5).to(torch.bfloat16)
        self.fine = nn.Linear(5, 3).to(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.usual(x)).to(torch.bfloat16)
        return self.fine(self.coarse(x).double())


class Frozen(nn.Module):
    """Frozen and trainable parameters side by side, as with LoRA; one block is entirely frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(9) for _ in range(3))
        self.head = nn.Linear(9, 2)
        self.blocks[1].requires_grad_(False)
        for block in self.blocks:
            block.up.weight.requires_grad_(False)
            block.norm.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Attention(nn.Module):
    """torch's own encoder layers: MultiheadAttention reads weights of a child it does not call."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


class Recurrent(nn.Module):
    """An LSTM, which keeps its weights in a list as well, and a weight-normed head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 7, num_layers=2, batch_first=True)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(7, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


class Unused(nn.Module):
    """`spare` (a separate unit) and `aside` (in the root's) are unused."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(9) for _ in range(2))
        self.spare = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))
        self.aside = nn.Parameter(torch.randn(9))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Parts(nn.Module):
    """A module of named parts, whose forward is a function of it: for models that are special in
    one way.

    Parts(lambda model, x: model.layer(x) * model.scale, layer=..., scale=...)
    """

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.function(self, *args, **options)


# --- cases: a model and its inputs ----------------------------------------------------------------


def _floats(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(shape, generator=generator)


def _numbers(below: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randint(0, below, (3, 5), generator=generator)


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], Tensor]
    policy: Any = "auto"
    unused: bool = False  # DDP needs to know that not all parameters are used

    def batch(self, step: int, rank: int) -> Tensor:
        """Return the input of `rank` at `step`: the same on every process."""
        return self.draw(torch.Generator().manual_seed(1000 * step + rank))


CASES = {
    "mlp": Case(Mlp, _floats(5, 7), {nn.Linear}),
    "net": Case(Net, _numbers(31), {Nested, Block, nn.Embedding}),
    "auto": Case(Net, _numbers(31)),
    "one unit": Case(Net, _numbers(31), None),
    "tied": Case(Tied, _numbers(17), {Tied.Twin}),
    "conv": Case(Conv, _floats(4, 3, 7, 7)),
    "odds": Case(Odds, _floats(3, 6), {nn.Linear}),
    "dtypes": Case(Dtypes, _floats(3, 7), None),
    "frozen": Case(Frozen, _floats(4, 9), {Block}),
    "attention": Case(Attention, _floats(2, 4, 12)),
    "recurrent": Case(Recurrent, _floats(2, 4, 6)),
    "unused": Case(Unused, _floats(4, 9), {Block, nn.Sequential}, unused=True),
    "wide": Case(lambda: Net(48, 1), _numbers(31), {Nested, Block, nn.Embedding}),
}


# --- training -------------------------------------------------------------------------------------


def loss_of(output: Tensor) -> Tensor:
    return (output.float() - 0.5).square().mean()


def make(build: Callable[[], nn.Module], seed: int = 1) -> nn.Module:
    """Return a model whose weights depend on `seed` alone, also where modules start from ones or
    zeros."""
    torch.manual_seed(seed)
    model = build()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    return model


class Counting(torch.optim.Optimizer):
    """Elementwise, with state under keys that are no parameters, as MADGRAD has: a tensor, numbers,
    and a dict of both. Its steps depend on it."""

    def __init__(self, params: Any, lr: float = 0.01, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if "k" not in self.state:
            self.state["k"] = torch.zeros(1, dtype=torch.int64)
            self.state["calls"] = 0
            self.state["seen"] = {"half": torch.tensor(0.5), "last": [0]}
        self.state["k"] += 1
        self.state["calls"] += 1
        self.state["seen"]["half"].mul_(0.5)
        self.state["seen"]["last"][0] = self.state["calls"]
        factor = float(self.state["k"]) + self.state["seen"]["last"][0]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if "sum" not in state:
                    state["sum"] = torch.zeros_like(param)
                state["sum"].add_(param.grad)
                scale = group["lr"] * float(self.state["seen"]["half"]) / factor
                param.add_(state["sum"], alpha=-scale)


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer by name: "zshard", "torch" or "tests", a dot, its class."""
    library, cls = name.split(".")
    momentum = {"momentum": 0.9} if cls == "SGD" else {}
    home = {"torch": torch.optim, "zshard": zshard, "tests": sys.modules[__name__]}[library]
    return getattr(home, cls)(list(model.parameters()), lr=0.01, weight_decay=0.1, **momentum)


def train(
    model: nn.Module,
    case: Case,
    optimizer: torch.optim.Optimizer,
    rank: int,
    steps: int = 4,
    first: int = 0,
) -> list[float]:
    """Train on the batches of `rank`, from that of step `first` on; return the loss of each step."""
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = loss_of(model(case.batch(step, rank)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ddp(model: nn.Module, sync_buffers: bool = False, **options: Any) -> nn.Module:
    """Return torch's DDP; buffers stay local by default, as zshard's do."""
    cls = nn.parallel.DistributedDataParallel
    known = inspect.signature(cls).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return cls(model, **{name: sync_buffers}, **options)


def wrapped(
    build: Callable[[], nn.Module], combination: tuple[str, str], seed: int = 1, **options: Any
) -> Any:
    """Return a sharded model with the weights of `make` for `seed`."""
    strategy, transport = combination
    return FSDP(make(build, seed), strategy=strategy, transport=transport, **options)
