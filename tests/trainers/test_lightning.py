"""Lightning's Trainer with strategy="zshard" trains as with its own strategy="ddp".

Ranks train with each of the two strategies, and compare everything that a user could see: losses,
logged values, weights, checkpoints. They are bit-identical, except for the norm for gradient
clipping.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from spawn import RankFailure, on_ranks

pytest.importorskip("lightning", reason="needs lightning: make test-trainers")

import lightning_runs
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.model_summary import summarize
from lightning_runs import RANKS, Block, Gan, Net, data, run_on_ranks, trainer, weights
from micro_batches import LOW, MICRO, STRATEGY, check_sums, full_grads

import zshard
from zshard.integrations.lightning.fabric import trainer_package
from zshard.lightning import ZShardStrategy

SHARDED = {"state_dict_type": "sharded"}


def new(model: str) -> Any:
    torch.manual_seed(5)
    return getattr(lightning_runs, model)()


def same(function: Any, *args: Any, ours: Any = "zshard", theirs: str = "ddp") -> Any:
    """Fail unless function(strategy, *args) gives the same with both strategies; return that."""
    result = function(ours, *args)
    assert_same(result, function(theirs, *args), f"{ours} against {theirs}")
    return result


# --- training ---------------------------------------------------------------------------------------

AVERAGES = {
    "ema": lambda: EMAWeightAveraging(decay=0.9),
    "swa": lambda: StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1),
}


def fit(strategy: Any, model: str = "Net", average: str = "", **options: Any) -> dict[str, Any]:
    """Return losses, metrics, weights, test results and predictions."""
    net = new(model)
    callbacks = [AVERAGES[average]()] if average else []
    run = trainer(strategy, callbacks=callbacks, **options)
    run.fit(net, data(), data(16))
    metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    results = {"losses": net.losses, "metrics": metrics, "weights": weights(net)}
    if isinstance(net, Gan):
        return results
    tested, predicted = run.test(net, data(16), verbose=False), run.predict(net, data(16))
    return {**results, "tested": tested[0], "predicted": predicted}


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 3},  # 8 batches: the last window has two
    "by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "64-true": {"precision": "64-true"},
    "16-mixed": {"precision": "16-mixed"},  # Lightning makes it bf16-mixed on CPUs
    "ema": {"average": "ema", "max_epochs": 3},
    "swa": {"average": "swa", "max_epochs": 3},
    "its own names": {"model": "OwnNames", "accumulate_grad_batches": 3},
    "frozen, unused": {"model": "FrozenAndUnused"},
    "two optimizers": {"model": "Gan"},
    "two optimizers without toggles": {"model": "GanWithoutToggles"},
    "meta device": {"model": "Late"},
    "its own units": {"model": "OwnUnit"},
    "zshard.AdamW": {"model": "OwnAdamW"},
    "zshard.AdamW, accumulated": {"model": "OwnAdamW", "accumulate_grad_batches": 3},
    "optimizer before sharding": {"model": "EarlyOptimizer"},
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", OPTIONS)
@on_ranks(2, **RANKS)
def test_run_is_bit_identical_to_ddp(name):
    options = OPTIONS[name]
    unused = options.get("model") in ("FrozenAndUnused", "Gan", "GanWithoutToggles")
    theirs = "ddp_find_unused_parameters_true" if unused else "ddp"
    same(lambda strategy: fit(strategy, **options), theirs=theirs)


@on_ranks(2, **RANKS)
def test_clipping_by_norm_differs_in_the_last_bit_at_most():
    ours, theirs = (fit(each, gradient_clip_val=0.1) for each in ("zshard", "ddp"))
    for part, rtol in (("losses", 1e-5), ("weights", 1e-4)):
        torch.testing.assert_close(ours[part], theirs[part], rtol=rtol, atol=rtol / 10)


ARGUMENTS: list[dict[str, Any]] = [
    {"sharding_strategy": "SHARD_GRAD_OP"},
    {"strategy": "ddp"},
    {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (1, 2)},
    {"activation_checkpointing_policy": {Block}},
    {"auto_wrap_policy": {Block}, "cpu_offload": True},
    {"transport": "c10d"},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@on_ranks(2, **RANKS)
def test_arguments_of_fsdp_strategy(arguments):
    same(fit, ours=arguments)


def fit_twice(strategy: Any) -> Any:
    net = new("Net")
    run = trainer(strategy)
    run.fit(net, data(), data(16))
    run.fit_loop.max_epochs = 2
    run.fit(net, data(), data(16))
    trainer(strategy, precision="bf16-mixed").fit(net, data())
    return net.losses, weights(net)


@on_ranks(2, **RANKS)
def test_second_fit_continues():
    same(fit_twice)


class Grads(Callback):
    """Keeps the gradients of each optimizer step."""

    def __init__(self) -> None:
        self.grads: list[torch.Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.grads += full_grads(pl_module)


def accumulated() -> list[torch.Tensor]:
    low, grads = {"sharding_strategy": STRATEGY, "mixed_precision": LOW}, Grads()
    run = trainer(low, callbacks=[grads], accumulate_grad_batches=MICRO, max_steps=1)
    run.fit(new("Net"), data(2 * MICRO * 4))
    return grads.grads


@on_ranks(2, **RANKS)
def test_micro_batches_are_summed_in_float32():
    check_sums(accumulated)


def watched(strategy: Any, folder: Path) -> Any:
    net, logger = new("Net"), CSVLogger(f"{folder}/{strategy}")
    callbacks = [LearningRateMonitor("step"), EarlyStopping("val", patience=1)]
    options = {"max_epochs": 4, "log_every_n_steps": 1}
    run = trainer(strategy, logger=logger, callbacks=callbacks, **options)
    run.fit(net, data(), data(16))
    text = Path(logger.log_dir, "metrics.csv").read_text() if run.is_global_zero else "lr-AdamW"
    return net.losses, run.current_epoch, text


@on_ranks(2, **RANKS)
def test_monitors_and_logs(tmp_path):
    assert "lr-AdamW" in same(watched, tmp_path)[2]


class Table(ModelSummary):
    """Keeps its output instead of printing it."""

    printed: tuple[Any, ...] = ()

    @staticmethod
    def summarize(*args: Any, **options: Any) -> None:
        Table.printed = args


def summaries(strategy: Any) -> list[Any]:
    """Return the counts before a fit and after it, and the table of its callback."""
    net, counts = new("Net"), []
    net.example_input_array = torch.randn(2, 8)
    net.blocks[1].requires_grad_(False)
    for fits in (False, True):
        if fits:
            trainer(strategy, callbacks=[Table(max_depth=2)], max_steps=1).fit(net, data())
        for depth in (1, -1):
            total = summarize(net, max_depth=depth)
            names = ("total_parameters", "trainable_parameters", "param_nums", "layer_types")
            counts.append([getattr(total, name) for name in names])
    return [*counts, repr(Table.printed)]


@on_ranks(2, **RANKS)
def test_summaries_count_full_parameters_also_after_fit():
    counts = same(summaries)
    assert counts[:2] == counts[2:4]


# --- checkpoints ------------------------------------------------------------------------------------


def fit_and_save(strategy: Any, folder: str, *callbacks: Any) -> Any:
    """Return losses and weights of two epochs, with a checkpoint after every second step."""
    net = new("Net")
    kept = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    run = trainer(strategy, max_epochs=2, callbacks=[kept, *callbacks], enable_checkpointing=True)
    run.fit(net, data(), data(16))
    return net.losses, weights(net)


def resume(strategy: Any, path: Path, model: str = "Net") -> Any:
    net = new(model)
    trainer(strategy, max_epochs=2).fit(net, data(), ckpt_path=path)
    return net.losses, weights(net)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint folders of the same run: DDP's, and both kinds of zshard's."""
    folder = tmp_path_factory.mktemp("saved")
    kinds = {"ddp": "ddp", "full": "zshard", "sharded": SHARDED}
    runs = [run_on_ranks(fit_and_save, each, str(folder / name)) for name, each in kinds.items()]
    assert_same(runs[1], runs[0], "the run with full checkpoints")
    assert_same(runs[2], runs[0], "the run with sharded checkpoints")
    names = [sorted(os.listdir(folder / name)) for name in kinds]
    assert names[0] == names[1] == names[2] and "step=4.ckpt" in names[0]
    torch.save(runs[0][0], folder / "run.pt")
    return folder


