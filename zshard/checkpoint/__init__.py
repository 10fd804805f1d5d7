"""Checkpoints: plain safetensors files, written by all ranks at once, and a manifest.

A rank's shard of a parameter is one run of its row-major elements, so every rank
writes and reads its own bytes of ordinary files, under any strategy and number of ranks. A
manifest, written last, lists the files of the checkpoint with their checksums.

    safetensors.py  files, their headers and indices, which are untrusted
    manifest.py     zshard.json: the files of a checkpoint and their checksums; verifying them
    script_state.py a script's own state, as JSON
    folder.py       checkpoint directories, locks, temporary folders

    contents.py     what a model and an optimizer have to save, and which rank holds it
    save_plan.py    the file and the offset of each tensor, and what this rank writes
    write.py        writing tensors to a file, in place or a chunk at a time, or in a thread
    save.py         saving: agree, stage, write, sync, commit

    checkpoint.py   an open checkpoint of any format; extras/readers opens what others wrote
    load.py         checking, verifying, reading, in this order on all ranks
    load_optimizer.py   what an optimizer's load_state_dict() has to do in it

"""
