"""Evaluation is a program of its own: the loss of the model in eval mode, bit for bit, at every stage."""

from typing import Any

import pytest
import torch
from torch import nn

import zplan
from tests import models
from tests.ranks.training import ADAMW
from zplan.planner.memory import Memory
from zplan.planner.program import Gather, ReduceScatter, Update
from zplan.runtime.comm import Comm

STEPS = 2


class Net(nn.Module):
    """Dropout and BatchNorm: training and evaluation differ."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 24)
        self.norm = nn.BatchNorm1d(24)
        self.drop = nn.Dropout(0.5)
        self.outer = nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.drop(torch.relu(self.norm(self.inner(x)))))


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    out = model(batch["x"])
    return nn.functional.cross_entropy(out, batch["y"]), {"right": (out.argmax(1) == batch["y"]).sum()}


def batch(seed: int, size: int = 16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(size, 8, generator=generator),
        "y": torch.randint(3, (size,), generator=generator),
    }


def trained(comm: Comm, **options: Any) -> zplan.TrainStep:
    torch.manual_seed(0)
    step = zplan.compile(Net(), loss_fn, batch(0), optimizer=ADAMW, group=comm.group, bucket="1KB", **options)
    torch.manual_seed(1 + comm.rank)
    for i in range(STEPS):
        step(batch(10 * i + comm.rank))
    return step


def reference(step: zplan.TrainStep, item: Any) -> Any:
    """What the module itself says, with the weights in place."""
    with step.whole_parameters() as model, torch.no_grad():
        model.eval()
        found = loss_fn(model, item)
        model.train()
    return found


def evaluates(comm: Comm, stage: int) -> tuple[list[bool], dict[str, int], bool]:
    step = trained(comm, stage=stage)
    before = step.full_state_dict()
    state = torch.get_rng_state()
    same = []
    for seed, size in ((100, 16), (101, 5), (102, 16)):
        item = batch(seed + comm.rank, size)
        (loss, aux), (wanted, right) = step.evaluate(item), reference(step, item)
        assert not loss.requires_grad
        same.append(torch.equal(loss, wanted) and torch.equal(aux["right"], right["right"]))
    unchanged = torch.equal(state, torch.get_rng_state())
    after = step.full_state_dict()
    unchanged &= all(torch.equal(before[name], after[name]) for name in before)
    kinds = {kind.__name__: 0 for kind in (Gather, ReduceScatter, Update)}
    for x in step.evaluation.programs[0].instructions:
        if type(x).__name__ in kinds:
            kinds[type(x).__name__] += 1
    assert step._state.model.training
    return same, kinds, unchanged


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_loss_is_that_of_the_module_in_eval_mode(pool, ranks: int, stage: int) -> None:
    for same, kinds, unchanged in pool.run(ranks, evaluates, stage):
        assert same == [True] * 3
        assert unchanged, "neither weights, nor buffers, nor the random state"
        assert kinds["ReduceScatter"] == kinds["Update"] == 0
        assert (kinds["Gather"] > 0) == (stage > 0 and ranks > 1)


def goes_on(comm: Comm, evaluate: bool) -> list[torch.Tensor]:
    step = trained(comm, stage=3)
    losses = []
    for i in range(3):
        if evaluate:
            step.evaluate(batch(7))
        losses.append(step(batch(i + comm.rank))[0])
    return losses


def test_training_goes_on_as_if_nothing_had_been_evaluated(pool) -> None:
    with_, without = pool.run(2, goes_on, True), pool.run(2, goes_on, False)
    assert all(
        torch.equal(a, b) for one, two in zip(with_, without, strict=True) for a, b in zip(one, two, strict=True)
    )


def ragged(comm: Comm) -> int:
    """Ranks whose last batches have different sizes, and one that knows its shape already."""
    step = trained(comm, stage=3)
    step.evaluate(batch(0, 4))
    loss, _ = step.evaluate(batch(1, 4 if comm.rank == 0 else 2))
    for size in range(5, 15):
        step.evaluate(batch(1, size))
    assert loss.isfinite()
    return len(step._evaluations)


def test_ranks_may_hold_batches_of_different_shapes(pool) -> None:
    assert pool.run(2, ragged) == [8, 8], "what is kept is bounded"


def fails_on_one(comm: Comm) -> str:
    step = trained(comm, stage=2)
    item = batch(0)
    if comm.rank == 1:
        item["x"] = item["x"][:, :5]
    try:
        step.evaluate(item)
    except zplan.ZplanError as error:
        words = f"{type(error).__name__}: {error}"
    step.evaluate(batch(0))
    return words


def test_where_one_rank_cannot_trace_all_say_so_and_go_on(pool) -> None:
    one, two = pool.run(2, fails_on_one)
    assert one == two
    assert one.startswith("AgreementError: 1 of 2 ranks failed, 1 did not\nrank 1: TraceError: the forward raised")


def schedule(comm: Comm) -> tuple[str, str, int]:
    model = models.GPT(vocab=64, width=32, layers=2, heads=2, context=8, dropout=0.1)
    step = zplan.compile(model, model.loss_fn, model.make_batch(0), optimizer=ADAMW, group=comm.group, stage=3)
    try:
        step.evaluation  # noqa: B018
    except zplan.StateError as error:
        words = str(error)
    step.evaluate(model.make_batch(1))
    return str(step.evaluation), words, step.plan.memory.peak_bytes - Memory(step.evaluation.programs[0]).peak_bytes


def test_its_schedule_is_printed(pool) -> None:
    text, words, less = pool.run(2, schedule)[0]
    assert words == "evaluation: nothing has been evaluated yet"
    assert text.startswith("world=2 stage=3 position=evaluation ")
    assert "reduce-scatter" not in text
    assert "backward" not in text
    assert less > 0
