"""Models as they are: what transformers ships is captured untouched, and the graph is eager PyTorch, bit for bit."""

import pytest

from tests.architectures import ARCHITECTURES, loss_and_aux
from tests.bitwise import assert_aliases, assert_bitwise
from zplan.graph.ir import OpKind
from zplan.graph.trace import trace

pytestmark = pytest.mark.usefixtures("one_thread")

DROPOUT = ("gpt2", "gpt2 eager", "bert", "bart", "t5")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_graph_is_eager_bit_for_bit(name: str) -> None:
    """Loss, everything else that the model returns, every gradient, buffer and draw; and storages alias as they do."""
    architecture = ARCHITECTURES[name]
    model, batch = architecture.make(), architecture.batch(0)
    traced = trace(model, loss_and_aux, batch)
    assert_bitwise(traced, model, loss_and_aux, batch)
    assert_bitwise(traced, model, loss_and_aux, architecture.batch(1))
    assert_aliases(traced, model, batch)
    assert traced.graph.notes == ()
    assert (OpKind.RANDOM in {op.kind for op in traced.graph.ops}) == (name in DROPOUT)
