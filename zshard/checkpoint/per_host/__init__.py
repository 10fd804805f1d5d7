"""Checkpoints of hosts that share no disk: save(per_host=True), and reading them over the wire.

parts.py        the files of a checkpoint, put together from part files
write_parts.py  each rank writes a part file; hosts copy those of others
hosts.py        which host has which part files, and which checkpoint is complete
remote.py       reads part files of other hosts
collect.py      makes one ordinary folder of them
"""
