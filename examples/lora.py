"""LoRA on a Llama from a config: TRL's SFTTrainer teaches a model of Python's code the manual, by
adapters of PEFT alone.

    torchrun --standalone --nproc-per-node 2 examples/lora.py --strategy full_shard

A first SFTTrainer trains the Llama on code, because nothing is downloaded; a second one trains only
the adapters. Tokens are bytes. Needs the extra `trainers`.
"""

import math
import sysconfig
from pathlib import Path
from typing import Any

import common
import corpus
import torch
from bert import Report, resume, sharded
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
)
from trl import SFTConfig, SFTTrainer

EXPECTED = -0.3  # bits per held-out byte of the manual; the baseline is the Llama without adapters
LENGTH = 64  # bytes of a sample
BATCH = 8  # per rank
RANK = 16  # of the adapters


def llama(quick: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)  # the same initial parameters on all ranks
    width = 32 if quick else 96
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Each byte is a token, though with another number."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    end = letters[-1]
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end, pad_token=end)


def manual() -> tuple[Tensor, Tensor]:
    """Python's manual of its topics, bytes to train on and bytes held out (the last tenth)."""
    path = Path(sysconfig.get_path("stdlib")) / "pydoc_data" / "topics.py"
    text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    border = len(text) * 9 // 10
    return text[:border], text[border:]


def samples(text: Tensor, count: int) -> Dataset:
    """`count` windows, spread evenly over the text."""
    starts = torch.linspace(0, len(text) - LENGTH, count, dtype=torch.float64).long()
    windows = text[starts[:, None] + torch.arange(LENGTH)].tolist()
    return Dataset.from_list([{"input_ids": window} for window in windows])


def trained(
    run: common.Run, name: str, model: Any, text: Tensor, held_out: Tensor, **more: Any
) -> Any:
    """A trainer that has trained; `name` is the folder of its checkpoints."""
    args = run.args
    settings = SFTConfig(
        str(args.save / name if args.save else "build/lora"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=args.steps,
        per_device_train_batch_size=BATCH,
        optim="adamw_torch",  # fused, its last bit depends on where a shard ends
        max_grad_norm=0.0,  # DDP rounds the norm for clipping differently
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        max_length=LENGTH,
        logging_steps=1,
        save_strategy="steps" if args.save else "no",
        save_steps=args.save_every,
        report_to="none",
        disable_tqdm=True,
        seed=args.seed,
    )
    made = sharded(run, SFTTrainer)(
        model=model,
        args=settings,
        train_dataset=samples(text, 64 if run.quick else 8192),
        eval_dataset=samples(held_out, 32 if run.quick else 256),
        processing_class=byte_tokenizer(),
        callbacks=[Report(run)],
        **more,
    )
    made.remove_callback(PrinterCallback)
    resume(run, made, args.resume and args.resume / name)
    return made


def bits(trainer: Any) -> float:
    """Bits per held-out byte."""
    return trainer.evaluate()["eval_loss"] / math.log(2)


def train(run: common.Run) -> None:
    code, _ = corpus.load()
    text, held_out = manual()
    model = llama(run.quick)
    run.note(model)
    first = trained(run, "code", model, code, held_out)
    before = bits(first)
    plain = llama(run.quick)
    plain.load_state_dict(first.accelerator.get_state_dict(first.model_wrapped))

    adapters = {"r": RANK, "lora_alpha": 2 * RANK, "target_modules": "all-linear"}
    config = LoraConfig(task_type="CAUSAL_LM", **adapters)
    second = trained(run, "manual", plain, text, held_out, peft_config=config)
    change = bits(second) - before
    what = f"held-out bits per byte by adapters, beside {before:.2f}"
    run.result(what, change, expected=EXPECTED, baseline=("without them", 0.0))


if __name__ == "__main__":
    common.main(__doc__, train, steps=100)
