"""Lightning's Trainer with strategy="zshard" trains as with its own strategy="ddp".

Each test runs a function on ranks twice, with each of the two strategies, and compares what a user
could see: losses, logged values, weights, checkpoints. They are bit-identical, except for the norm
for gradient clipping.
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
from spawn import RankFailure

pytest.importorskip("lightning", reason="needs lightning: make test-trainers")

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
from lightning_runs import (
    Block,
    FrozenAndUnused,
    Gan,
    Late,
    Loose,
    Net,
    OwnNames,
    OwnUnit,
    data,
    on_ranks,
    strategy_of,
    trainer,
    weights,
)
from micro_batches import LOW, MICRO, STRATEGY, check_sums, full_grads

import zshard
from zshard.integrations.lightning.fabric import trainer_package
from zshard.lightning import ZShardStrategy

DDP = "ddp"
UNUSED = "ddp_find_unused_parameters_true"
SHARDED = {"state_dict_type": "sharded"}
MODELS = {
    each.__name__: each for each in (Net, Late, Loose, Gan, FrozenAndUnused, OwnNames, OwnUnit)
}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


# --- functions on ranks -----------------------------------------------------------------------------


def fit(world: int, strategy: Any, model: str, options: dict[str, Any], *args: Any) -> Any:
    """Return losses, metrics, test results, predictions and weights."""
    net = MODELS[model](*args)
    made = trainer(strategy, world, **options)
    made.fit(net, data(), data(16))
    seen = {name: float(value) for name, value in made.callback_metrics.items()}
    if model == "Gan":
        return net.losses, seen, weights(net)
    tested = made.test(net, data(16), verbose=False)
    predicted = made.predict(net, data(16))
    return net.losses, seen, tested, predicted, weights(net)


def fit_and_save(world: int, strategy: Any, folder: str) -> Any:
    """Return losses and weights of two epochs, with a checkpoint after every second step."""
    net = Net()
    kept = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    made = trainer(
        strategy, world, max_epochs=2, callbacks=[kept], enable_checkpointing=True, logger=False
    )
    made.fit(net, data(), data(16))
    return net.losses, weights(net)


class Kill(Callback):
    """Kills the second rank in the second epoch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 10:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(world: int, strategy: Any, folder: str) -> None:
    kept = ModelCheckpoint(folder, save_on_train_epoch_end=True, filename="{epoch}")
    options = {"callbacks": [kept, Kill()], "enable_checkpointing": True, "max_epochs": 2}
    net = Net()  # before the trainer seeds, as in fit_and_save()
    trainer(strategy, world, **options).fit(net, data(), data(16))


def resume(world: int, strategy: Any, path: str, model: str = "Net") -> Any:
    net = MODELS[model]()
    made = trainer(strategy, world, max_epochs=2)
    made.fit(net, data(), ckpt_path=path)
    return net.losses, weights(net)


def look(world: int, strategy: Any, path: str) -> Any:
    """Validate a fresh module, then test it with a checkpoint's weights."""
    net = Net()
    made = trainer(strategy, world)
    first = made.validate(net, data(16), verbose=False)
    return first, made.test(net, data(16), ckpt_path=path, verbose=False)


def fit_twice(world: int, strategy: Any) -> Any:
    net = Net()
    made = trainer(strategy, world)
    made.fit(net, data(), data(16))
    made.fit_loop.max_epochs = 2
    made.fit(net, data(), data(16))
    trainer(strategy, world, precision="bf16-mixed").fit(net, data())
    return net.losses, weights(net)


def average(world: int, strategy: Any, kind: str) -> Any:
    made = {
        "ema": lambda: EMAWeightAveraging(decay=0.9),
        "swa": lambda: StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1),
    }[kind]()
    net = Net()
    run = trainer(strategy, world, callbacks=[made], max_epochs=3)
    run.fit(net, data(), data(16))
    return net.losses, weights(net), run.callback_metrics["val"]


