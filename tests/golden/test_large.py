"""A 70B Llama, 80 layers, from its config alone: what anyone would work out by hand, and a page of output.

By hand, in bf16 with AdamW states in bf16: psi = 70.6e9 parameters are 131 GiB, states twice that. Whole parameters
(stages 0 to 2) alone are above an H100's 72.5 GiB. At stage 3 a rank holds 4 psi * 2 bytes / 64 = 8.2 GiB of model
states at the peak, and at 8 ranks 65.7 GiB, to which 33 GiB of activations come.
"""

from pathlib import Path

import pytest

import zplan
from zplan import huggingface
from zplan.api import _traced
from zplan.errors import BudgetError
from zplan.graph.ir import Graph
from zplan.planner import auto
from zplan.planner.hardware import gpu
from zplan.planner.spec import Spec

CONFIG = Path(__file__).parents[1] / "data" / "llama-70b"
PAGE = 100


@pytest.fixture(scope="module")
def traced() -> tuple[Graph, Spec]:
    job = huggingface.job(CONFIG, batch=1, sequence=1024)
    found, spec = _traced(
        job.model,
        job.loss_fn,
        job.batches[0],
        None,
        "cuda",
        lambda phase, count: None,
        stage="auto",
        world_size=64,
        memory=gpu("h100").budget,
    )
    return found.graph, spec


def test_compare_on_64_h100(golden, traced) -> None:
    graph, spec = traced
    plans = auto.every_stage(graph, spec)
    golden("large/llama-70b-64-h100", zplan.compare(plans) + "\n")
    assert [plan.certificate.fits for plan in plans] == [False, False, False, True]
    psi = 2 * sum(tensor.numel for tensor in graph.tensors)
    assert psi == pytest.approx(141.1e9, rel=1e-3)
    sent = [plan.traffic.bytes_per_rank / (psi * 63 / 64) for plan in plans]
    # The embedding and the head are gathered once each at stage 3: nothing of the embedding is read in backward.
    assert sent == pytest.approx([2, 2, 2, 3], abs=0.02)
    resident = [plan.memory.resident_bytes for plan in plans]
    assert resident == pytest.approx([3 * psi, *[3 * psi / 64] * 3], rel=1e-3)
    for text in (str(plans[3]), str(plans[3].schedule)):
        assert len(text.splitlines()) < PAGE
    golden("large/llama-70b-schedule", str(plans[3].schedule) + "\n")


def test_compare_on_8_h100(golden, traced) -> None:
    graph, spec = traced
    spec = spec.model_copy(update={"world_size": 8})
    plans = auto.every_stage(graph, spec)
    assert not any(plan.certificate.fits for plan in plans)
    with pytest.raises(BudgetError) as caught:
        auto.decide(graph, spec)
    golden("large/llama-70b-8-h100", f"{zplan.compare(plans)}\n\n{caught.value}\n")
