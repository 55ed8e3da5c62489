"""Models of Hugging Face on one controller's mesh: how each is made, placed and trained, with one process beside it."""

from __future__ import annotations

import fnmatch
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import peft
import torch
import transformers as hf
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from monarch_backend.dtensor import put_module

VOCABULARY, ROWS, LENGTH, STEPS, NEW_TOKENS = 128, 4, 8, 3, 4
COLUMNS, ROWS_OF_WEIGHT = ColwiseParallel, RowwiseParallel
Batch = dict[str, Tensor]


def heads() -> ParallelStyle:
    """Return the style of a norm of each head, (rows, length, heads, size): its weight's gradient sums over ranks."""
    return SequenceParallel(sequence_dim=2, use_local_output=True)


class Conv1DStyle(ParallelStyle):
    """Style of the MLP of GPT-2, whose weights are (inputs, outputs): first by columns, then by rows."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, tensor, placement in (
            ("c_fc.weight", module.c_fc, Shard(1)),
            ("c_fc.bias", module.c_fc, Shard(0)),
            ("c_proj.weight", module.c_proj, Shard(0)),
            ("c_proj.bias", module.c_proj, Replicate()),
        ):
            key = name.split(".")[1]
            whole = getattr(tensor, key)
            setattr(tensor, key, nn.Parameter(distribute_tensor(whole.detach(), device_mesh, [placement])))
        module.register_forward_pre_hook(
            lambda _, args: tuple(DTensor.from_local(each, device_mesh, [Replicate()]) for each in args)
        )
        module.register_forward_hook(lambda _, _args, result: result.full_tensor())
        return module


class Model(NamedTuple):
    """How to make a model with a rate of dropout, its repeated block, and the styles of its tensor-parallel plan."""

    make: Callable[[float], nn.Module]
    block: type[nn.Module] | None = None
    plan: Mapping[str, Callable[[], ParallelStyle]] = types.MappingProxyType({})
    batch: str = "text"
    generates: bool = False


def _llama(dropout: float) -> nn.Module:
    config = hf.LlamaConfig(**_SIZES, num_key_value_heads=2, intermediate_size=64, attention_dropout=dropout)
    return hf.LlamaForCausalLM(config)


def _qwen(dropout: float) -> nn.Module:
    config = hf.Qwen3Config(
        **_SIZES, num_key_value_heads=2, head_dim=8, intermediate_size=64, attention_dropout=dropout
    )
    return hf.Qwen3ForCausalLM(config)


def _mixtral(dropout: float) -> nn.Module:
    config = hf.MixtralConfig(
        **_SIZES, num_key_value_heads=2, intermediate_size=64, num_local_experts=4, attention_dropout=dropout
    )
    return hf.MixtralForCausalLM(config)


def _gpt2(dropout: float) -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2,
        embd_pdrop=dropout, resid_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config)


def _bert(dropout: float) -> nn.Module:
    config = hf.BertConfig(
        **_SIZES, intermediate_size=64, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
    )
    return hf.BertForMaskedLM(config)


def _t5(dropout: float) -> nn.Module:
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=dropout,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def _vit(dropout: float) -> nn.Module:
    config = hf.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=5,
    )  # fmt: skip
    return hf.ViTForImageClassification(config)


def _convnext(dropout: float) -> nn.Module:
    config = hf.ConvNextConfig(hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, drop_path_rate=dropout, num_labels=5)
    return hf.ConvNextForImageClassification(config)


def _resnet(dropout: float) -> nn.Module:
    del dropout  # it has none
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=5)
    return hf.ResNetForImageClassification(config)


def _lora(dropout: float) -> nn.Module:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=dropout, init_lora_weights=False)
    return peft.get_peft_model(_llama(dropout), config)


_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_ATTENTION = {f"*.self_attn.{name}_proj": COLUMNS for name in "qkv"} | {"*.self_attn.o_proj": ROWS_OF_WEIGHT}
_HEAD_NORMS = {"*.self_attn.q_norm": heads, "*.self_attn.k_norm": heads}
_MLP = {"*.mlp.gate_proj": COLUMNS, "*.mlp.up_proj": COLUMNS, "*.mlp.down_proj": ROWS_OF_WEIGHT}
_VIT = {f"*.attention.{name}_proj": COLUMNS for name in "qkv"} | {
    "*.attention.o_proj": ROWS_OF_WEIGHT,
    "*.mlp.fc1": COLUMNS,
    "*.mlp.fc2": ROWS_OF_WEIGHT,
}
MODELS = {
    "Llama": Model(_llama, hf.models.llama.modeling_llama.LlamaDecoderLayer, _ATTENTION | _MLP, generates=True),
    "Qwen3": Model(
        _qwen, hf.models.qwen3.modeling_qwen3.Qwen3DecoderLayer, _ATTENTION | _HEAD_NORMS | _MLP, generates=True
    ),
    "GPT-2": Model(_gpt2, hf.models.gpt2.modeling_gpt2.GPT2Block, {"*.h.?.mlp": Conv1DStyle}, generates=True),
    "BERT": Model(
        _bert,
        hf.models.bert.modeling_bert.BertLayer,
        {f"*.attention.self.{name}": COLUMNS for name in ("query", "key", "value")}
        | {
            "*.attention.output.dense": ROWS_OF_WEIGHT,
            "*.intermediate.dense": COLUMNS,
            "*.layer.?.output.dense": ROWS_OF_WEIGHT,
        },
    ),
    "T5": Model(
        _t5,
        hf.models.t5.modeling_t5.T5Block,
        {"*.DenseReluDense.wi": COLUMNS, "*.DenseReluDense.wo": ROWS_OF_WEIGHT},
        batch="pairs",
        generates=True,
    ),
    "Mixtral": Model(_mixtral, hf.models.mixtral.modeling_mixtral.MixtralDecoderLayer, _ATTENTION, generates=True),
    "ViT": Model(_vit, hf.models.vit.modeling_vit.ViTLayer, _VIT, batch="images"),
    "ConvNeXt": Model(
        _convnext,
        hf.models.convnext.modeling_convnext.ConvNextLayer,
        {"*.pwconv1": COLUMNS, "*.pwconv2": ROWS_OF_WEIGHT},
        "images",
    ),
    "ResNet": Model(_resnet, hf.models.resnet.modeling_resnet.ResNetStage, {}, "images"),
    "LoRA": Model(
        _lora,
        hf.models.llama.modeling_llama.LlamaDecoderLayer,
        {f"*.{name}_proj.{part}": COLUMNS for name in "qv" for part in ("base_layer", "lora_B.default")}
        | {"*.self_attn.k_proj": COLUMNS, "*.self_attn.o_proj": ROWS_OF_WEIGHT}
        | _MLP,
        generates=True,
    ),
}
PLACEMENTS = ("replicated", "FSDP2", "TP")


def new_batch(model: Model) -> Batch:
    rng = torch.Generator().manual_seed(1)
    if model.batch == "images":
        images = torch.randn(ROWS, 3, 16, 16, generator=rng)
        return {"pixel_values": images, "labels": torch.randint(5, (ROWS,), generator=rng)}
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=rng)
    mask = torch.ones_like(ids)
    if model.batch == "pairs":
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.roll(1, 1)}
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def place(model: Model, module: nn.Module, placement: str, mesh: DeviceMesh) -> nn.Module:
    if placement == "replicated":
        return put_module(module, mesh)
    if placement == "FSDP2":
        for each in [each for each in module.modules() if model.block and type(each) is model.block]:
            fully_shard(each, mesh=mesh)
        return fully_shard(module, mesh=mesh)
    plan = {
        name: style()
        for name, _ in module.named_modules()
        for pattern, style in model.plan.items()
        if fnmatch.fnmatch(name, pattern)
    }
    assert plan
    return parallelize_module(module, mesh, plan)


def train(module: nn.Module, batch: Batch, compiled: dict[str, Any] | None = None) -> list[float]:
    """Return the losses of three steps of AdamW from seed 0."""
    module.train()
    optimizer = torch.optim.AdamW([each for each in module.parameters() if each.requires_grad], lr=1e-2)
    forward = torch.compile(module, **compiled) if compiled else module
    torch.manual_seed(0)
    losses = []
    for _ in range(STEPS):
        loss = forward(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def generate(module: nn.Module, batch: Batch) -> list[list[int]]:
    """Return the tokens of greedy decoding."""
    module.eval()
    given = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    with torch.no_grad():
        tokens = module.generate(**given, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
    return tokens.tolist()
