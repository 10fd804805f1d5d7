"""Checkpoints: plain safetensors files, written by all ranks at once, and a manifest.

A rank's shard of a parameter is one run of its row-major elements, so every rank
writes and reads its own bytes of ordinary files, whatever the strategy and the number of ranks. A
manifest, written last, lists the files of the checkpoint with their checksums.

    manifest.py     zshard.json: the files of a checkpoint and their checksums
    script_state.py a script's own state, as JSON
    contents.py     what a model and an optimizer have to save, and which rank holds it
    layout.py       the file and the offset of each tensor
    save.py         saving: agree, stage, write, sync, commit
    background.py   asynchronous saves: a snapshot, and a thread that writes it
    write.py        writing tensors to a file, in place or a chunk at a time
    folder.py       checkpoint directories, locks, temporary folders
    checkpoint.py   the content of a checkpoint, whatever its format
    opening.py      opening a checkpoint; explaining what is not a checkpoint
    safetensors.py  headers and indices, which are untrusted
    foreign/        checkpoints of others: torch files, DCP folders, Hugging Face shards
    verify.py       blocks and their checksums
    reader.py       reading values into place
    optimizer.py    loading an optimizer
    load.py         checking, verifying, reading, in this order on all ranks
    progress.py     progress bars
    cli.py          python -m zshard ckpt
"""
