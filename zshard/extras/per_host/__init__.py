"""Checkpoints of hosts that share no disk: save(per_host=True), and reading them.

parts.py        the files of a checkpoint, put together from part files
hosts.py        which checkpoint all hosts have; files from one host to the others
write_parts.py  each rank writes a part file
collect.py      brings the part files together

The core imports it when it is needed, and finds here what it asks for.
"""

from zshard.extras.per_host.hosts import Hosts as Hosts
from zshard.extras.per_host.hosts import common_checkpoint as common_checkpoint
from zshard.extras.per_host.hosts import latest_of_hosts as latest_of_hosts
from zshard.extras.per_host.parts import Spread as Spread
from zshard.extras.per_host.write_parts import writer as writer
