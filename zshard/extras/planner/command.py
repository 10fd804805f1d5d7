"""python -m zshard plan: a model's memory and speed on GPUs, predicted without them.

python -m zshard plan config.json --gpus 16 --gpu h100
python -m zshard plan --layers 32 --width 4096 --heads 32 --vocab 32000 --gpus 8 --gpu h100
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from zshard.api import Offload
from zshard.extras.planner.decoder import Dims
from zshard.extras.planner.gpus import DEVICES
from zshard.extras.planner.search import plan
from zshard.extras.planner.ways import PRECISIONS

HELP = "predict memory and speed of training a model on GPUs"


def add_command(commands: Any) -> None:
    """Add `plan` to the parser of python -m zshard."""
    parser = commands.add_parser("plan", help=HELP, description=HELP)
    parser.set_defaults(run=_run, program=parser.prog)
    parser.add_argument("model", nargs="?", help="a transformers config: a file, folder or name")
    parser.add_argument("--gpus", type=int, help="number of GPUs")
    parser.add_argument("--gpu", help=f"one of {', '.join(DEVICES)}")
    for name, words in (
        ("layers", "number of layers of a decoder, in place of MODEL"),
        ("width", "hidden size"),
        ("heads", "attention heads"),
        ("kv-heads", "KV heads (default: as many as attention heads)"),
        ("ffn", "intermediate size (default: as Llama's, or 4 x hidden size with --gpt)"),
        ("vocab", "vocabulary size"),
    ):
        parser.add_argument(f"--{name}", type=int, help=words)
    parser.add_argument("--lora", type=int, default=0, help="train adapters of this rank only")
    parser.add_argument("--gpt", action="store_true", help="blocks as GPT's, not Llama's")
    parser.add_argument("--seq", type=int, help="sequence length (default: at most 4096)")
    batch = "global batch size, in samples (default: one fast micro-batch per GPU)"
    parser.add_argument("--batch", type=int, help=batch)
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16", help="(default: bf16)")
    optimizer = "as for predict_memory() (default: adamw)"
    parser.add_argument("--optimizer", default="adamw", help=optimizer)
    parser.add_argument("--compile", action="store_true", help="the model is compiled")
    parts = "to the host: some of params,grads,optimizer, or none (default: if nothing fits)"
    parser.add_argument("--offload", metavar="PARTS", help=parts)
    parser.add_argument("--wire", help="as FSDP's: bf16 between nodes")
    parser.add_argument("--per-host", type=int, help="GPUs per node (default: 8, or all)")
    parser.add_argument("--nic", type=float, help="Gbit/s of a node (default: the GPU's usual)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(args: argparse.Namespace) -> int:
    names = ("seq", "batch", "precision", "optimizer", "wire", "per_host", "nic")
    options = {name: getattr(args, name) for name in names}
    try:
        options |= {"compiled": args.compile, "offload": _offload(args.offload)}
        result = plan(_model(args), args.gpus, args.gpu, **options)
        print(result.to_json() if args.json else result)
    except (ValueError, TypeError, OSError) as error:
        print(f"{args.program}: {error}", file=sys.stderr)
        return 2
    return 0 if result.best is not None else 1


def _offload(text: str | None) -> Offload | bool | None:
    if text is None or text == "none":
        return None if text is None else False
    parts = set(text.split(","))
    if not parts <= {"params", "grads", "optimizer"}:
        raise ValueError(f"--offload takes some of params,grads,optimizer, or none, got {text!r}")
    return Offload("params" in parts, "grads" in parts, "optimizer" in parts)


def _model(args: argparse.Namespace) -> Any:
    dims = (args.layers, args.width, args.heads, args.vocab)
    if args.model is not None and not any(dims):
        return args.model
    if args.model is not None or not all(dims):
        raise ValueError("give either MODEL or all of --layers, --width, --heads, --vocab")
    ffn = args.ffn or (4 * args.width if args.gpt else 64 * round(args.width / 24))
    sizes = *dims[:3], args.kv_heads or args.heads, ffn, args.vocab, args.seq or 4096
    return Dims(*sizes, gated=not args.gpt, lora=args.lora)
