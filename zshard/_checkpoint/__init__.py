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
    write.py        bytes of tensors into a file
    checkpoint.py   what a checkpoint has, of whatever kind it is
    opening.py      opening one; what is no checkpoint, and why
    safetensors.py  headers and indices, which are not trusted
    dcp.py          folders that torch.distributed.checkpoint wrote
    hf_shards.py    folders of its HuggingFaceStorageWriter, in parts
    torch_file.py   the files of torch.save() in them
    pickled.py      pickles, read as data
    verify.py       blocks and their checksums
    reader.py       values, to where they belong
    optimizer.py    loading an optimizer
    load.py         checking, verifying, reading, in this order on all ranks
    progress.py     a bar for who looks on
    cli.py          python -m zshard ckpt
"""
