"""`zshard.initialize`: make an engine from a model and a DeepSpeed config; `init_distributed`.

As in DeepSpeed: check everything that needs no other rank, shard the model, then make the optimizer
of its parameters, the scheduler of the optimizer and the loader of the data.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from zshard.api import (
    FSDP,
    PublicCall,
    check_agreement,
    is_unit,
    make_default_group,
    reset_or_leave,
    state_of,
)
from zshard.integrations.deepspeed.ds_config import (
    ACCUMULATED,
    Settings,
    make_folder,
    read,
    settings_of,
)
from zshard.integrations.deepspeed.engine import DeepSpeedEngine, check_dataset
from zshard.integrations.deepspeed.optimizers import optimizer_of
from zshard.integrations.deepspeed.schedules import schedule_of
from zshard.integrations.deepspeed.zero import describe

_HALF = (torch.float16, torch.bfloat16)

Config = Mapping[str, Any] | str | os.PathLike[str]
Result = tuple[DeepSpeedEngine, Optimizer | None, DataLoader[Any] | None, Any]


def initialize(
    args: object = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: object = None,
    lr_scheduler: object = None,
    distributed_port: int | None = None,
    mpu: object = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Config | None = None,
    mesh_param: object = None,
    config_params: Config | None = None,
) -> Result:
    """Shard a model according to a DeepSpeed config, and return DeepSpeed's engine, optimizer, data
    loader and scheduler. docs/deepspeed.md lists the keys.

    Collective: call it on all ranks, with the same model and config.

    Args:
        args: the script's arguments: deepspeed_config is the path of the config, and values for
            "auto" have TrainingArguments' names. Its local_rank is set.
        model: the nn.Module. It is sharded in place.
        optimizer: an elementwise optimizer, or a function of `model_parameters` that returns one,
            instead of the config's.
        model_parameters: the parameters or param groups to optimize. Default: all that require
            gradients.
        training_data: a Dataset, for which a DataLoader of micro-batches is returned.
        lr_scheduler: a scheduler of `optimizer`, or a function of the optimizer that returns one,
            instead of the config's.
        distributed_port: ignored; the launcher chooses the port.
        mpu, mesh_param: must be None.
        dist_init_required: False: the script must have initialized torch.distributed. Otherwise it
            is initialized if the script has not.
        collate_fn: of the DataLoader.
        config: the config: a dict, or the path of a JSON file.
        config_params: an earlier name of `config`.

    Returns:
        (engine, optimizer, loader, scheduler); the last three are None where there is none.

    Raises:
        ValueError, TypeError: an argument or a value of the config is invalid; the message names
            it.
        NotImplementedError: the config asks for something that would change numbers and that zshard
            does not support.
        DivergenceError: the ranks' models or configs differ. And what FSDP() raises.
    """
    module = _check_model(model)
    if mpu is not None or mesh_param is not None:
        raise NotImplementedError(
            "zshard.initialize() has data parallelism only: omit mpu= and mesh_param="
        )
    of_args = getattr(args, "deepspeed_config", None)
    configs = {"config": config, "config_params": config_params, "args.deepspeed_config": of_args}
    names = [name for name, value in configs.items() if value is not None]
    if len(names) != 1:
        raise ValueError(
            f"zshard.initialize() got {' and '.join(names) or 'no DeepSpeed config'}: pass config="
        )
    content = read(configs[names[0]])
    init_distributed(dist_init_required=dist_init_required)
    settings = settings_of(content, args, dist.get_world_size(), dist.get_rank())
    _check_sums(module, settings)
    client = _check_optimizer(optimizer, module)
    groups = None if model_parameters is None else _check_parameters(model_parameters, module)
    if isinstance(lr_scheduler, LRScheduler) and lr_scheduler.optimizer is not client:
        raise ValueError("lr_scheduler schedules another optimizer: pass that one as optimizer=")
    if training_data is not None:
        check_dataset(training_data)
    if optimizer is None or client is not None:  # errors come before the model is sharded
        count = sum(isinstance(group, dict) for group in groups or ()) or 1
        count = len(client.param_groups) if client is not None else count
        dummies = [{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(count)]
        trial = None if client is None else torch.optim.AdamW(dummies)
        _steppers(trial, dummies, None if lr_scheduler is None else False, settings)
    _shard(module, settings)
    if groups is None:
        groups = [param for param in module.parameters() if param.requires_grad]
    client, scheduler = _steppers(optimizer, groups, lr_scheduler, settings)
    engine = DeepSpeedEngine(module, client, scheduler, settings)
    if hasattr(args, "local_rank"):
        args.local_rank = engine.local_rank
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
    return engine, client, engine.training_dataloader, scheduler


def init_distributed(
    dist_backend: str | None = None,
    *,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    **arguments: Any,
) -> None:
    """Initialize torch.distributed if the script has not. Collective.

    Without a launcher (torchrun sets RANK and WORLD_SIZE), the world size is 1.

    Args:
        dist_backend: the backend. Default: None, "nccl" where there is a GPU, else "gloo".
        timeout: that of collectives. Default: None, torch's.
        init_method: torch's. Default: None, the environment variables.
        dist_init_required: False: raise RuntimeError if torch.distributed is not initialized.
        arguments: DeepSpeed's other arguments: rank and world_size are passed on, and the rest
            (auto_mpi_discovery, distributed_port, verbose, config) has no effect.
    """
    allowed = {"rank", "world_size", "auto_mpi_discovery", "distributed_port", "verbose", "config"}
    for name in arguments.keys() - allowed:
        raise TypeError(f"init_distributed() got an unexpected argument '{name}'")
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise RuntimeError(
            "torch.distributed is not initialized: initialize it, or omit dist_init_required=False"
        )
    options: dict[str, Any] = {
        name: arguments[name] for name in ("rank", "world_size") if arguments.get(name, -1) >= 0
    }
    if timeout is not None:
        options["timeout"] = timeout
    if init_method is not None:
        options["init_method"] = init_method
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    alone = "init_method" not in options and "RANK" not in os.environ
    make_default_group(backend, alone=alone and not options.get("world_size"), **options)


# --- checks ---------------------------------------------------------------------------------------


def _check_model(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        kind = "nothing" if model is None else type(model).__name__
        raise TypeError(f"zshard.initialize() expects model=, an nn.Module, got {kind}")
    if isinstance(model, DeepSpeedEngine) or is_unit(model):
        raise ValueError("this model is already sharded: call zshard.initialize() once per model")
    if isinstance(model, DistributedDataParallel):
        raise TypeError("this model is in DistributedDataParallel: pass the plain module")
    return model


def _check_sums(module: nn.Module, settings: Settings) -> None:
    """Refuse a dtype for sums over micro-batches that is not the parameters'."""
    sums = settings.accumulated
    for name, param in module.named_parameters():
        dtype = torch.float32 if settings.dtype and param.dtype in _HALF else param.dtype
        if sums is not None and param.requires_grad and dtype is not sums:
            raise NotImplementedError(
                f"'{ACCUMULATED}' in the DeepSpeed config is {sums}, but parameter '{name}' sums "
                f"micro-batches in its dtype, {dtype}: remove the key"
            )


