"""Structures of models that broke other systems: each test carries the id of the public report it comes from.

`(run)` is a case that was found by running a system, not in a report. In most tests the whole training run is compared
bit for bit with an unsharded one at every stage, and then the promise itself is looked up in the plan. Where a report
speaks of saving and loading, `full_state_dict()` is loaded into a fresh model: checkpoint files do not exist yet.
"""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zplan
from tests.ranks.training import Case, Run, assert_same, build, sharded, unsharded
from zplan.planner.program import Launch, Pack, Update
from zplan.runtime.comm import Comm

WORLDS = pytest.mark.parametrize("world", [2, 3])
STAGES = range(4)
# Small enough that most tensors of these models travel alone.
BUCKET = 400


def at_every_stage(comm: Comm, case: Case, options: dict[str, Any]) -> list[Run]:
    return [sharded(comm, case, {"bucket": BUCKET, **options, "stage": stage}) for stage in STAGES]


def trains_as_unsharded(pool: Any, case: Case, world: int, **options: Any) -> list[Run]:
    """Compares every stage, every rank and every step with the unsharded run; loads the end into a fresh model.

    Returns the unsharded run of each rank.
    """
    reference = unsharded(case, world)
    for rank, runs in enumerate(pool.run(world, at_every_stage, case, options)):
        for run in runs:
            assert_same(run, reference[rank])
            fresh = build(case)
            fresh.load_state_dict(run.tensors, strict=True)
            for name, tensor in fresh.state_dict().items():
                assert torch.equal(tensor, run.tensors[name]), name
    return reference


def plans(case: Case, world: int, **options: Any) -> list[zplan.Plan]:
    """The plans of `trains_as_unsharded`, by stage; planning needs no ranks."""
    arguments = (build(case), case.loss_fn, case.batch(0))
    options = {"bucket": BUCKET, **options}
    return [
        zplan.plan(*arguments, optimizer=case.optimizer, stage=stage, world_size=world, **options) for stage in STAGES
    ]


def about(plan: zplan.Plan, tensor: str) -> list[str]:
    """The kinds of the instructions about a tensor's bucket: collectives, packing, update."""
    bucket = plan.ownership.home[tensor]
    found = []
    for instruction in plan.program.instructions:
        if isinstance(instruction, Launch | Pack) and instruction.bucket == bucket:
            found.append(type(instruction).__name__)
        if isinstance(instruction, Update) and bucket in instruction.buckets:
            found.append("Update")
    return found


REDUCED_ONCE = (
    ["Pack", "ReduceScatter", "GatherGradient", "Update"],
    ["Gather", "Pack", "ReduceScatter", "Update"],
    ["Gather", "Pack", "ReduceScatter", "Update"],
    ["Gather", "Gather", "Pack", "ReduceScatter", "Update"],
)


def covered_once(plan: zplan.Plan, tensor: str) -> bool:
    """Whether every element of a tensor has one owner."""
    intervals = plan.ownership.intervals(tensor)
    owned = [element for each in intervals for element in range(each.start, each.stop)]
    return owned == list(range(plan.graph.tensor[tensor].numel))


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def rows(seed: int, *, width: int = 5, count: int = 4) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def whole_numbers(seed: int, *, width: int = 4, count: int = 3) -> Tensor:
    return torch.randint(-3, 4, (count, width), generator=torch.Generator().manual_seed(seed)).float()


class Tied(nn.Module):
    """`VOCAB` divides by no number of ranks. The head is tied to the embedding, as `again` is where there is one."""

    VOCAB, WIDTH = 61, 8

    def __init__(self, *, thrice: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.VOCAB, self.WIDTH)
        self.middle = nn.Linear(self.WIDTH, self.WIDTH)
        self.head = nn.Linear(self.WIDTH, self.VOCAB, bias=False)
        self.again = nn.Linear(self.WIDTH, self.VOCAB) if thrice else None
        self.tie()

    def tie(self) -> None:
        self.head.weight = self.embed.weight
        if self.again is not None:
            self.again.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.middle(self.embed(tokens)))
        return self.head(x) if self.again is None else self.head(x) + self.again(x)


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def text(seed: int) -> Tensor:
    return torch.randint(Tied.VOCAB, (2, 7), generator=torch.Generator().manual_seed(seed))


def tied_on_meta() -> nn.Module:
    """Built on meta and given memory; torch takes ties apart there, and the user ties again."""
    with torch.device("meta"):
        model = Tied()
    model.to_empty(device="cpu")
    model.tie()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


