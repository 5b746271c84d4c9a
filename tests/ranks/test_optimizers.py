"""Every element-wise optimizer, in groups and several by pattern: the bits of an unsharded loop with the same ones."""

import copy
import dataclasses
import functools
import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import LambdaLR

import zplan
from tests.ranks.loops import Loop, assert_same_loop, sharded, unsharded
from tests.ranks.test_parity import pairwise
from tests.ranks.training import CASES, Case, build, seed
from zplan.graph.optimizer import ELEMENT_WISE
from zplan.runtime.comm import Comm
from zplan.runtime.measure import measure, storages

HAVE_FUSED = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)
KINDS: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    *((kind, {"foreach": False}) for kind in ELEMENT_WISE),
    *((kind, {"foreach": True}) for kind in ELEMENT_WISE),
    *((kind, {"fused": True}) for kind in HAVE_FUSED),
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "foreach": False}),
    (optim.SGD, {"momentum": 0.9, "dampening": 0.1, "fused": True}),
    (optim.AdamW, {"amsgrad": True, "maximize": True, "foreach": True}),
    (optim.AdamW, {"amsgrad": True, "fused": True}),
    (optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True, "foreach": False}),
    (optim.RMSprop, {"momentum": 0.5, "centered": True, "foreach": False}),
    (optim.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.1, "foreach": True}),
]


class Parts(nn.Module):
    """A layer for each of `KINDS`, one that is frozen and one that no pattern names.

    Whole tensors that a fused kernel updates have sizes that its vectors divide, as all slices have: such kernels give
    other bits in what is left over. The others have odd sizes.
    """

    def __init__(self) -> None:
        super().__init__()
        widths = [16 if options.get("fused") else 5 for _, options in KINDS]
        self.parts = nn.ModuleDict({f"p{i}": nn.Linear(width, width) for i, width in enumerate(widths)})
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.unnamed = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = (*self.parts.values(), self.frozen, self.unnamed)
        return torch.stack([layer(x[:, : layer.in_features]).tanh().mean(1) for layer in layers]).sum(0)


def parts_batch(number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(4, 16, generator=generator), torch.randn(4, generator=generator)]


def parts_loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


EACH_ITS_OWN = {f"parts.p{i}.*": functools.partial(kind, lr=0.01, **options) for i, (kind, options) in enumerate(KINDS)}
PARTS = Case(Parts, parts_loss, parts_batch, EACH_ITS_OWN, steps=3)  # type: ignore[arg-type]


def each_its_own(named: list[tuple[str, nn.Parameter]]) -> list[optim.Optimizer]:
    return [
        make([p for n, p in named if n.startswith(pattern.removesuffix("*"))]) for pattern, make in EACH_ITS_OWN.items()
    ]


@functools.cache
def expected_of_parts(world: int, micro_batches: int, clip: float | None, ranks_first: bool):
    return unsharded(Loop(PARTS, micro_batches, clip), world, each_its_own, ranks_first=ranks_first)


MEETING = list(itertools.product(range(4), (2, 3), (1, 4), (None, 0.05), (2_000, 100_000)))
FEW = [
    (0, 2, 1, 0.05, 2_000), (1, 3, 4, None, 100_000), (2, 2, 4, 0.05, 100_000), (3, 3, 1, None, 2_000),
    (3, 1, 4, 0.05, 2_000),
]  # fmt: skip
REST = [pytest.param(*row, marks=pytest.mark.slow) for row in MEETING if row not in FEW]


@pytest.mark.parametrize(("stage", "world", "micro_batches", "clip", "bucket"), [*FEW, *REST])
def test_every_element_wise_optimizer_gives_the_bits_of_an_unsharded_loop(
    pool, stage, world, micro_batches, clip, bucket
) -> None:
    """All of them at once, each by a pattern of its own: in the larger bucket they lie side by side."""
    runs = pool.run(world, sharded, Loop(PARTS, micro_batches, clip), {"stage": stage, "bucket": bucket})
    reference = expected_of_parts(world, micro_batches, clip, stage >= 2 and micro_batches > 1)
    for found, each in zip(runs, reference, strict=True):
        assert_same_loop(found, each)


def alone(kind: type[optim.Optimizer], options: dict[str, Any]) -> Case:
    return dataclasses.replace(CASES["gpt"], optimizer=functools.partial(kind, lr=0.01, **options))