@pytest.mark.parametrize("kind", ["ddp", "full", "sharded"])
@on_ranks(1, 2, 3, **RANKS)
def test_resuming_with_any_number_of_ranks(saved, kind):
    theirs = resume("ddp", saved / "ddp" / "step=4.ckpt")
    ours = resume("zshard", saved / kind / "step=4.ckpt")
    if dist.get_world_size() < 3:  # three terms have several sums
        assert_same(ours, theirs, "the resumed run")
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


class Kill(Callback):
    """Kills the second rank in the second epoch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 10:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(folder: str) -> None:
    fit_and_save("zshard", folder, Kill())


def test_resuming_after_a_kill_is_bit_identical(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        run_on_ranks(killed, str(tmp_path))
    losses, last = torch.load(saved / "run.pt")
    resumed, state = run_on_ranks(resume, "zshard", tmp_path / "step=8.ckpt")[0]
    assert resumed == losses[8:]
    assert_same(state, last, "the state")


@on_ranks(2, **RANKS)
def test_ddp_resumes_from_a_checkpoint_of_zshard(saved):
    same(resume, saved / "full" / "step=4.ckpt")


@pytest.mark.parametrize("model", ["Late", "Loose"])
@pytest.mark.parametrize("kind", ["full", "sharded"])
@on_ranks(2, **RANKS)
def test_modules_resume_on_the_meta_device_and_without_strict_loading(saved, kind, model):
    ours = resume("zshard", saved / kind / "step=4.ckpt", model)
    theirs = resume("ddp", saved / "ddp" / "step=4.ckpt", model)
    assert_same(ours, theirs, "the resumed run")


def look(strategy: Any, path: Path) -> Any:
    """Validate a fresh module, then test it with a checkpoint's weights."""
    net, run = new("Net"), trainer(strategy)
    first = run.validate(net, data(16), verbose=False)
    return first, run.test(net, data(16), ckpt_path=path, verbose=False)


