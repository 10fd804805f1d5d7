"""A small training run that may be kept, and killed: for the tests of zshard.Keep."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nursery import fork_ranks
from torch import Tensor, nn

import zshard
from zshard.extras.keeping.client import VARIABLE, Keeper
from zshard.ranks.agreement import bytes_of

STEPS = 8
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: zshard.AdamW(params, lr=1e-2),
    "amsgrad": lambda params: zshard.Adam(params, lr=1e-2, amsgrad=True),
    "momentum": lambda params: zshard.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
    "plain sgd": lambda params: zshard.SGD(params, lr=1e-2),
    "8 bit": lambda params: zshard.AdamW8bit(params, lr=1e-2, min_8bit_size=64),
    "rounding": lambda params: zshard.AdamW(params, lr=1e-2, stochastic_rounding=True),
    "two groups": lambda params: zshard.AdamW(
        [{"params": params[:2], "lr": 1e-3}, {"params": params[2:], "weight_decay": 0.1}]
    ),
}


class Net(nn.Module):
    """BatchNorm has buffers, and dropout draws random numbers. `late` is unused in the first steps,
    so its state is made later."""

    def __init__(self, width: int = 64, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, width), norm(width), nn.ReLU(), nn.Dropout(0.1))
        self.late = nn.Linear(width, width)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor, late: bool) -> Tensor:
        x = self.body(x)
        return self.head(self.late(x) if late else x)  # type: ignore[no-any-return]


class Run:
    """A rank's training."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        torch.manual_seed(0)
        optimizer = options.get("optimizer", "adamw")
        self.dtype = torch.bfloat16 if optimizer == "rounding" else torch.float32
        precision = options.get("precision")
        self.model = zshard.FSDP(
            Net(options.get("width", 64)).to(self.dtype),
            strategy=options.get("strategy", "full_shard"),
            transport=options.get("transport", "shm"),
            timeout=options.get("timeout", 20),
            auto_wrap_policy={nn.Linear} if options.get("units") else "auto",
            mixed_precision=zshard.MixedPrecision(precision) if precision else None,
        )
        self.optimizer = OPTIMIZERS[optimizer](list(self.model.parameters()))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.9)
        self.others: list[Any] = [self.scheduler]

    def seed_generators(self) -> None:
        torch.manual_seed(dist.get_rank())

    def loss(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(32, 16, generator=generator).to(self.dtype)
        found: Tensor = (self.model(x, step >= 3) - x.sum(1, keepdim=True)).square().mean()
        return found

    def backward(self, step: int) -> str:
        """Make gradients and clip them; return the losses of an undisturbed run as well."""
        if self.options.get("copy"):  # as for a moving average
            copy.deepcopy(self.model)
        loss = self.loss(step)
        loss.backward()
        return f"{loss.item().hex()} {self.model.clip_grad_norm_(0.5).item().hex()}"

    def step(self) -> None:
        """Do what belongs into the block."""
        self.optimizer.step()
        self.scheduler.step()

    def digest(self, buffers: bool = True) -> Any:
        state = self.model.state_dict()
        if not buffers:
            state = {name: state[name] for name, _ in self.model.named_parameters()}
        return hashlib.sha256(
            b"".join(bytes(bytes_of(value.contiguous())) for value in state.values())
        ).hexdigest()


def kept_run(token: str, **options: Any) -> tuple[Run, zshard.Keep]:
    os.environ[VARIABLE] = token
    run = Run(options)
    kept = zshard.Keep(run.model, run.optimizer)
    kept.recover({"step": 0})
    return run, kept


def kept_step(run: Run, kept: zshard.Keep, number: int = 0, act: Any = lambda: None) -> None:
    """Make the step of this number, with act() in its block."""
    run.loss(number).backward()
    with kept.commit({"step": number + 1}):
        run.optimizer.step()
        act()
    run.optimizer.zero_grad()


class Killer:
    """Kills this rank: at a place in a step, or after a random time from step 1 on."""

    def __init__(self, kill: tuple[Any, ...] | None) -> None:
        self.kill = kill if kill is not None and kill[1] == dist.get_rank() else None

    def at(self, place: str, step: int) -> None:
        if self.kill is None:
            return
        wanted, _, when, *_ = self.kill
        if wanted == "any" and place == "forward" and step == 1:
            threading.Timer(when, os.kill, (os.getpid(), signal.SIGKILL)).start()
        elif (place, step) == (wanted, when):
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    token: str, folder: str, options: dict[str, Any], kill: tuple[Any, ...] | None
) -> tuple[int, Any]:
    """Train to the end; write losses to the folder. Return where it began, and the weights'
    digest. options["script"]: the class of the script, which saves checkpoints. options["fails"]:
    the call, its step, and its ranks."""
    if token:
        os.environ[VARIABLE] = token
    if options.get("transport") == "hosts":
        os.environ["ZSHARD_HOST"] = f"host {int(os.environ['RANK']) // 2}"
    run = options.get("script", Run)(options)
    start, saves = {"step": 0}, Path(folder, "saves") if "script" in options else None
    kept = zshard.Keep(run.model, run.optimizer, *run.others, checkpoints=saves) if token else None
    start = kept.recover(start) if kept else start
    killer = Killer(kill)
    act, when, whose = options.get("fails", (None, -1, ()))
    if start["step"] == 0:
        run.seed_generators()
    log = open(Path(folder, f"losses{dist.get_rank()}"), "a")  # noqa: SIM115 - it may be killed
    for step in range(start["step"], STEPS):
        killer.at("forward", step)
        if step == when and dist.get_rank() in whose:
            act()
        print(step, run.backward(step), file=log, flush=True)
        killer.at("backward", step)
        with kept.commit({"step": step + 1}) if kept else contextlib.nullcontext():
            run.step()
            killer.at("block", step)
            before_update(lambda step=step: killer.at("update", step))
        killer.at("after", step)
        run.optimizer.zero_grad()
        if kept and saves and (step + options["seed"]) % 3 == 0:
            state = (run.model, run.optimizer)
            zshard.save(saves, *state, step=step + 1, extra=kept.state_dict(), overwrite=True)
    return start["step"], run.digest()