@functools.cache
def expected_alone(index: int, world: int):
    case = alone(*KINDS[index])
    return unsharded(Loop(case), world, lambda named: [case.optimizer(named)])


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(KINDS)), ids=lambda i: f"{KINDS[i][0].__name__}-{i}")
@pytest.mark.parametrize(("stage", "world"), [*itertools.product(range(4), (2, 3))])
def test_every_element_wise_optimizer_alone(pool, index: int, stage: int, world: int) -> None:
    """Fused kernels on whole tensors of odd sizes give other bits than on slices: there stages agree with stage 0."""
    kind, options = KINDS[index]
    runs = pool.run(world, sharded, Loop(alone(kind, options)), {"stage": stage, "bucket": 4_000})
    if options.get("fused"):
        reference = pool.run(world, sharded, Loop(alone(kind, options)), {"stage": 0, "bucket": 200_000})
    else:
        reference = expected_alone(index, world)
    for found, each in zip(runs, reference, strict=True):
        assert_same_loop(found, each)


def test_16_bit_and_sgd_give_the_same_bits_at_every_stage(pool) -> None:
    """Not those of an unsharded loop: torch's `add(alpha=)` of 16 bit gives other bits in what is left over of a tensor
    than in its vectors, and slices have nothing left over."""
    given = Loop(dataclasses.replace(CASES["odd"], optimizer=SGD))
    first, *others = [pool.run(2, sharded, given, {"stage": stage, "bucket": 4_000}) for stage in (0, 1, 3)]
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert_same_loop(one, two)


SGD = functools.partial(optim.SGD, lr=0.05, momentum=0.9, foreach=False)