@pytest.mark.parametrize("kind", ["full", "sharded"])
@on_ranks(2, **RANKS)
def test_validating_and_testing_without_a_fit(saved, kind):
    paths = {"zshard": saved / kind / "step=16.ckpt", "ddp": saved / "ddp" / "step=16.ckpt"}
    same(lambda strategy: look(strategy, paths[strategy]))


def test_checkpoints_load_into_a_plain_module(saved: Path) -> None:
    state = torch.load(saved / "run.pt")[1]
    full = Net.load_from_checkpoint(saved / "full" / "step=16.ckpt", weights_only=False)
    assert_same(full.state_dict(), state, "the full checkpoint")
    net = Net()
    zshard.load(saved / "sharded" / "step=16.ckpt", net)
    assert_same(net.state_dict(), state, "the sharded checkpoint")


class SaveAlone(Callback):
    """Rank 0 alone saves the module's weights."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.is_global_zero and trainer.global_step == 3:
            torch.save(pl_module.state_dict(), self.path)


def save_alone(strategy: Any, path: str) -> Any:
    net = new("Net")
    trainer(strategy, callbacks=[SaveAlone(f"{path}/{strategy}.pt")]).fit(net, data())
    return net.losses


@on_ranks(2, **RANKS)
def test_rank_0_saves_alone(tmp_path):
    same(save_alone, tmp_path)
    if dist.get_rank() == 0:
        ours, theirs = (torch.load(tmp_path / f"{each}.pt") for each in ("zshard", "ddp"))
        assert_same(ours, theirs, "what rank 0 has saved")


# --- ranks started by Lightning ------------------------------------------------------------------------

SCRIPT = """
import sys
sys.path[:0] = {folders!r}
import torch
torch.set_num_threads(1)
import lightning_runs
from lightning_runs import data, trainer, weights

if __name__ == "__main__":
    run = trainer("zshard", {devices})
    torch.manual_seed(5)
    net = lightning_runs.{model}()
    run.fit(net, data(), data(16))
    if run.is_global_zero:
        torch.save((net.losses, weights(net)), {out!r})
"""


def launched(folder: Path, model: str = "Net", devices: int = 2) -> Any:
    """Run a script that starts its ranks; return (returncode, stderr, the saved values)."""
    here, out = Path(__file__).parent, folder / "out.pt"
    folders = [str(here), str(here.parent / "lib")]
    script = SCRIPT.format(folders=folders, model=model, devices=devices, out=str(out))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    (folder / "script.py").write_text(script)
    words = [sys.executable, str(folder / "script.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=env)
    return done.returncode, done.stderr, torch.load(out) if out.exists() else None


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_lightning_starts_the_ranks(tmp_path: Path, devices: int) -> None:
    code, errors, seen = launched(tmp_path, devices=devices)
    assert code == 0, errors[-2000:]
    theirs = run_on_ranks(fit, "ddp", world=devices)[0]
    assert_same(seen, (theirs["losses"], theirs["weights"]), "the run")


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "text"), [
    ("FailsOnRank1", "boom on rank 1"),
    ("EarlyUnit", "WORLD_SIZE=2, but there is no process group"),  # rank 0 has sharded alone
])  # fmt: skip
def test_a_failure_of_one_rank_ends_all(tmp_path: Path, model: str, text: str) -> None:
    code, errors, _ = launched(tmp_path, model)
    assert code != 0 and text in errors


# --- refusals ---------------------------------------------------------------------------------------


@on_ranks(2, **RANKS)
def test_unit_of_fewer_ranks_is_refused():
    dist.init_process_group("gloo")
    groups = [dist.new_group([rank]) for rank in range(2)]
    net = new("Net")
    zshard.FSDP(net.blocks, groups[dist.get_rank()])
    with pytest.raises(ValueError, match=r"over 1 rank\(s\), but Lightning runs 2: leave zshard"):
        trainer("zshard").fit(net, data())


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="no argument 'find_unused_parameters': omit it"):
        ZShardStrategy(find_unused_parameters=True)
    with pytest.raises(ValueError, match="state_dict_type must be 'full' or 'sharded', got 'half'"):
        ZShardStrategy(state_dict_type="half")  # type: ignore[arg-type]


@on_ranks(2, **RANKS)
def test_fits_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match=r"^2 optimizers are configured"):
        fit(SHARDED, "Gan")
    with pytest.raises(ValueError, match=r"EMAWeightAveraging saves full weights.*'full'"):
        fit(SHARDED, average="ema")
    net = new("Net")
    trainer("zshard").fit(net, data())
    with pytest.raises(TypeError, match=r"DistributedDataParallel cannot wrap .*adapter"):
        trainer("ddp").validate(net, data(16), verbose=False)


def test_notebook_forks_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.trainer.connectors import accelerator_connector

    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    run = trainer_package.Trainer(accelerator="cpu", devices=2, strategy="zshard", logger=False)
    assert run.strategy.launcher.is_interactive_compatible
