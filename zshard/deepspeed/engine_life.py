"""What happens once to an engine: the model is compiled; the engine ends.

Only the model is compiled. The engine's own forward counts micro-batches, which a
compiled function would do once, when it is traced.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

__all__ = ["EngineLife"]


class EngineLife:
    """The part of the engine that compiles and ends."""

    module: Any
    optimizer: Optimizer | None
    lr_scheduler: Any
    training_dataloader: Any
    _scaler: Any
    _drop_round: Any
    _destroyed = False

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the model by torch.compile, in place. A second call does nothing.

        compile_kwargs: other arguments of torch.compile; "backend" in it is ignored, as by
            DeepSpeed.

        Raises NotImplementedError for `schedule` and `compiled_autograd_enabled`; TypeError for
        arguments that torch.compile does not have; RuntimeError after destroy().
        """
        self._check_alive("compile")
        if schedule is not None:
            raise NotImplementedError(
                "engine.compile(): schedule= is of DeepCompile, which zshard does not have: leave "
                "it out"
            )
        if compiled_autograd_enabled:
            raise NotImplementedError(
                "engine.compile(): compiled_autograd_enabled=True is not supported: leave it out; "
                "the backward of what is compiled is compiled, too"
            )
        if not self.is_compiled:
            self.module.compile(**{**(compile_kwargs or {}), "backend": backend})

    @property
    def is_compiled(self) -> bool:
        """Whether the model is compiled."""
        return self.module._compiled_call_impl is not None

    def destroy(self) -> None:
        """End the engine: drop the gradients, and let go of the optimizer, the scheduler and the
        data loader. Call it on all ranks; a second call does nothing.

        Afterwards backward(), step() and checkpoints are a RuntimeError. The model stays sharded,
        and engine.module can evaluate and save. Its memory and the optimizer's are free once the
        script has dropped its own references to them.
        """
        if self._destroyed:
            return
        self._drop_round()
        self._destroyed = True
        self.optimizer = self.lr_scheduler = self.training_dataloader = self._scaler = None

    def _check_alive(self, name: str) -> None:
        if self._destroyed:
            raise RuntimeError(
                f"engine.{name}() was called after engine.destroy(): use engine.module, which is "
                "the sharded model, or build the model again and call zshard.initialize()"
            )
