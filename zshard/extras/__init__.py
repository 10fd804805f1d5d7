"""What stands on the core and a plain script does without: averages, exports, kept runs,
whole-matrix optimizers, traces, the launcher and the planner. `from zshard import ...` finds these
names."""

from zshard.extras.any_world import MicroBatchSampler
from zshard.extras.averages import EMA
from zshard.extras.data_position import DataPosition
from zshard.extras.doctor import available_features
from zshard.extras.keeping.agent import keep
from zshard.extras.optimizers.eight_bit import Adam8bit, AdamW8bit, SGD8bit
from zshard.extras.optimizers.muon import Muon
from zshard.extras.optimizers.whole_matrix import WholeMatrix
from zshard.extras.recovery.keep import Keep
from zshard.extras.trace import profile
from zshard.extras.weights.delta import Exported
from zshard.extras.weights.export import Export as Export
from zshard.extras.weights.export import export
from zshard.extras.weights.send import receive_export

__all__ = [
    "EMA",
    "Adam8bit",
    "AdamW8bit",
    "DataPosition",
    "Exported",
    "Keep",
    "MicroBatchSampler",
    "Muon",
    "SGD8bit",
    "WholeMatrix",
    "available_features",
    "export",
    "keep",
    "profile",
    "receive_export",
]