def watched(world: int, strategy: Any, folder: str) -> Any:
    net = Net()
    callbacks = [LearningRateMonitor("step"), EarlyStopping("val", patience=1)]
    logger = CSVLogger(f"{folder}/{strategy}")
    made = trainer(
        strategy, world, logger=logger, callbacks=callbacks, max_epochs=4, log_every_n_steps=1
    )
    made.fit(net, data(), data(16))
    text = Path(logger.log_dir, "metrics.csv").read_text() if made.is_global_zero else ""
    return net.losses, made.current_epoch, text


class Table(ModelSummary):
    """Keeps its output instead of printing it."""

    printed: tuple[Any, ...] = ()

    @staticmethod
    def summarize(*args: Any, **options: Any) -> None:
        Table.printed = args


def table(world: int, strategy: Any) -> Any:
    net = Net()
    net.example_input_array = torch.randn(2, 8)
    run = trainer(strategy, world, callbacks=[Table(max_depth=2)], max_steps=1)
    run.fit(net, data())
    return Table.printed


def summarized(world: int, strategy: Any) -> Any:
    """Return summarize()'s output before and after fit()."""
    net, found = Net(), []
    net.blocks[1].requires_grad_(False)
    for fits in (False, True):
        if fits:
            trainer(strategy, world, max_steps=1).fit(net, data())
        for depth in (1, -1):
            told = summarize(net, max_depth=depth)
            found.append(
                (
                    told.total_parameters,
                    told.trainable_parameters,
                    told.param_nums,
                    told.layer_types,
                )
            )
    return found


def own_adamw(world: int, strategy: Any, accumulate: int) -> Any:
    net = Net()
    net.configure_optimizers = lambda: zshard.AdamW(net.parameters(), lr=0.05)  # type: ignore
    trainer(strategy, world, accumulate_grad_batches=accumulate).fit(net, data())
    return net.losses, weights(net)


class Grads(Callback):
    """Keeps the gradients of each optimizer step."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.found += full_grads(pl_module)


def accumulated(world: int) -> list[torch.Tensor]:
    given = {"sharding_strategy": STRATEGY, "mixed_precision": LOW}
    grads, options = Grads(), {"accumulate_grad_batches": MICRO, "max_steps": 1}
    made = trainer(given, world, callbacks=[grads], **options)
    made.fit(Net(), data(2 * MICRO * 4))
    return grads.found


def check_accumulated(world: int) -> None:
    check_sums(lambda: accumulated(world))


def early_optimizer(world: int, strategy: Any) -> Any:
    """Return an optimizer with two groups, of parameters before sharding."""
    net = Net()
    groups = [[p for p in net.parameters() if (p.ndim > 1) is big] for big in (True, False)]
    made = torch.optim.AdamW([{"params": group} for group in groups], lr=0.05)
    net.configure_optimizers = lambda: made  # type: ignore[method-assign]
    trainer(strategy, world).fit(net, data())
    return net.losses, weights(net)


class SaveAlone(Callback):
    """Rank 0 saves the module's weights by itself."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.is_global_zero and trainer.global_step == 3:
            torch.save(pl_module.state_dict(), self.path)


def save_alone(world: int, strategy: Any, path: str) -> Any:
    net = Net()
    trainer(strategy, world, callbacks=[SaveAlone(f"{path}/{strategy}.pt")]).fit(net, data())
    return net.losses


def message_of(world: int, strategy: Any, model: str, options: dict[str, Any], *args: Any) -> str:
    """Return the text of fit()'s error."""
    made = trainer(strategy, world, **options)
    try:
        made.fit(MODELS[model](*args), data())
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def average_message(world: int) -> str:
    return message_of(world, SHARDED, "Net", {"callbacks": [EMAWeightAveraging()]})


# --- comparison with DDP ----------------------------------------------------------------------------

OPTIONS = {
    "plain": {},
    "accumulate": {"accumulate_grad_batches": 3},  # 8 batches: the last window has two
    "by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "64-true": {"precision": "64-true"},
    "16-mixed": {"precision": "16-mixed"},  # Lightning makes it bf16-mixed on CPUs
}