# No decay: what moves is moved by its gradient.
ADAM = functools.partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.0, foreach=False)
TIED = {
    "two names": Case(Tied, next_token, text, ADAM),
    "three names": Case(functools.partial(Tied, thrice=True), next_token, text, ADAM),
}


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("kind", TIED)
def test_pytorch_176076_tied_embedding_and_head_of_a_vocabulary_that_does_not_divide(pool, kind, world) -> None:
    case = TIED[kind]
    before = build(case).embed.weight
    after = trains_as_unsharded(pool, case, world)[0].tensors["embed.weight"]
    for stage, plan in enumerate(plans(case, world)):
        tensor = plan.graph.tensor["embed.weight"]
        assert len(tensor.aliases) == (2 if kind == "two names" else 3)
        assert not {"head.weight", "again.weight"} & set(plan.graph.tensor)
        assert covered_once(plan, "embed.weight")
        assert about(plan, "embed.weight") == REDUCED_ONCE[stage]
        owners = [each.rank for each in plan.ownership.intervals("embed.weight")]
        assert owners == ([0] if stage == 0 else list(range(world)))
        for each in plan.ownership.intervals("embed.weight"):
            old, new = (tensor.flatten()[each.start : each.stop] for tensor in (before, after))
            assert (old != new).all(), f"the part of rank {each.rank} does not train"


@WORLDS
def test_accelerate_3154_tied_weights_of_a_model_built_on_meta(pool, world) -> None:
    """Compile needs real weights today: the user materialises and ties. The plan from meta is that of the real model."""
    case = Case(tied_on_meta, next_token, text)
    trains_as_unsharded(pool, case, world)
    with torch.device("meta"):
        planned_on_meta = plans(Case(Tied, next_token, text), world)
    for real, meta in zip(plans(case, world), planned_on_meta, strict=True):
        assert meta.hash == real.hash
        assert [t.name for t in meta.graph.tensors] == ["embed.weight", "middle.weight", "middle.bias"]
        assert meta.graph.tensor["embed.weight"].aliases == ("embed.weight", "head.weight")
        assert about(meta, "embed.weight").count("Pack") == 1


class TiedLinears(nn.Module):
    """Two linears of one weight, each with a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


@WORLDS
def test_deepspeed_966_tied_linears_with_bias_over_many_steps(pool, world) -> None:
    case = Case(TiedLinears, mean_square, functools.partial(rows, width=4), steps=25)
    losses = trains_as_unsharded(pool, case, world)[0].losses
    assert losses[-1] < losses[0]
    for plan in plans(case, world):
        assert [t.name for t in plan.graph.tensors] == ["first.weight", "first.bias", "second.bias"]
        assert about(plan, "first.weight").count("Pack") == 1


class Twice(nn.Module):
    """One linear applied twice, or, as what it should be equal to, two linears of the same values."""

    def __init__(self, *, apart: bool = False) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        with torch.no_grad():
            for i, parameter in enumerate(self.one.parameters()):
                parameter.copy_((torch.arange(parameter.numel()) % (3 + i) - 1).view_as(parameter))
        self.other = nn.Linear(4, 4) if apart else None
        if self.other is not None:
            self.other.load_state_dict(self.one.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        return (self.one if self.other is None else self.other)(self.one(x))


def total(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).sum()


def one_sgd_step(comm: Comm, case: Case) -> list[dict[str, Tensor]]:
    return [each.tensors for each in at_every_stage(comm, case, {})]


@WORLDS
def test_deepspeed_8224_a_submodule_applied_twice_gets_both_contributions(pool, world) -> None:
    """Whole numbers, so that sums are exact: the step of one linear used twice is that of two linears, summed.

    Every rank gets the same batch, for a mean that is exact too.
    """
    sgd = functools.partial(torch.optim.SGD, lr=1.0)
    case = Case(Twice, total, same_numbers, sgd, steps=1)
    apart = Twice(apart=True)
    total(apart, same_numbers(0)).backward()
    for stages in pool.run(world, one_sgd_step, case):
        for tensors in stages:
            for name, parameter in apart.one.named_parameters():
                contributions = parameter.grad, apart.other.get_parameter(name).grad
                assert all(gradient.any() for gradient in contributions)
                assert torch.equal(tensors[f"one.{name}"], parameter.detach() - sum(contributions)), name
    trains_as_unsharded(pool, Case(Twice, mean_square, functools.partial(rows, width=4)), world)
    for stage, plan in enumerate(plans(case, world)):
        assert about(plan, "one.weight") == REDUCED_ONCE[stage]


def same_numbers(_: int) -> Tensor:
    return whole_numbers(7)
