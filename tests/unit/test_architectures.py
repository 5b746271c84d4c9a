"""Models as they are: what transformers ships is captured untouched, and the graph is eager PyTorch, bit for bit."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.architectures import ARCHITECTURES, loss_and_aux, loss_fn, mixtral
from tests.bitwise import assert_aliases, assert_bitwise, snapshot
from zplan.errors import TraceError
from zplan.graph.ir import OpKind
from zplan.graph.trace import trace

pytestmark = pytest.mark.usefixtures("one_thread")

DROPOUT = ("gpt2", "gpt2 eager", "bert", "bart", "t5")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_graph_is_eager_bit_for_bit(name: str) -> None:
    """Loss, all else that the model returns, every gradient, buffer and draw; storages alias as they really do.

    transformers installs hooks and flags on first use: the trace does not count as one.
    """
    architecture = ARCHITECTURES[name]
    model, batch = architecture.make(), architecture.batch(0)
    before = snapshot(model)
    traced = trace(model, loss_and_aux, batch)
    assert snapshot(model) == before
    assert_bitwise(traced, model, loss_and_aux, batch)
    assert_bitwise(traced, model, loss_and_aux, architecture.batch(1))
    assert_aliases(traced, model, batch)
    of_buffers = [note for note in traced.graph.notes if note.startswith("each rank writes buffers of its own")]
    assert list(traced.graph.notes) == of_buffers
    assert len(of_buffers) == (name == "resnet")
    assert (OpKind.RANDOM in {op.kind for op in traced.graph.ops}) == (name in DROPOUT)


# Padded text, or none: without a padding mask transformers' decoders look at the values of position ids to choose
# `is_causal` over a mask, which no capture can; the masked kernel rounds otherwise in 16 bit (not in 32).
SIXTEEN_BIT = ("gpt2 eager", "llama", "qwen3", "bert", "bart", "vit", "resnet", "mamba", "clip", "gemma3")


@pytest.mark.parametrize("name", SIXTEEN_BIT)
def test_autocast_to_16_bit_is_eager_bit_for_bit(name: str) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_fn(model, batch)

    model, batch = ARCHITECTURES[name].make(), ARCHITECTURES[name].batch(0)
    assert_bitwise(trace(model, loss, batch), model, loss, batch)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("name", "blocks"), [("gpt2", "transformer.h"), ("llama", "model.layers")])
def test_checkpointing_gives_the_bits_of_a_model_without_it(name: str, blocks: str, reentrant: bool) -> None:
    architecture = ARCHITECTURES[name]
    model, batch = architecture.make(), architecture.batch(0)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    traced = trace(model, loss_fn, batch)
    assert traced.graph.regions == (f"{blocks}.0", f"{blocks}.1")
    assert f"the plan decides what is recomputed: {blocks}.0, {blocks}.1" in traced.graph.notes[-1]
    assert traced.graph.hash == trace(architecture.make(), loss_fn, batch).graph.hash
    assert_bitwise(traced, architecture.make(), loss_fn, batch)
    if not reentrant:
        assert_bitwise(traced, model, loss_fn, batch)


def test_batches_and_outputs_are_any_pytrees() -> None:
    def nested(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        (ids, mask), labels = batch["text"]["of"], batch["labels"]
        assert batch["nothing"] is None
        out = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=batch["keep"])
        loss = F.cross_entropy(out.logits.flatten(0, 1), labels[0].flatten())
        return loss * batch["scale"], {"of": (out.logits, [loss, None]), "keep": batch["keep"], "ids": ids}

    model, given = ARCHITECTURES["llama"].make(), ARCHITECTURES["llama"].batch(0)
    batch = {
        "text": {"of": (given["input_ids"], given["attention_mask"])},
        "labels": [given["labels"][:, -4:]],
        "nothing": None,
        "keep": 4,
        "scale": 0.5,
    }
    traced = trace(model, nested, batch)
    assert traced.graph.batch == ("batch.text.of.0", "batch.text.of.1", "batch.labels.0")
    assert [leaf for leaf in traced.batch_leaves if not isinstance(leaf, Tensor)] == [None, 4, 0.5]
    assert_bitwise(traced, model, nested, batch)


def test_experts_in_a_loop_are_refused() -> None:
    """The loop of transformers itself: it visits the experts that some token chose."""
    model = mixtral(experts_implementation="eager")
    here = r"--> architectures.py:\d+: loss: Tensor = model\(\*\*batch\).loss\n"
    there = r"    in modeling_mixtral.py:\d+: expert_hit = .*nonzero\(\)\n"
    match = here + there + "aten.nonzero.default makes a tensor whose shape depends on values"
    with pytest.raises(TraceError, match=match):
        trace(model, loss_fn, ARCHITECTURES["mixtral"].batch(0))