@pytest.mark.parametrize("name", OPTIONS)
def test_run_is_bit_identical_to_ddp(name: str) -> None:
    ours, theirs = (on_ranks(fit, 2, each, "Net", OPTIONS[name]) for each in ("zshard", DDP))
    assert equal(ours, theirs)


def test_a_modules_own_names_are_its_own() -> None:
    options = OPTIONS["accumulate"]
    ours, theirs = (on_ranks(fit, 2, each, "OwnNames", options) for each in ("zshard", DDP))
    assert equal(ours, theirs)


def test_clipping_by_norm_differs_in_the_last_bit_at_most() -> None:
    options = {"gradient_clip_val": 0.1}
    ours, theirs = (on_ranks(fit, 2, each, "Net", options) for each in ("zshard", DDP))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine[0], other[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mine[4], other[4], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arguments", [
    {"sharding_strategy": "SHARD_GRAD_OP"},
    {"strategy": "ddp"},
    {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (1, 2)},
    {"activation_checkpointing_policy": {Block}},
    {"auto_wrap_policy": {Block}, "cpu_offload": True},
    {"transport": "c10d"},
], ids=str)  # fmt: skip
def test_arguments_of_fsdp_strategy(arguments: dict[str, Any]) -> None:
    ours, theirs = (on_ranks(fit, 2, each, "Net", {}) for each in (arguments, DDP))
    assert equal(ours, theirs)


def test_frozen_and_unused_parameters_and_batch_norm() -> None:
    ours = on_ranks(fit, 2, "zshard", "FrozenAndUnused", {})
    assert equal(ours, on_ranks(fit, 2, UNUSED, "FrozenAndUnused", {}))


def test_summarize_counts_full_parameters_also_after_fit() -> None:
    ours = on_ranks(summarized, 2, "zshard")
    assert ours == on_ranks(summarized, 2, DDP)
    assert ours[0][:2] == ours[0][2:]


@pytest.mark.parametrize("toggles", [True, False])
def test_two_optimizers_with_manual_optimization(toggles: bool) -> None:
    ours, theirs = (on_ranks(fit, 2, each, "Gan", {}, toggles) for each in ("zshard", UNUSED))
    assert equal(ours, theirs)


def test_configure_model_on_the_meta_device() -> None:
    ours = on_ranks(fit, 2, "zshard", "Late", {}, "meta")
    assert equal(ours, on_ranks(fit, 2, DDP, "Late", {}, "cpu"))


def test_own_units_in_configure_model() -> None:
    ours = on_ranks(fit, 2, "zshard", "OwnUnit", {}, "configure_model")
    assert equal(ours, on_ranks(fit, 2, DDP, "OwnUnit", {}, "nowhere"))


def test_second_fit_continues() -> None:
    assert equal(on_ranks(fit_twice, 2, "zshard"), on_ranks(fit_twice, 2, DDP))


def test_micro_batches_are_summed_in_float32() -> None:
    on_ranks(check_accumulated, 2)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_zshard_optimizer(accumulate: int) -> None:
    ours, theirs = (on_ranks(own_adamw, 2, each, accumulate) for each in ("zshard", DDP))
    assert equal(ours, theirs)


def test_optimizer_created_before_sharding() -> None:
    assert equal(on_ranks(early_optimizer, 2, "zshard"), on_ranks(early_optimizer, 2, DDP))


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_averages_of_weights(kind: str) -> None:
    assert equal(on_ranks(average, 2, "zshard", kind), on_ranks(average, 2, DDP, kind))


def test_monitors_and_logs(tmp_path: Path) -> None:
    ours, theirs = (on_ranks(watched, 2, each, str(tmp_path)) for each in ("zshard", DDP))
    assert equal(ours, theirs)
    assert "lr-AdamW" in ours[0][2]


def test_summary_counts_full_parameters() -> None:
    assert equal(on_ranks(table, 2, "zshard"), on_ranks(table, 2, DDP))


