"""Any transformers config becomes a job on `meta`, and plans."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import zplan
from zplan import huggingface
from zplan.errors import SpecError

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 96}
LLAMA = {**TINY, "num_key_value_heads": 1, "head_dim": 16}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 96}),
    "llama": ("LlamaForCausalLM", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", LLAMA),
    "mixtral": ("MixtralForCausalLM", {**LLAMA, "num_local_experts": 4}),
    "bert": ("BertForMaskedLM", TINY),
    "bart": (
        "BartForConditionalGeneration",
        {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
        | {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 96},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
        | {"vocab_size": 96, "decoder_start_token_id": 0},
    ),
    "mamba": ("MambaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 96, "state_size": 4}),
    "vit": ("ViTForImageClassification", {**TINY, "image_size": 32, "patch_size": 16}),
    "resnet": ("ResNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}),
}


def written(folder: Path, kind: str, architecture: str, **content: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "architectures": [architecture], **content}))
    return folder


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_is_planned_without_weights(tmp_path: Path, kind: str) -> None:
    architecture, content = CONFIGS[kind]
    job = huggingface.job(written(tmp_path, kind, architecture, **content), batch=2, sequence=8)
    assert type(job.model).__name__ == architecture
    assert job.model.training
    assert {parameter.device.type for parameter in job.model.parameters()} == {"meta"}
    plan = zplan.plan(job.model, job.loss_fn, job.batches[0], world_size=4, stage=3, memory="1GB")
    counted = sum(tensor.numel for tensor in plan.graph.tensors)
    assert counted == sum(parameter.numel() for parameter in job.model.parameters())
    assert plan.traffic.bytes_per_rank > 0
    assert plan.graph.batch


def test_it_is_the_graph_of_the_real_model(tmp_path: Path) -> None:
    """Planned on meta, or with weights: the same graph, so that the plan runs as it is."""
    folder = written(tmp_path, "llama", "LlamaForCausalLM", **LLAMA)
    job = huggingface.job(folder, batch=2, sequence=8)
    model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(folder, use_cache=False)).train()
    batch = {name: torch.ones(tensor.shape, dtype=tensor.dtype) for name, tensor in job.batches[0].items()}
    on_meta, real = (
        zplan.plan(each, job.loss_fn, item, world_size=4, stage=3)
        for each, item in ((job.model, job.batches[0]), (model, batch))
    )
    assert on_meta.hash == real.hash


def test_the_dtype_is_the_configs(tmp_path: Path) -> None:
    folder = written(tmp_path, "llama", "LlamaForCausalLM", dtype="bfloat16", **LLAMA)
    job = huggingface.job(folder / "config.json", batch=1, sequence=4)
    assert {parameter.dtype for parameter in job.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("kind", "architecture", "words"),
    [
        ("lama", "LlamaForCausalLM", "config.json has the model_type 'lama'; nearest: llama"),
        (None, "LlamaForCausalLM", "config.json has the model_type None"),
        ("llama", "LlamaForCausalML", "has no LlamaForCausalML; nearest: LlamaForCausalLM"),
        ("bert", "BertModel", "BertModel has no loss that is known here: write a FILE.py:JOB for it, or name a class"),
        ("whisper", "WhisperForConditionalGeneration", "takes input_features, for which no batch is known here"),
    ],
)
def test_what_cannot_be_a_job_is_refused_by_name(tmp_path: Path, kind: str, architecture: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        huggingface.job(written(tmp_path, kind, architecture), batch=1, sequence=8)
    assert words in str(caught.value)


def test_a_sequence_longer_than_the_model_takes_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, "gpt2", "GPT2LMHeadModel", **CONFIGS["gpt2"][1])
    with pytest.raises(SpecError, match="a sequence of 65 is longer than GPT2LMHeadModel takes: max_position_embedd"):
        huggingface.job(folder, batch=1, sequence=65)


def test_files_that_are_no_config(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"config.json cannot be read: No such file"):
        huggingface.job(tmp_path, batch=1, sequence=8)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SpecError, match=r"config.json is no JSON"):
        huggingface.job(tmp_path, batch=1, sequence=8)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(SpecError, match=r"config.json names no architectures: add one, such as"):
        huggingface.job(tmp_path, batch=1, sequence=8)
