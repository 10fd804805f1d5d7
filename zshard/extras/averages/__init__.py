"""zshard.EMA: moving averages of a sharded model's weights, and how they are saved and loaded.

ema.py              the averages, and the model with them in place of its parameters
saved_averages.py   in a checkpoint

The core imports it for save(ema=) and load(ema=), and finds here what it asks for.
"""

from zshard.extras.averages.ema import EMA as EMA
from zshard.extras.averages.saved_averages import to_load as to_load
from zshard.extras.averages.saved_averages import to_save as to_save