def by_shape(named: list[tuple[str, nn.Parameter]]) -> optim.Optimizer:
    """AdamW in groups by true shapes and names; one of them is empty."""
    matrices = [p for n, p in named if p.ndim >= 2 and "embed" not in n]
    return optim.AdamW(
        [
            {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
            {"params": []},
            {"params": matrices, "lr": 2e-3},
            {"params": [p for n, p in named if not n.endswith("bias") and not any(p is m for m in matrices)]},
        ],
        lr=3e-3,
        weight_decay=0.05,
        foreach=False,
    )


RMSPROP = functools.partial(optim.RMSprop, lr=1e-3, foreach=False)
# `head` is tied to `embed`: both names, one answer. `by_shape` gets what is left.
OF_GPT = {"*.bias": SGD, "head.*": RMSPROP, "embed.*": RMSPROP, "*": by_shape}
OF_ODD = {"tied.bias": SGD, "scale": SGD, "*weight": by_shape, "*": RMSPROP}


def of_gpt(named: list[tuple[str, nn.Parameter]]) -> list[optim.Optimizer]:
    biases = [(n, p) for n, p in named if n.endswith(".bias")]
    embed = [(n, p) for n, p in named if n == "embed.weight"]
    left = [(n, p) for n, p in named if not n.endswith(".bias") and n != "embed.weight"]
    return [SGD(biases), RMSPROP(embed), by_shape(left)]


def of_odd(named: list[tuple[str, nn.Parameter]]) -> list[optim.Optimizer]:
    of = dict(named)
    first, second = [("tied.bias", of.pop("tied.bias"))], [("scale", of.pop("scale"))]
    weights = [(n, of.pop(n)) for n, _ in named if n.endswith("weight")]
    return [SGD(first), SGD(second), by_shape(weights), RMSPROP(list(of.items()))]


def half_frozen() -> nn.Module:
    model = CASES["plain"].make()
    model.blocks[0].requires_grad_(False)
    model.position.requires_grad_(False)
    return model


def decays(optimizer: optim.Optimizer, first: int):
    """Another rate for each group in each step."""
    numbers = range(first, first + len(optimizer.param_groups))
    scheduler = LambdaLR(optimizer, [functools.partial(_rate, number) for number in numbers])
    return lambda loss: scheduler.step()


def _rate(number: int, step: int) -> float:
    return 1.0 + 0.5 * math.cos(number + step)


NAMES = {
    "gpt": (CASES["gpt"], OF_GPT, of_gpt),
    "half frozen": (dataclasses.replace(CASES["plain"], make=half_frozen), OF_GPT, of_gpt),
    "odd": (CASES["odd"], OF_ODD, of_odd),
}


def loop(name: str, several: bool, micro_batches: int, clip: float | None) -> Loop:
    case, patterns, _ = NAMES[name]
    given: Any = patterns if several else by_shape
    return Loop(dataclasses.replace(case, optimizer=given), micro_batches, clip, decays)


@functools.cache
def expected(name: str, several: bool, world: int, micro_batches: int, clip: float | None, ranks_first: bool):
    make = NAMES[name][2] if several else lambda named: [by_shape(named)]
    return unsharded(loop(name, several, micro_batches, clip), world, make, ranks_first=ranks_first)


ROWS = list(itertools.product(NAMES, (True, False), (1, 2, 3), range(4), (1, 4), (None, 0.1)))
FEW_OF_ROWS = pairwise(ROWS)
REST_OF_ROWS = [pytest.param(*row, marks=pytest.mark.slow) for row in ROWS if row not in FEW_OF_ROWS]


@pytest.mark.parametrize(("name", "several", "world", "stage", "micro_batches", "clip"), [*FEW_OF_ROWS, *REST_OF_ROWS])
def test_groups_and_several_optimizers_under_a_scheduler(
    pool, name, several, world, stage, micro_batches, clip
) -> None:
    given = loop(name, several, micro_batches, clip)
    runs = pool.run(world, sharded, given, {"stage": stage, "bucket": 4_000})
    reference = expected(name, several, world, micro_batches, clip, stage >= 2 and micro_batches > 1)
    for found, each in zip(runs, reference, strict=True):
        assert_same_loop(found, each)


def predicted_and_measured(comm: Comm, stage: int) -> list[tuple[int, int]]:
    """Of the peak, and of what is resident with the state of all optimizers."""
    case = dataclasses.replace(CASES["gpt"], optimizer=OF_GPT)
    options = {"stage": stage, "bucket": 16_000}
    step = zplan.compile(build(case), case.loss_fn, case.batch(0), optimizer=OF_GPT, group=comm.group, **options)
    batch = case.batch(seed(0, comm.rank))
    step(batch)
    memory, found = step.plan.memory, measure(step, batch)
    return [(memory.peak_bytes, found.peak_bytes), (memory.resident_bytes, sum(storages(step, batch).values()))]


@pytest.mark.parametrize("stage", [0, 3])
def test_memory_with_several_optimizers_is_predicted_to_the_byte(pool, stage: int) -> None:
    """Predicted are those of the rank that holds most."""
    ranks = pool.run(2, predicted_and_measured, stage)
    for which in range(2):
        assert ranks[0][which][0] == max(found for _, found in (rank[which] for rank in ranks))


def used(comm: Comm) -> tuple[list[str], list[str], bool, bool]:
    """Hooks, state and its way back, on the optimizer of a compiled step in the middle of training."""
    case, calls = CASES["plain"], []
    step = zplan.compile(build(case), case.loss_fn, case.batch(0), optimizer=OF_GPT, group=comm.group, stage=2)
    together: Any = step.optimizer
    together.register_step_pre_hook(lambda *_: calls.append("before"))
    together.optimizers[0].register_step_post_hook(lambda *_: calls.append("SGD"))
    together.register_step_post_hook(lambda *_: calls.append("after"))
    step(case.batch(0))
    saved = copy.deepcopy(step.optimizer.state_dict())
    held = {name: tensor.clone() for name, tensor in step.residents().items()}
    before = step.full_state_dict()
    step(case.batch(1))
    once = step.full_state_dict()
    for name, tensor in step.residents().items():
        tensor.copy_(held[name])
    step.optimizer.load_state_dict(saved)
    step(case.batch(1))
    twice = step.full_state_dict()
    step.optimizer.zero_grad()
    return (
        [type(each).__name__ for each in together.optimizers],
        calls,
        all(torch.equal(once[name], twice[name]) for name in once),
        any(not torch.equal(once[name], before[name]) for name in once),
    )


def test_several_optimizers_are_used_as_one(pool) -> None:
    for kinds, calls, same, moved in pool.run(2, used):
        assert kinds == ["SGD", "RMSprop", "AdamW"]
        assert calls == ["before", "SGD", "after"] * 3
        assert same, "state was loaded"
        assert moved