def before_update(call: Callable[[], None]) -> None:
    """Call this when all ranks have written a step, before the update of this rank."""

    def forget_older(kept: zshard.Keep) -> None:
        call()
        _forget_older(kept)

    zshard.Keep._forget_older = forget_older  # type: ignore[method-assign]


_forget_older = zshard.Keep._forget_older


def losses_in(folder: Path, rank: int) -> set[str]:
    return set(Path(folder, f"losses{rank}").read_text().splitlines())


def undisturbed(options: dict[str, Any]) -> list[tuple[str, set[str]]]:
    """Return each rank's digest and losses without a keeper; once for the same options."""
    key = repr(sorted(options.items()))
    if key not in _undisturbed:
        with tempfile.TemporaryDirectory() as folder:
            ranks = options.get("ranks", 2)
            results = fork_ranks(train, ranks, "", folder, options, None, check=True)
            _undisturbed[key] = [
                (result.value[1], losses_in(Path(folder), result.rank)) for result in results
            ]
    return _undisturbed[key]


_undisturbed: dict[str, list[tuple[str, set[str]]]] = {}


def check(
    keeper: Keeper, folder: Path, options: dict[str, Any], kills: list[tuple[Any, ...]]
) -> int:
    """Run with these kills, one after the other, and compare with an undisturbed run; return where
    the last processes began. A run may also end before it is killed. kills: (place, rank, when);
    with a fourth word, the kept memory is lost as well."""
    expected = undisturbed(options)
    ranks, said = options.get("ranks", 2), f"{options}, killed {kills}"
    for kill in [*kills, None]:
        results = fork_ranks(train, ranks, keeper.token, str(folder), options, kill)
        codes = [result.returncode for result in results]
        if kill is None or all(code == 0 for code in codes):
            break
        assert codes[kill[1]] == -signal.SIGKILL, [result.stderr for result in results]
        # A rank that has finished needs no peer any more, and may end before the other is killed.
        others = [result for result in results if result.rank != kill[1] and result.returncode != 0]
        assert all("PeerError" in result.stderr for result in others), [r.stderr for r in others]
        for name in keeper.list() if kill[3:] else ():
            keeper.drop(name)
    assert codes == [0] * ranks, [result.stderr for result in results]
    for result, (digest, losses) in zip(results, expected, strict=True):
        assert result.value[1] == digest, said
        assert losses_in(folder, result.rank) == losses, said
    began = {int(result.value[0]) for result in results}
    assert len(began) == 1, said
    return began.pop()
