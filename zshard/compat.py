"""Torch's names: see zshard/integrations/compat."""

from zshard.integrations.compat import *  # noqa: F403
from zshard.integrations.compat import __all__ as __all__