# --- checkpoints ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint folders of the same run: DDP's, and both kinds of zshard's."""
    folder = tmp_path_factory.mktemp("saved")
    runs = [
        on_ranks(fit_and_save, 2, each, str(folder / name))
        for name, each in (("ddp", DDP), ("full", "zshard"), ("sharded", SHARDED))
    ]
    assert equal(runs[1], runs[0]) and equal(runs[2], runs[0])
    names = [sorted(os.listdir(folder / name)) for name in ("ddp", "full", "sharded")]
    assert names[0] == names[1] == names[2] and "step=4.ckpt" in names[0]
    torch.save(runs[0], folder / "run.pt")
    return folder


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", ["ddp", "full", "sharded"])
def test_resuming_with_any_number_of_ranks(saved: Path, kind: str, world: int) -> None:
    theirs = on_ranks(resume, world, DDP, str(saved / "ddp" / "step=4.ckpt"))
    ours = on_ranks(resume, world, "zshard", str(saved / kind / "step=4.ckpt"))
    if world < 3:
        assert equal(ours, theirs)
    for mine, other in zip(ours, theirs, strict=True):  # three terms have several sums
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_resuming_after_a_kill_is_bit_identical(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        on_ranks(killed, 2, "zshard", str(tmp_path))
    path = tmp_path / "epoch=0.ckpt"
    whole = torch.load(saved / "run.pt")
    for (losses, values), (first, last) in zip(
        on_ranks(resume, 2, "zshard", str(path)), whole, strict=True
    ):
        assert losses == first[8:] and equal(values, last)


def test_ddp_resumes_from_a_checkpoint_of_zshard(saved: Path) -> None:
    path = str(saved / "full" / "step=4.ckpt")
    assert equal(on_ranks(resume, 2, DDP, path), on_ranks(resume, 2, "zshard", path))


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_module_on_the_meta_device_resumes(saved: Path, kind: str) -> None:
    ours = on_ranks(resume, 2, "zshard", str(saved / kind / "step=4.ckpt"), "Late")
    assert equal(ours, on_ranks(resume, 2, DDP, str(saved / "ddp" / "step=4.ckpt")))


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_module_resumes_without_strict_loading(saved: Path, kind: str) -> None:
    ours = on_ranks(resume, 2, "zshard", str(saved / kind / "step=4.ckpt"), "Loose")
    assert equal(ours, on_ranks(resume, 2, DDP, str(saved / "ddp" / "step=4.ckpt"), "Loose"))


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_validating_and_testing_without_a_fit(saved: Path, kind: str) -> None:
    ours = on_ranks(look, 2, "zshard", str(saved / kind / "step=16.ckpt"))
    assert equal(ours, on_ranks(look, 2, DDP, str(saved / "ddp" / "step=16.ckpt")))


def test_checkpoints_load_into_a_plain_module(saved: Path) -> None:
    values = torch.load(saved / "run.pt")[0][1]
    net = Net.load_from_checkpoint(saved / "full" / "step=16.ckpt", weights_only=False)
    assert equal(dict(net.state_dict()), values)
    net = Net()
    zshard.load(saved / "sharded" / "step=16.ckpt", net)
    assert equal(dict(net.state_dict()), values)


def test_rank_0_saves_alone(tmp_path: Path) -> None:
    runs = [on_ranks(save_alone, 2, each, str(tmp_path)) for each in ("zshard", DDP)]
    assert equal(*runs)
    assert equal(torch.load(tmp_path / "zshard.pt"), torch.load(tmp_path / "ddp.pt"))


# --- ranks started by Lightning ------------------------------------------------------------------------

SCRIPT = """
import sys
sys.path[:0] = {folders!r}
import torch
torch.set_num_threads(1)
from lightning_runs import FailsOnRank1, Net, OwnUnit, data, strategy_of, trainer, weights

if __name__ == "__main__":
    made = trainer(strategy_of({strategy!r}), {devices})
    net = {model}
    made.fit(net, data(), data(16))
    if made.is_global_zero:
        torch.save((net.losses, weights(net)), {out!r})
"""


def launched(folder: Path, strategy: Any, model: str = "Net()", devices: int = 2) -> Any:
    """Run a script that starts its ranks itself; return (returncode, stderr, what it saved)."""
    here, out = Path(__file__).parent, folder / "out.pt"
    folders = [str(here), str(here.parent / "lib")]
    (folder / "script.py").write_text(
        SCRIPT.format(
            folders=folders, strategy=strategy, model=model, devices=devices, out=str(out)
        )
    )
    done = subprocess.run(
        [sys.executable, folder / "script.py"],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stderr, torch.load(out) if out.exists() else None


def as_launched(world: int, strategy: Any) -> Any:
    """Return what the script saves."""
    made, net = trainer(strategy, world), Net()
    made.fit(net, data(), data(16))
    return net.losses, weights(net)


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_lightning_starts_the_ranks(tmp_path: Path, devices: int) -> None:
    code, errors, seen = launched(tmp_path, "zshard", devices=devices)
    assert code == 0, errors[-2000:]
    assert equal(seen, on_ranks(as_launched, devices, DDP)[0])


@pytest.mark.thorough
def test_exception_on_one_rank_ends_all(tmp_path: Path) -> None:
    code, errors, _ = launched(tmp_path, "zshard", "FailsOnRank1()")
    assert code != 0
    assert "boom on rank 1" in errors


@pytest.mark.thorough
def test_unit_created_before_the_ranks_is_refused(tmp_path: Path) -> None:
    """By rank 1, which Lightning starts after rank 0 has sharded alone."""
    code, errors, _ = launched(tmp_path, "zshard", "OwnUnit('init')")
    assert code != 0
    assert "WORLD_SIZE=2, but there is no process group" in errors


def unit_of_one_rank(world: int) -> str:
    dist.init_process_group("gloo")
    groups = [dist.new_group([rank]) for rank in range(world)]
    net = Net()
    zshard.FSDP(net.blocks, groups[dist.get_rank()])
    with pytest.raises(ValueError) as caught:
        trainer("zshard", world).fit(net, data())
    return str(caught.value)


def test_unit_of_fewer_ranks_is_refused() -> None:
    for text in on_ranks(unit_of_one_rank, 2):
        assert "is sharded over 1 rank(s), but Lightning runs 2: leave zshard.FSDP to" in text


# --- refusals ---------------------------------------------------------------------------------------


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="no argument 'find_unused_parameters': omit it"):
        ZShardStrategy(find_unused_parameters=True)
    with pytest.raises(ValueError, match="state_dict_type must be 'full' or 'sharded', got 'half'"):
        ZShardStrategy(state_dict_type="half")  # type: ignore[arg-type]


def test_sharded_checkpoints_of_two_optimizers_are_refused() -> None:
    for text in on_ranks(message_of, 2, SHARDED, "Gan", {}):
        assert text.startswith("ValueError: 2 optimizers are configured")


def test_sharded_checkpoints_of_averages_are_refused() -> None:
    for text in on_ranks(average_message, 2):
        assert "EMAWeightAveraging saves full weights" in text and "'full'" in text


def validate_with_ddp(world: int, strategy: Any) -> str:
    net = Net()
    trainer(strategy, world).fit(net, data())
    try:
        trainer(DDP, world).validate(net, data(16), verbose=False)
    except TypeError as error:
        return str(error)
    return ""


def test_ddp_does_not_take_a_sharded_module() -> None:
    for text in on_ranks(validate_with_ddp, 2, "zshard"):
        assert "DistributedDataParallel cannot wrap a model" in text and "zshard's adapter" in text


def test_ranks_that_fail_are_reported() -> None:
    with pytest.raises(RankFailure):
        on_ranks(resume, 2, "zshard", "/nowhere.ckpt")


def test_strategies_by_arguments() -> None:
    assert isinstance(strategy_of(SHARDED), ZShardStrategy)


def test_notebook_forks_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.trainer.connectors import accelerator_connector

    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    made = trainer_package.Trainer(accelerator="cpu", devices=2, strategy="zshard", logger=False)
    assert made.strategy.launcher.is_interactive_compatible
