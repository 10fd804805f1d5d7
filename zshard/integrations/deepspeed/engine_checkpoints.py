"""DeepSpeed's checkpoints, as zshard folders: `<save_dir>/<tag>`, and a file `latest`.

zshard.save() and zshard.load() do the work; the engine's counts are in `extra`, next to the
script's client_state. The file `latest` is renamed into place after its checkpoint, so it never
names an unfinished one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zshard import api
from zshard.api import (
    CheckpointError,
    PublicCall,
    gather,
    load,
    on_all_ranks,
    path_of,
    save,
    state_dict_form,
    state_of,
    warn_on_rank_0,
)
from zshard.extras.per_host.hosts import Hosts
from zshard.integrations.deepspeed.ds_config import Settings

_LATEST = "latest"
_COUNTS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
_ENGINE, _CLIENT = "engine", "client_state"  # in `extra`


class EngineCheckpoints:
    """The methods of the engine that save and load."""

    module: Any
    optimizer: Optimizer | None
    lr_scheduler: Any
    global_steps: int
    _settings: Settings
    _drop_round: Callable[[], None]
    _new_scaler: Callable[[], None]

    @PublicCall("save_checkpoint()")
    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the model, optimizer, scheduler, loss scale and counts in the folder save_dir/tag.

        Collective: call it on all ranks. An existing checkpoint of that tag is replaced once this
        one is finished. With `checkpoint.use_node_local_storage` in the config, each of several
        hosts saves its own part to its own disk, and an existing checkpoint is an error.

        tag: the name of the checkpoint. None: "global_step<number>".
        client_state: the script's own state, of the kinds that `extra` of zshard.save() takes. Each
            rank's is saved.
        save_latest: write the tag into the file save_dir/latest.

        Raises what zshard.save() raises, on all ranks; NotImplementedError for
        exclude_frozen_parameters.
        """
        if exclude_frozen_parameters:
            raise NotImplementedError(
                "exclude_frozen_parameters=True is not supported: omit it; checkpoints have all"
            )
        folder, comm = path_of(save_dir), self._comm()
        how: dict[str, Any] = {"overwrite": True}
        writes = comm.rank == 0
        if self._settings.own_disks:
            hosts = Hosts(comm)
            if len(hosts.all) > 1:
                how, writes = {"per_host": True}, hosts.leads
        with on_all_ranks(comm):
            name = _checked(f"global_step{self.global_steps}" if tag is None else str(tag))
            path = os.path.join(folder, name)
            if client_state is not None and not isinstance(client_state, Mapping):
                raise TypeError(f"client_state must be a dict, got {type(client_state).__name__}")
            if writes:
                os.makedirs(os.path.dirname(path), exist_ok=True)
        state = {count: getattr(self, count) for count in _COUNTS}
        parts = {"loss_scale": self._settings.loss_scale, "lr_scheduler": self.lr_scheduler}
        state |= {k: None if part is None else part.state_dict() for k, part in parts.items()}
        extra = {_ENGINE: state, _CLIENT: dict(client_state or {})}
        save(path, self.module, self.optimizer, extra=extra, **how)
        with on_all_ranks(comm):
            if save_latest and writes:
                part = os.path.join(folder, f"{_LATEST}.part")
                with open(part, "w", encoding="utf-8") as file:
                    file.write(name)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(part, os.path.join(folder, _LATEST))
        return True

    @PublicCall("load_checkpoint()")
    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: object = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load what save_checkpoint() saved, on any number of ranks and with any stage.

        Collective: call it on all ranks. Gradients of an unfinished round are dropped.

        tag: None: the one in the file load_dir/latest of the first rank that has it; if none has,
            warns and loads nothing.
        load_module_strict: False: ignore names that only the model or the checkpoint has.
        load_optimizer_states, load_lr_scheduler_states: False: leave these as they are.
        load_module_only: load the parameters and nothing else.

        Returns the path and this rank's client_state; (None, None) if nothing was loaded.

        Raises FileNotFoundError for a missing tag, CheckpointError for a checkpoint of DeepSpeed or
        a damaged one, and what else zshard.load() raises, on all ranks.
        """
        if custom_load_fn is not None:
            raise NotImplementedError(
                "custom_load_fn is not supported: call engine.module.load_state_dict() on all ranks"
            )
        folder, comm = path_of(load_dir), self._comm()
        with on_all_ranks(comm):
            name = None if tag is None else _checked(str(tag))
            latest = os.path.join(folder, _LATEST)
            if tag is None:
                with contextlib.suppress(FileNotFoundError):
                    name = _checked(Path(latest).read_text("utf-8").strip())
        # A new host with a disk of its own has no file `latest` and no checkpoint.
        names = gather(comm, name)
        if tag is None:
            name = next(filter(None, names), None)
        if name is None:
            warn_on_rank_0(comm, f"nothing was loaded: there is no '{latest}'; pass tag=")
            return None, None
        path = os.path.join(folder, name)
        some_rank_has_it = any(gather(comm, os.path.isdir(path)))
        with on_all_ranks(comm):
            if not some_rank_has_it:
                tags = sorted(entry.name for entry in Path(folder).glob("*") if entry.is_dir())
                raise FileNotFoundError(f"there is no checkpoint '{path}': pass one of {tags}")
            if any(Path(path).glob("*_model_states.pt")):
                raise CheckpointError(
                    f"'{path}' is a checkpoint of DeepSpeed: convert it with DeepSpeed's "
                    "zero_to_fp32.py --safe_serialization, then call zshard.load()"
                )
        wants_optimizer = load_optimizer_states and not load_module_only
        optimizer = self.optimizer if wants_optimizer else None
        loaded = load(path, self.module, optimizer, strict=load_module_strict)
        self._drop_round()
        state = None if load_module_only else loaded.get(_ENGINE)
        if state is not None:  # zshard.save() saves none: the counts stay
            for count in _COUNTS:
                setattr(self, count, state[count])
            scale, scheduler = self._settings.loss_scale, self.lr_scheduler
            if scale is not None and state["loss_scale"] is not None:
                scale.load_state_dict(state["loss_scale"])
                self._new_scaler()
            if load_lr_scheduler_states and scheduler and state["lr_scheduler"] is not None:
                scheduler.load_state_dict(state["lr_scheduler"])
        return path, dict(loaded.get(_CLIENT, {}))

    @PublicCall("save_16bit_model()")
    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the model's state dict by torch.save(), in bfloat16 or float16 if it trains in that.

        Collective: call it on all ranks; rank 0 gathers and writes. Works at all stages.
        """
        if save_filename.endswith(".safetensors"):
            raise ValueError(
                f"save_filename={save_filename!r} would be a pickle: for safetensors files, call "
                "zshard.save()"
            )
        comm = self._comm()
        params = dict(self.module.named_parameters(remove_duplicate=False))
        with state_dict_form(self.module, rank0_only=True):
            state = self.module.state_dict()
        with on_all_ranks(comm):
            if comm.rank == 0:
                casts: dict[nn.Parameter, torch.Tensor] = {}  # tied ones stay one tensor
                for name in params.keys() & state.keys():
                    cast = state[name].to(self._settings.dtype or state[name].dtype)
                    state[name] = casts.setdefault(params[name], cast)
                    if exclude_frozen_parameters and not params[name].requires_grad:
                        del state[name]
                os.makedirs(path_of(save_dir), exist_ok=True)
                torch.save(state, os.path.join(path_of(save_dir), save_filename))
        return True

    def _comm(self) -> api.Comm:
        return state_of(self.module).comms.all


def _checked(tag: str) -> str:
    parts = tag.split("/")
    if not tag or os.path.isabs(tag) or ".." in parts or tag == _LATEST or "" in parts:
        raise ValueError(f"tag={tag!r} is not the name of a folder in save_dir")
    return tag
