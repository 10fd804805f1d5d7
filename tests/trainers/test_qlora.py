"""QLoRA: adapters of a base model in bitsandbytes' 4 bits, which is sharded bit for bit or refused
by name.

The dtype of a quantized parameter does not describe its bits, so each storage dtype must train in
the same way. Runs are compared with DDP, on two ranks with the same base model.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from rows import all_rows
from scenarios import message_of
from spawn import on_ranks
from torch import nn

pytest.importorskip("bitsandbytes", reason="needs zshard[trainers]: make test-trainers")
pytest.importorskip("peft", reason="needs zshard[trainers]: make test-trainers")

import bitsandbytes as bnb
from accelerated import equal
from hf_trainers import (
    arguments,
    check_resuming,
    losses_of,
    new_run,
    sentences,
    tiny_llama,
    trainer_of,
)
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    prepare_model_for_kbit_training,
)
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer

import zshard
from zshard import FSDP, DivergenceError, MixedPrecision

BF16 = torch.bfloat16
IDS = torch.tensor([[3, 5, 7, 9]])


def base(folder: str, bits: int = 4, **more: Any) -> Any:
    """A tiny Llama, loaded in 4 or 8 bits on each rank."""
    where = f"{folder}/base"
    if torch.distributed.get_rank() == 0 and not Path(where).exists():
        tiny_llama(hidden_size=64, intermediate_size=128).save_pretrained(where)
    torch.distributed.barrier()
    chosen: dict[str, Any] = {f"load_in_{bits}bit": True}
    if bits == 4:
        chosen |= {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, **more}
    config = BitsAndBytesConfig(**chosen)
    options = {"device_map": {"": "cpu"}, "dtype": torch.float32}
    return AutoModelForCausalLM.from_pretrained(where, quantization_config=config, **options)


def qlora(folder: str, **more: Any) -> Any:
    model = prepare_model_for_kbit_training(base(folder, **more), use_gradient_checkpointing=False)
    targets = ["q_proj", "v_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    return model.train()


def exact(model: Any) -> Any:
    """Turn off bitsandbytes' repacking in an evaluation, after which no gradients flow on some
    CPUs."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def train(model: Any) -> list[float]:
    """Return the losses of five steps, with an evaluation after each."""
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(10 + rank)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        ids = torch.randint(3, 60, (2, 12), generator=generator)
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            losses += [loss.item(), model(input_ids=ids, labels=ids).loss.item()]
        model.train()
    return losses


def bits(state: Any) -> dict[str, torch.Tensor]:
    """Return a state dict's tensors as bytes: the content of a float32 may be a NaN."""
    return {name: value.reshape(-1).view(torch.uint8) for name, value in state.items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "zero2", "no_shard"])
