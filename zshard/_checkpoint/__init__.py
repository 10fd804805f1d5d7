"""Checkpoints: plain safetensors files, written by all ranks at once, and a manifest.

The one idea: a rank's part of a parameter is one run of its row-major elements, so every rank
writes and reads its own bytes of ordinary files, whatever the strategy and the number of ranks. A
manifest, written last, says what belongs together and has checksums of all of it.

    manifest.py     zshard.json: what a checkpoint consists of
    extra.py        what else a script keeps, as JSON
    outline.py      what a model and an optimizer have to save, and who has it
    layout.py       which tensor lies where in which file
    save.py         writing: agree, stage, write, sync, commit
    write.py        from tensors to one file, in place or a chunk at a time
    folder.py       directories of numbered checkpoints
    safetensors.py  reading the files of others, which are not trusted
    load.py         checking, then reading to where the values belong
    dcp.py          folders that torch.distributed.checkpoint wrote
    cli.py          python -m zshard ckpt
"""
