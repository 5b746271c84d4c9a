"""Hugging Face: a job for any transformers model from a local `config.json`, on `meta`: no weights, no downloads."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from zplan.api import Job
from zplan.errors import SpecError, nearest

# What a class of the library is trained on, by the end of its name.
_TOKENS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForPreTraining")
_CLASSES = ("ForSequenceClassification", "ForImageClassification")


def job(directory: str | Path, *, batch: int, sequence: int) -> Job:
    """The first of the config's `architectures`, in training mode, on `meta`, in the config's dtype; its own loss.

    Keys and values are not kept (`use_cache=False`): training reads none of them.

    Batches are [batch, sequence] tokens, or [batch, channels, height, width] images, whatever the class takes. Raises
    `SpecError` where there is no config, or no head with a loss.
    """
    transformers = _library()
    config = _config(transformers, Path(directory))
    names = config.architectures or []
    if not names:
        raise SpecError(f"{directory}/config.json names no architectures: add one, such as ['LlamaForCausalLM']")
    kind = getattr(transformers, names[0], None)
    if kind is None:
        near = nearest(names[0], [name for name in dir(transformers) if name.endswith((*_TOKENS, *_CLASSES))])
        raise SpecError(f"transformers {transformers.__version__} has no {names[0]}{near}")
    if not names[0].endswith((*_TOKENS, *_CLASSES)):
        raise SpecError(
            f"{names[0]} has no loss that is known here: write a FILE.py:JOB for it, or name a class that ends in "
            f"{', '.join((*_TOKENS, *_CLASSES))} under architectures"
        )
    config.use_cache = False
    with torch.device("meta"):
        model = kind._from_config(config, dtype=_dtype(config))
    inputs = _inputs(config, model, names[0], batch, sequence)
    return Job(model.train(), loss, [inputs])


def loss(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The model's own loss."""
    value: torch.Tensor = model(**batch).loss
    return value


def _library() -> Any:
    try:
        import transformers
    except ImportError:
        raise SpecError("--hf needs the transformers library: pip install 'zplan[hf]'") from None
    return transformers


def _config(transformers: Any, directory: Path) -> Any:
    file = directory / "config.json" if directory.is_dir() else directory
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{file} cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{file} is no JSON: {error}") from None
    kinds: Mapping[str, Callable[..., Any]] = transformers.CONFIG_MAPPING
    kind = content.get("model_type") if isinstance(content, dict) else None
    if kind not in kinds:
        raise SpecError(f"{file} has the model_type {kind!r}{nearest(str(kind), list(kinds))}")
    return transformers.AutoConfig.for_model(**content)


def _dtype(config: Any) -> torch.dtype:
    return getattr(config, "dtype", None) or torch.float32


def _inputs(config: Any, model: Any, name: str, batch: int, sequence: int) -> dict[str, torch.Tensor]:
    def tokens(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device="meta")

    if model.main_input_name == "input_ids":
        limit = getattr(config, "max_position_embeddings", None) or 0
        if 0 < limit < sequence:
            raise SpecError(f"a sequence of {sequence} is longer than {name} takes: max_position_embeddings is {limit}")
        labels = tokens(batch) if name.endswith(_CLASSES) else tokens(batch, sequence)
        return {"input_ids": tokens(batch, sequence), "attention_mask": tokens(batch, sequence), "labels": labels}
    if model.main_input_name == "pixel_values" and name.endswith(_CLASSES):
        size = getattr(config, "image_size", None) or 224
        height, width = (size, size) if isinstance(size, int) else size
        pixels = torch.empty(batch, config.num_channels, height, width, dtype=_dtype(config), device="meta")
        return {"pixel_values": pixels, "labels": tokens(batch)}
    raise SpecError(f"{name} takes {model.main_input_name}, for which no batch is known here: write a FILE.py:JOB")
