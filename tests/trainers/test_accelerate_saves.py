"""zshard under Accelerate: save_state() and load_state(), on one host and on several."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from nursery import fork_ranks
from spawn import RankPool, on_ranks, ranks
from torch import nn

pytest.importorskip("accelerate", reason="needs zshard[trainers]: make test-trainers")

import accelerate
from accelerated import Run, equal, forget_accelerate, names_in, small_model
from hf_trainers import tiny_llama

import zshard
import zshard.accelerate
from zshard.extras.per_host.collect import collect


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks(2)
def test_resumed_run_has_the_same_losses(strategy, tmp_path):
    first, second = (
        Run(strategy, shuffle=False) for _ in range(2)
    )  # nor do DDP's resume a shuffle
    first.epoch()
    first.accelerator.save_state(tmp_path)
    expected = first.epoch(), first.state()
    second.epoch()
    second.accelerator.load_state(tmp_path)
    assert second.epoch() == expected[0] and equal(second.state(), expected[1])
    files = names_in(tmp_path)
    ours = {"model.safetensors", "optimizer.safetensors", "zshard.json"}
    assert {f"zshard_model/{name}" for name in ours} <= files
    others = {name for name in files if not name.startswith("zshard_model/")}
    assert others == {"scheduler.bin", "random_states_0.pkl", "random_states_1.pkl"}


def run_on_own_disk(**arguments: Any) -> Run:
    """Return a run on a rank that is alone on its host."""
    os.environ.update(ZSHARD_HOST=f"host{os.environ['RANK']}", LOCAL_RANK="0")
    config = accelerate.utils.ProjectConfiguration(save_on_each_node=True)
    return Run(project_config=config, **arguments)


def resume_on_own_disks(root: str) -> tuple[bool, set[str]]:
    """Return whether the run of ranks on their own hosts resumes, and this host's files."""
    folder = Path(root, os.environ["RANK"])
    first = run_on_own_disk(shuffle=False)
    first.epoch()
    first.accelerator.save_state(str(folder))
    with pytest.raises(FileExistsError):
        first.accelerator.save_state(str(folder))
    expected = first.epoch(), first.state()
    second = run_on_own_disk(shuffle=False)
    second.accelerator.load_state(str(folder))
    losses = second.epoch()
    return losses == expected[0] and equal(second.state(), expected[1]), names_in(folder)


def test_hosts_without_a_shared_disk_resume(tmp_path: Path) -> None:
    done = fork_ranks(resume_on_own_disks, 2, str(tmp_path), check=True, timeout=200)
    for rank, (same, files) in enumerate(result.value for result in done):
        assert same
        assert f"zshard_model/rank-{rank:05}-of-00002.part" in files


def resume_with_new_host(root: str, new: int, collects: bool) -> tuple[str, bool]:
    """Return the error of load_state, and whether it has loaded the saved values. The folder of
    rank `new` has only Accelerate's own files, and with `collects` the parts from the others."""
    run, rank = run_on_own_disk(), os.environ["RANK"]
    if rank == str(new):
        shutil.copytree(f"{root}/0", f"{root}/{rank}", ignore=lambda *_: ["zshard_model"])
    error = ""
    if collects:
        collect([f"{root}/{rank}/zshard_model"])
    try:
        run.accelerator.load_state(f"{root}/{rank}")
    except zshard.CheckpointError as found:
        error = str(found)
    return error, equal(run.state(), torch.load(f"{root}/expected.pt"))


def save_on_own_disks(root: str) -> None:
    run, rank = run_on_own_disk(), os.environ["RANK"]
    run.epoch()
    run.accelerator.save_state(f"{root}/{rank}")
    state = run.state()
    if rank == "0":
        torch.save(state, f"{root}/expected.pt")