@on_ranks(2)
def test_training_matches_ddp(strategy, transport, tmp_path):
    folder = str(tmp_path)
    plain = exact(qlora(folder))
    losses = train(nn.parallel.DistributedDataParallel(plain))
    model = FSDP(qlora(folder), strategy=strategy, transport=transport)
    assert train(model) == losses
    assert {type(p) for p in model.parameters() if p.dtype == torch.uint8} == {bnb.nn.Params4bit}
    assert model.get_nb_trainable_parameters() == plain.get_nb_trainable_parameters()
    assert equal(bits(model.state_dict()), bits(plain.state_dict()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("storage", [torch.float32, torch.float16, BF16], ids=str)
@on_ranks(2)
def test_mixed_precision_does_not_cast_bits(storage, transport, tmp_path):
    """Bits in a float dtype train under mixed precision as bits in bytes do."""
    folder = str(tmp_path)
    half = MixedPrecision(param_dtype=BF16)
    options: dict[str, Any] = {"mixed_precision": half, "transport": transport}
    expected = train(FSDP(qlora(folder), **options))
    plain = qlora(folder, bnb_4bit_quant_storage=storage)
    model = FSDP(qlora(folder, bnb_4bit_quant_storage=storage), **options)
    assert equal(bits(model.state_dict()), bits(plain.state_dict()))
    assert train(model) == expected


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("half", [False, True])
@on_ranks(2)
def test_biases_of_4_bit_layers(half, dtype):
    """A frozen bias gets the dtype that its 4-bit layer computes in, since the layer would convert
    it."""
    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(64, 64, compute_dtype=dtype).to("cpu")
    layer.bias.requires_grad_(False)
    precision = MixedPrecision(param_dtype=BF16) if half else None
    model = FSDP(nn.Sequential(nn.Linear(64, 64), layer), mixed_precision=precision)
    model(torch.ones(2, 64)).float().sum().backward()
    assert layer.bias.dtype == dtype


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_copies_merges_and_generates(transport, tmp_path):
    folder = str(tmp_path)
    model = FSDP(qlora(folder), transport=transport)
    second = copy.deepcopy(model)
    for one, other in zip(model.modules(), second.modules(), strict=True):
        if isinstance(other, bnb.nn.Linear4bit):
            assert other.weight.quant_state is not one.weight.quant_state
            assert other.weight.module in (None, other)
    for name in ("merge_and_unload", "unload"):
        ours, theirs = (getattr(m, name)().eval() for m in (model, qlora(folder)))
        assert equal(bits(ours.state_dict()), bits(theirs.state_dict()))
        with torch.no_grad():
            assert torch.equal(ours(IDS).logits, theirs(IDS).logits)
    prompt = IDS + torch.distributed.get_rank()
    options = {"input_ids": prompt, "max_new_tokens": 6, "do_sample": False}
    expected = exact(qlora(folder)).eval().generate(**options)
    assert torch.equal(model.eval().generate(**options), expected)
    assert train(model.train()) == train(second.train())


def trainer(folder: str, transport: str | None, **more: Any) -> Any:
    """Return a Trainer, unchanged without a transport."""
    new_run()
    model = qlora(folder) if transport else exact(qlora(folder))
    args = arguments(folder, **{"max_steps": 4, **more})
    data = {"train_dataset": sentences(20), "eval_dataset": sentences(4, seed=1)}
    strategy, options = transport and "full_shard", {"transport": transport}
    return trainer_of(Trainer, strategy, args, model=model, options=options, **data)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_trainer_trains_saves_and_resumes(tmp_path, transport):
    folder = str(tmp_path)
    ddp = trainer(folder, None)
    ddp.train()
    ours = check_resuming(functools.partial(trainer, folder, transport), tmp_path, weights=False)
    assert losses_of(ours) == losses_of(ddp)
    assert ours.evaluate()["eval_loss"] == ddp.evaluate()["eval_loss"]
    ours.save_model(f"{folder}/saved")
    torch.distributed.barrier()
    adapter = get_peft_model_state_dict(ours.model)
    loaded = PeftModel.from_pretrained(base(folder), f"{folder}/saved")
    assert equal(adapter, get_peft_model_state_dict(loaded))


@on_ranks(2)
def test_bits_are_not_loaded(tmp_path):
    """Bits without their scales are other numbers; bitsandbytes saves scales and does not load them."""
    model, path = FSDP(qlora(str(tmp_path))), tmp_path / "saved"
    state = model.state_dict()
    zshard.save(path, model)
    quantized = r"is quantized, and loading does not load its scales"
    with pytest.raises(RuntimeError, match=quantized):
        model.load_state_dict(state)
    with pytest.raises(RuntimeError, match=quantized):
        zshard.load(path, model, strict=False)
    before = bits(model.state_dict())
    adapters = {name: value for name, value in state.items() if "lora_" in name}
    model.load_state_dict(adapters, strict=False)
    assert equal(before, bits(model.state_dict()))


@on_ranks(2)
def test_scales_come_from_rank_0():
    """Ranks have quantized different numbers: all take rank 0's bits and scales."""
    torch.manual_seed(torch.distributed.get_rank())
    model = exact(nn.Sequential(bnb.nn.Linear4bit(64, 64).to("cpu")))
    expected = model(torch.ones(1, 64)).detach()
    torch.distributed.broadcast(expected, 0)
    assert torch.equal(FSDP(model)(torch.ones(1, 64)).detach(), expected)
    other = nn.Sequential(bnb.nn.Linear4bit(64, 64).to("cpu"))
    with pytest.raises(DivergenceError, match=r"0\.weight"):
        FSDP(other, sync_module_states=False)
    kinds = "nf4" if torch.distributed.get_rank() else "fp4"
    with pytest.raises(DivergenceError, match=r"the quantization of '0\.weight'"):
        FSDP(nn.Sequential(bnb.nn.Linear4bit(64, 64, quant_type=kinds).to("cpu")))


def layer(**more: Any) -> Any:
    return nn.Sequential(nn.Linear(64, 64), bnb.nn.Linear4bit(64, 64, **more))


def repacked() -> Any:
    made = layer().to("cpu")
    made[1].weight.quant_state.packing_format_for_cpu = True  # as an evaluation on some CPUs does
    return made


def trainable() -> Any:
    made = layer(quant_storage=BF16, bias=False).to("cpu")
    made[1].weight.requires_grad_(True)
    return made


def eight_bits() -> Any:
    return nn.Sequential(bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False).to("cpu"))


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "meta": (lambda: layer(device="meta"), ValueError, "load the quantized model on every rank"),
    "unquantized": (layer, ValueError, "is not quantized yet: move the model to its device"),
    "repacked": (repacked, ValueError, "repacked by an evaluation: load the model again"),
    "trainable": (trainable, ValueError, "requires_grad_(False)"),
    "bias": (
        lambda: layer(compute_dtype=BF16).to("cpu"),
        ValueError,
        "its layer computes in torch.bfloat16",
    ),
    "8 bits": (eight_bits, TypeError, "in ignored_states=, or load the model in 4 bits"),
}


@on_ranks(2)
def test_unsupported_parameters_are_named():
    with all_rows() as row:
        for kind, (make, error, text) in WRONG.items():
            for time in ("first", "second"):  # the second time as the first
                with row(kind, time):
                    model = make()
                    message = message_of(lambda model=model: FSDP(model), error)
                    assert type(model) is nn.Sequential
                    assert text in message and "parameter '" in message, message


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_ignored_8_bit_parameters_train(transport, tmp_path):
    folder = str(tmp_path)
    losses = train(nn.parallel.DistributedDataParallel(qlora(folder, bits=8)))
    model = qlora(folder, bits=8)
    kept = [p for p in model.parameters() if p.dtype == torch.int8]
    assert len(kept) > 0 and train(FSDP(model, ignored_states=kept, transport=transport)) == losses


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
@on_ranks(2)
def test_torchao_is_named_or_kept():
    from torchao import quantization

    model = tiny_llama()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    with pytest.raises(TypeError, match=r"is of class Int8Tensor.*ignored_states"):
        FSDP(model)
    kept = [p for p in model.parameters() if type(p) is not nn.Parameter]
    train(FSDP(model, ignored_states=kept))
