"""DeepSpeed's names: see zshard/integrations/deepspeed."""

from zshard.integrations.deepspeed import *  # noqa: F403
from zshard.integrations.deepspeed import __all__ as __all__
from zshard.integrations.deepspeed import __getattr__ as __getattr__  # type: ignore[attr-defined]
