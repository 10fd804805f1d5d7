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
_NEEDS_OPTIMIZER = (
    "a scheduler needs an optimizer: add the section 'optimizer' to the DeepSpeed config, or pass "
    "optimizer="
)

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
    for name, value in (("mpu", mpu), ("mesh_param", mesh_param)):
        if value is not None:
            raise NotImplementedError(
                f"zshard.initialize(): {name} must be None: zshard has data parallelism only"
            )
    given = read(_config_of(args, config, config_params))
    init_distributed(dist_init_required=dist_init_required)
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    settings = settings_of(given, args, world, rank)
    _check_sums(module, settings)
    client = _check_optimizer(optimizer, module)
    groups = None if model_parameters is None else _check_parameters(model_parameters, module)
    if isinstance(lr_scheduler, LRScheduler) and lr_scheduler.optimizer is not client:
        raise ValueError(
            "lr_scheduler schedules another optimizer than the engine's: pass optimizer= as well, "
            "or a function of the optimizer as lr_scheduler="
        )
    if training_data is not None:
        check_dataset(training_data)
    if optimizer is None or client is not None:
        _try_sections(settings, client, groups, lr_scheduler is None)
    _shard(module, settings)
    chosen = client or _make_optimizer(optimizer, groups, module, settings)
    scheduler = _make_scheduler(lr_scheduler, chosen, settings)
    engine = DeepSpeedEngine(module, chosen, scheduler, settings)
    if hasattr(args, "local_rank"):
        args.local_rank = engine.local_rank
    if training_data is not None:
        loader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
        engine.training_dataloader = loader
    return engine, chosen, engine.training_dataloader, scheduler


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
    known = {"rank", "world_size", "auto_mpi_discovery", "distributed_port", "verbose", "config"}
    for name in arguments.keys() - known:
        raise TypeError(f"init_distributed() got an unexpected argument '{name}'")
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise RuntimeError(
            "torch.distributed is not initialized: call torch.distributed.init_process_group() "
            "first, or omit dist_init_required=False"
        )
    given: dict[str, Any] = {
        name: arguments[name] for name in ("rank", "world_size") if arguments.get(name, -1) >= 0
    }
    if timeout is not None:
        given["timeout"] = timeout
    if init_method is not None:
        given["init_method"] = init_method
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    alone = "init_method" not in given and "RANK" not in os.environ
    make_default_group(backend, alone=alone and not given.get("world_size"), **given)


# --- checks ---------------------------------------------------------------------------------------


def _check_model(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        kind = "nothing" if model is None else type(model).__name__
        raise TypeError(f"zshard.initialize() expects model=, an nn.Module, got {kind}")
    if isinstance(model, DeepSpeedEngine) or is_unit(model):
        raise ValueError(
            "this model is already sharded: call zshard.initialize() once per model, with the "
            "plain module, and keep the engine"
        )
    if isinstance(model, DistributedDataParallel):
        raise TypeError(
            "this model is in DistributedDataParallel: pass the plain module to zshard.initialize()"
        )
    return model


def _check_sums(module: nn.Module, settings: Settings) -> None:
    """Refuse a dtype for sums over micro-batches that is not the parameters'."""
    asked = settings.accumulated
    for name, param in module.named_parameters():
        dtype = torch.float32 if settings.dtype and param.dtype in _HALF else param.dtype
        if asked is None or not param.requires_grad or dtype is asked:
            continue
        wanted, actual = (str(each).removeprefix("torch.") for each in (asked, dtype))
        raise NotImplementedError(
            f"'{ACCUMULATED}' in the DeepSpeed config is {wanted}, but parameter '{name}' "
            f"is {actual}, and zshard sums micro-batches in the parameters' dtype: remove "
            "the key, or for float32 sums enable 'bf16', which keeps float32 parameters"
        )


def _config_of(args: object, config: Config | None, config_params: Config | None) -> object:
    found = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    given = [name for name, value in found.items() if value is not None]
    if len(given) != 1:
        what = f"got {' and '.join(given)}" if given else "got none"
        raise ValueError(
            f"zshard.initialize() expects one DeepSpeed config, {what}: pass config=, or args= "
            "with deepspeed_config"
        )
    return found[given[0]]


def _check_optimizer(optimizer: object, module: nn.Module) -> Optimizer | None:
    """Return the optimizer if it is one, None if it does not exist yet."""
    if optimizer is None or (callable(optimizer) and not isinstance(optimizer, Optimizer)):
        return None
    if not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"optimizer must be a torch optimizer or a function, got {kind}")
    _check_own(optimizer.param_groups, module, "optimizer")
    return optimizer


def _check_parameters(parameters: Iterable[Any], module: nn.Module) -> list[Any]:
    if isinstance(parameters, nn.Module | Tensor):
        kind = type(parameters).__name__
        raise TypeError(f"model_parameters must be parameters or param groups, got a {kind}")
    groups = list(parameters)
    if groups and all(isinstance(each, dict) for each in groups):
        for i, each in enumerate(groups):
            params = each["params"]
            groups[i] = {**each, "params": [params] if isinstance(params, Tensor) else list(params)}
        _check_own(groups, module, "model_parameters")
    else:
        _check_own([{"params": groups}], module, "model_parameters")
    return groups


def _check_own(groups: Iterable[Any], module: nn.Module, name: str) -> None:
    own = {id(param) for param in module.parameters()}
    for group in groups:
        for param in group["params"]:
            if isinstance(param, tuple):  # torch's named parameters
                param = param[1]
            if id(param) not in own:
                raise ValueError(
                    f"{name} has a tensor of shape {tuple(getattr(param, 'shape', ()))} that is "
                    "not a parameter of the model: pass parameters of the same model"
                )


def _try_sections(
    settings: Settings, client: Optimizer | None, groups: list[Any] | None, schedules: bool
) -> None:
    """Build the config's optimizer and scheduler for dummy parameters, so that errors surface
    before the model is sharded."""
    count = sum(isinstance(each, dict) for each in groups or ()) or 1
    if client is not None:
        count = len(client.param_groups)
    others = [{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(count)]
    section, schedule = settings.section("optimizer"), settings.section("scheduler")
    made: Optimizer = torch.optim.AdamW(others)
    if client is None and section is not None:
        made = optimizer_of(section, others)
    if schedules and schedule is not None:
        if client is None and section is None:
            raise ValueError(_NEEDS_OPTIMIZER)
        schedule_of(schedule, made)


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
    facts = [
        (f"'{name}'", json.dumps(value, default=str, sort_keys=True))
        for name, value in sorted(settings.values.items())
    ]
    with PublicCall("initialize()"):
        check_agreement(state_of(module).comms.all, facts, "DeepSpeed configs")
    describe(module.parameters())


def _make_optimizer(
    function: Any, groups: list[Any] | None, module: nn.Module, settings: Settings
) -> Optimizer | None:
    if groups is None:
        groups = [param for param in module.parameters() if param.requires_grad]
    section = settings.section("optimizer")
    if function is not None:
        made = function(groups)
        if not isinstance(made, Optimizer):
            kind = type(made).__name__
            raise TypeError(f"optimizer= must return a torch optimizer, got {kind}")
        return made
    return None if section is None else optimizer_of(section, groups)


def _make_scheduler(given: Any, optimizer: Optimizer | None, settings: Settings) -> Any:
    section = settings.section("scheduler")
    is_made = given is not None and (hasattr(given, "step") or not callable(given))
    if is_made or (given is None and section is None):
        return given
    if optimizer is None:
        raise ValueError(_NEEDS_OPTIMIZER)
    return given(optimizer) if given is not None else schedule_of(section or {}, optimizer)