def test_new_host_loads_what_it_has_collected(tmp_path: Path) -> None:
    fork_ranks(save_on_own_disks, 2, str(tmp_path), check=True, timeout=200)
    done = fork_ranks(resume_with_new_host, 3, str(tmp_path), 2, True, check=True, timeout=200)
    assert [result.value for result in done] == [("", True)] * 3
    shutil.rmtree(tmp_path / "1")
    done = fork_ranks(resume_with_new_host, 2, str(tmp_path), 1, False, check=True, timeout=200)
    for result in done:
        error, loaded = result.value
        assert "host1" in error and not loaded


def save(folder: str, strategy: str | None, **options: Any) -> dict[str, torch.Tensor]:
    run = Run(strategy)
    run.epoch()
    run.accelerator.save_state(folder, **options)
    return run.state()


def load(folder: str) -> Any:
    run = Run("full_shard")
    run.accelerator.load_state(folder)
    return run.state(), run.optimizer.optimizer.state_dict()


@pytest.mark.parametrize("saved", ["full_shard", None], ids=["sharded", "ddp"])
@ranks(1, 3)
def test_another_number_of_ranks_loads(
    pool: RankPool, pool2: RankPool, tmp_path: Path, saved: str | None
) -> None:
    expected = pool2.run(save, str(tmp_path), saved)[0]
    for state, optimizer in pool.run(load, str(tmp_path)):
        assert equal(state, expected)
        assert [int(each["step"]) for each in optimizer["state"].values()] == [6] * 8


@on_ranks(2)
def test_pickled_checkpoint_of_ddp_loads(tmp_path):
    expected = save(str(tmp_path), None, safe_serialization=False)
    assert equal(load(str(tmp_path))[0], expected)


@on_ranks(2)
def test_script_hooks_get_models_and_weights(tmp_path):
    run = Run()
    run.epoch()
    seen: list[str] = []

    def look(models: list[nn.Module], weights: list[dict[str, Any]], where: str) -> None:
        assert models == [run.model]
        seen.extend(weights[0])

    run.accelerator.register_save_state_pre_hook(look)
    run.accelerator.save_state(tmp_path)
    expected = run.state()
    run.epoch()
    run.accelerator.load_state(tmp_path)
    assert seen == list(small_model().state_dict()) and equal(run.state(), expected)


@on_ranks(2)
def test_two_models_and_an_optimizer_of_both_are_saved(tmp_path):
    forget_accelerate()
    accelerator = zshard.accelerate.shard(accelerate.Accelerator(cpu=True))
    models = [small_model(seed) for seed in (1, 2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    both = torch.optim.SGD([*models[0].parameters(), *models[1].parameters()], lr=0.1, momentum=0.9)
    models = list(accelerator.prepare(*models))
    optimizers = list(accelerator.prepare(*optimizers, both))

    def step() -> None:
        for model in models:
            accelerator.backward(model(torch.ones(2, 8)).square().sum())
        for optimizer in optimizers:
            optimizer.step()

    def state() -> list[Any]:
        momentum = optimizers[2].state_dict()["state"][0]["momentum_buffer"].clone()
        return [momentum, *(accelerator.get_state_dict(model) for model in models)]

    step()
    accelerator.save_state(tmp_path)
    expected = state()
    step()
    accelerator.load_state(tmp_path)
    assert_same(state(), expected, "what is loaded")


@on_ranks(2)
def test_model_is_saved_for_from_pretrained(tmp_path):
    forget_accelerate()
    accelerator = zshard.accelerate.shard(accelerate.Accelerator(cpu=True))
    model = tiny_llama(tie_word_embeddings=True)
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    model = accelerator.prepare(model)
    options = {
        "is_main_process": accelerator.is_main_process,
        "save_function": accelerator.save,
        "state_dict": accelerator.get_state_dict(model),
    }
    accelerator.unwrap_model(model).save_pretrained(tmp_path, **options)
    accelerator.wait_for_everyone()
    again = type(tiny_llama()).from_pretrained(tmp_path)
    assert again.config.architectures == ["LlamaForCausalLM"]
    assert equal(dict(again.state_dict()), plain)
    accelerator.save_model(model, f"{tmp_path}/saved")
    accelerator.wait_for_everyone()
    assert "saved/model.safetensors" in names_in(tmp_path)
