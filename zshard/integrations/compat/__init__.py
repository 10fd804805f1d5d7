"""The APIs of FSDP1, FSDP2 and DDP: their arguments and names, as thin layers over zshard's own.

    from zshard.compat import MixedPrecisionPolicy, fully_shard

All names are torch's, for scripts that change only their imports; `from zshard import ...` finds
them as well.
"""

from __future__ import annotations

from zshard.integrations.compat import ddp, fsdp2, scaler
from zshard.integrations.compat.ddp import *  # noqa: F403
from zshard.integrations.compat.fsdp2 import *  # noqa: F403
from zshard.integrations.compat.scaler import *  # noqa: F403
from zshard.model import torch_classes
from zshard.model.torch_classes import *  # noqa: F403

__all__ = sorted([*ddp.__all__, *fsdp2.__all__, *scaler.__all__, *torch_classes.__all__])
