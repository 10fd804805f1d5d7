"""Checkpoints of hosts that share no disk: save(per_host=True), and reading them over the wire.

parts.py        the files of a checkpoint, put together from part files
write_parts.py  each rank writes a part file; hosts copy those of others
hosts.py        which host has which part files, and which checkpoint is complete
remote.py       reads part files of other hosts
collect.py      makes one ordinary folder of them

The core imports it when it is needed, and finds here what it asks for.
"""

from zshard.extras.per_host.hosts import latest_of_hosts as latest_of_hosts
from zshard.extras.per_host.hosts import opened_together as opened_together
from zshard.extras.per_host.parts import Spread as Spread
from zshard.extras.per_host.write_parts import parse as parse
from zshard.extras.per_host.write_parts import writer as writer
