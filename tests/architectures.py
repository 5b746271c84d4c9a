"""Architectures as people have them: transformers' own classes, untouched, made tiny by their configurations.

`ARCHITECTURES[name]` gives a model with seeded weights, the loss function that all of them share, and batches. The
vocabulary is no multiple of a bucket's alignment. Everything can be pickled: ranks build the models themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

WIDTH, LAYERS, HEADS, VOCAB, TIME, SIZE = 32, 2, 2, 97, 8, 2
PIXELS, LABELS = 32, 5


def loss_fn(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The loss that the model itself computes."""
    loss: Tensor = model(**batch).loss
    return loss


def loss_and_aux(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and every other tensor that the model returns by name."""
    out = model(**batch)
    return out.loss, {name: leaf.detach() for name, leaf in out.items() if isinstance(leaf, Tensor) and name != "loss"}


@dataclass(frozen=True)
class Architecture:
    """`weights`: makes the model, `inputs`: makes the batch of a generator."""

    weights: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], dict[str, Any]]

    def make(self) -> nn.Module:
        """A model to train, the same in each call."""
        torch.manual_seed(0)
        return self.weights().train()

    def batch(self, seed: int) -> dict[str, Any]:
        return self.inputs(torch.Generator().manual_seed(seed))

    @property
    def parts(self) -> tuple[nn.Module, Callable[..., Any], dict[str, Any]]:
        """(model, loss_fn, batch)"""
        return self.make(), loss_fn, self.batch(0)


# Configurations

SHARED: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
DECODER: dict[str, Any] = {
    **SHARED,
    "vocab_size": VOCAB,
    "intermediate_size": 2 * WIDTH,
    "num_key_value_heads": 1,
    "head_dim": WIDTH // HEADS,
    "max_position_embeddings": 2 * TIME,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_CACHE: dict[str, Any] = {"use_cache": False}


def gpt2(**options: Any) -> nn.Module:
    sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": VOCAB, "n_positions": TIME}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, **options))


def llama(**options: Any) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, **options))


def qwen3(**options: Any) -> nn.Module:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**DECODER, tie_word_embeddings=True, **options))


def mixtral(**options: Any) -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return hf.MixtralForCausalLM(hf.MixtralConfig(**DECODER, **experts, **options))


def gemma3(**options: Any) -> nn.Module:
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "query_pre_attn_scalar": 16}
    return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**DECODER, **kinds, **options))


def bert(**options: Any) -> nn.Module:
    sizes = {"vocab_size": VOCAB, "intermediate_size": 2 * WIDTH, "max_position_embeddings": 2 * TIME}
    return hf.BertForMaskedLM(hf.BertConfig(**SHARED, **sizes, **options))


def bart(**options: Any) -> nn.Module:
    sides = {
        f"{side}_{key}": value
        for side in ("encoder", "decoder")
        for key, value in {"layers": LAYERS, "attention_heads": HEADS, "ffn_dim": 2 * WIDTH}.items()
    }
    sizes = {"d_model": WIDTH, "vocab_size": VOCAB, "max_position_embeddings": 2 * TIME}
    tokens = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    return hf.BartForConditionalGeneration(hf.BartConfig(**sizes, **sides, **tokens, **options))


def t5(**options: Any) -> nn.Module:
    sizes = {"d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": 2 * WIDTH, "num_layers": LAYERS, "num_heads": HEADS}
    return hf.T5ForConditionalGeneration(
        hf.T5Config(**sizes, vocab_size=VOCAB, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, **options)
    )


def vit(**options: Any) -> nn.Module:
    sizes = {"intermediate_size": 2 * WIDTH, "image_size": PIXELS, "patch_size": 8, "num_labels": LABELS}
    return hf.ViTForImageClassification(hf.ViTConfig(**SHARED, **sizes, **options))


def resnet() -> nn.Module:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "num_labels": LABELS}
    return hf.ResNetForImageClassification(hf.ResNetConfig(**sizes, layer_type="basic"))


def mamba() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "state_size": 4, "time_step_rank": 2}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return hf.MambaForCausalLM(hf.MambaConfig(**sizes, vocab_size=VOCAB, **tokens, **NO_CACHE))


def clip() -> nn.Module:
    sizes = {**SHARED, "intermediate_size": 2 * WIDTH, "projection_dim": 16}
    ends = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": VOCAB - 1}
    text = {**sizes, "vocab_size": VOCAB, "max_position_embeddings": TIME, **ends}
    vision = {**sizes, "image_size": PIXELS, "patch_size": 8}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


# Batches


def tokens(generator: torch.Generator, low: int = 3) -> Tensor:
    return torch.randint(low, VOCAB - 1, (SIZE, TIME), generator=generator)


def padding(*, left: bool = False) -> Tensor:
    """1 for a token, 0 for what pads: the second row is shorter."""
    mask = torch.ones(SIZE, TIME, dtype=torch.int64)
    mask[1, slice(0, 3) if left else slice(-3, None)] = 0
    return mask


def text(generator: torch.Generator) -> dict[str, Any]:
    """Every token is predicted from those before it."""
    ids = tokens(generator)
    return {"input_ids": ids, "labels": ids.clone(), **NO_CACHE}


def padded_text(generator: torch.Generator, *, left: bool = False) -> dict[str, Any]:
    """Of two lengths; what pads is neither seen nor predicted."""
    ids, mask = tokens(generator), padding(left=left)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100), **NO_CACHE}


def masked_text(generator: torch.Generator) -> dict[str, Any]:
    """Some tokens are hidden and predicted."""
    ids, mask = tokens(generator), padding()
    hidden = (torch.rand(ids.shape, generator=generator) < 0.4) & (mask == 1)
    hidden[:, 0] = True
    return {
        "input_ids": ids.masked_fill(hidden, 3) * mask,
        "attention_mask": mask,
        "token_type_ids": (torch.arange(TIME) > 3).long().expand(SIZE, TIME).contiguous(),
        "labels": ids.masked_fill(~hidden, -100),
    }


def text_to_text(generator: torch.Generator) -> dict[str, Any]:
    ids, mask = tokens(generator), padding()
    return {"input_ids": ids, "attention_mask": mask, "labels": tokens(generator)[:, :5].contiguous(), **NO_CACHE}


def images(generator: torch.Generator) -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(SIZE, 3, PIXELS, PIXELS, generator=generator),
        "labels": torch.randint(LABELS, (SIZE,), generator=generator),
    }


def captioned_images(generator: torch.Generator) -> dict[str, Any]:
    ids, mask = tokens(generator), padding()
    ids[0, -1] = ids[1, TIME - 4] = VOCAB - 1
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": images(generator)["pixel_values"],
        "return_loss": True,
    }


# The eight that also run sharded on ranks.
EIGHT = {
    "gpt2": Architecture(gpt2, text),
    "llama": Architecture(llama, padded_text),
    "qwen3": Architecture(qwen3, partial(padded_text, left=True)),
    "mixtral": Architecture(mixtral, text),
    "bert": Architecture(bert, masked_text),
    "bart": Architecture(bart, text_to_text),
    "vit": Architecture(vit, images),
    "resnet": Architecture(resnet, images),
}
# Other ideas: a state space, two modalities, windows of attention, a tied embedding between encoder and decoder.
BEYOND = {
    "mamba": Architecture(mamba, text),
    "clip": Architecture(clip, captioned_images),
    "gemma3": Architecture(gemma3, padded_text),
    "t5": Architecture(t5, text_to_text),
}
EAGER: dict[str, Any] = {"attn_implementation": "eager"}
ARCHITECTURES = {
    **EIGHT,
    **BEYOND,
    "gpt2 eager": Architecture(partial(gpt2, **EAGER), padded_text),
    "llama eager": Architecture(partial(llama, **EAGER), text),
}