def _check_optimizer(optimizer: object, module: nn.Module) -> Optimizer | None:
    """Return the optimizer if it is one, None if it does not exist yet."""
    if optimizer is None or (callable(optimizer) and not isinstance(optimizer, Optimizer)):
        return None
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch optimizer or a function, got {optimizer!r:.80}")
    _check_members(optimizer.param_groups, module, "optimizer")
    return optimizer


def _check_parameters(parameters: Iterable[Any], module: nn.Module) -> list[Any]:
    if isinstance(parameters, nn.Module | Tensor):
        kind = type(parameters).__name__
        raise TypeError(f"model_parameters must be parameters or param groups, got a {kind}")
    groups = list(parameters)
    has_groups = bool(groups) and all(isinstance(group, dict) for group in groups)
    for i, group in enumerate(groups if has_groups else ()):
        params = group["params"]
        groups[i] = {**group, "params": [params] if isinstance(params, Tensor) else list(params)}
    _check_members(groups if has_groups else [{"params": groups}], module, "model_parameters")
    return groups


def _check_members(groups: Iterable[Any], module: nn.Module, name: str) -> None:
    of_model = {id(param) for param in module.parameters()}
    for param in (param for group in groups for param in group["params"]):
        param = param[1] if isinstance(param, tuple) else param  # torch's named parameters
        if id(param) not in of_model:
            shape = tuple(getattr(param, "shape", ()))
            raise ValueError(f"{name} has a tensor of shape {shape}, not a parameter of the model")


# --- building -------------------------------------------------------------------------------------


def _shard(module: nn.Module, settings: Settings) -> None:
    make_folder(settings.offload)
    if settings.dtype is not None:  # between steps, parameters are DeepSpeed's float32 copies
        for param in module.parameters():
            if param.dtype in _HALF:
                param.data = param.data.float()
    device = None
    if torch.cuda.is_available():
        device = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(device)
    FSDP(
        module,
        strategy=settings.strategy,
        mixed_precision=settings.precision,
        offload=settings.offload,
        device_id=device,
        param_init_fn=reset_or_leave if any(p.is_meta for p in module.parameters()) else None,
    )
    values = sorted(settings.values.items())
    facts = [(f"'{k}'", json.dumps(v, default=str, sort_keys=True)) for k, v in values]
    with PublicCall("initialize()"):
        check_agreement(state_of(module).comms.all, facts, "DeepSpeed configs")
    describe(module.parameters())


def _steppers(
    optimizer: Any, groups: list[Any], scheduler: Any, settings: Settings
) -> tuple[Optimizer | None, Any]:
    """Return the optimizer and the scheduler. optimizer, scheduler: these, or functions that return
    them; None: the config's."""
    section, schedule = settings.section("optimizer"), settings.section("scheduler")
    if optimizer is None and section is not None:
        optimizer = optimizer_of(section, groups)
    elif optimizer is not None and not isinstance(optimizer, Optimizer):
        optimizer = optimizer(groups)
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer= must return a torch optimizer, got {optimizer!r:.80}")
    is_function = callable(scheduler) and not hasattr(scheduler, "step")
    if not is_function and (scheduler is not None or schedule is None):
        return optimizer, scheduler
    if optimizer is None:
        raise ValueError("a scheduler needs an optimizer: add 'optimizer' to the DeepSpeed config")
    return optimizer, scheduler(optimizer) if is_function else schedule_of(
        schedule or {}, optimizer
    )
