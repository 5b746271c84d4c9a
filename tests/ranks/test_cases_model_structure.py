"""Structures of models that broke other systems: each test carries the id of the public report it comes from.

`(run)` is a case that was found by running a system, not in a report. In most tests the whole training run is compared
bit for bit with an unsharded one at every stage, and then the promise itself is looked up in the plan. Where a report
speaks of saving and loading, `full_state_dict()` is loaded into a fresh model: checkpoint files do not exist yet.
"""

import functools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zplan
from tests.models import Nothing
from tests.ranks.training import ADAMW, Case, Run, assert_same, build, sharded, unsharded
from zplan.planner.program import Gather, Launch, Pack, Update
from zplan.runtime.comm import Comm

# Three ranks are the fewest with uneven shards.
WORLDS = pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
TWO_RANKS = pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
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


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        ("two names", 2),
        ("two names", 3),
        ("two names", 4),
        ("three names", 3),
        pytest.param("three names", 2, marks=pytest.mark.slow),
        pytest.param("three names", 4, marks=pytest.mark.slow),
    ],
)
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
    """Compile needs real weights today: the user materialises and ties. The plan from meta is the real one."""
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


class Unused(nn.Module):
    """One linear trains. The others get no gradient: never called, read and detached, and in no optimizer group."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(5, 5)
        self.used = nn.Linear(5, 5)
        self.detached = nn.Linear(5, 5)
        self.left_out = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.used(x) * self.left_out
        return x + self.detached(x).detach()


def without_left_out(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return ADAMW([(name, parameter) for name, parameter in named if name != "left_out"])


@WORLDS
def test_deepspeed_777_pytorch_101192_parameters_that_never_get_a_gradient(pool, world) -> None:
    case = Case(Unused, mean_square, rows, without_left_out)
    after = trains_as_unsharded(pool, case, world)[0].tensors
    for name, parameter in build(case).named_parameters():
        assert torch.equal(after[name], parameter) == (not name.startswith("used")), name
    for stage, plan in enumerate(plans(case, world)):
        assert about(plan, "never.weight") == []
        for name in ("detached.weight", "detached.bias"):
            assert about(plan, name) == ([] if stage < 3 else ["Gather"])
        assert set(about(plan, "left_out")) == (set() if stage < 3 else {"Gather"})
        assert [t.name for t in plan.graph.tensors if t.grad is not None] == ["used.weight", "used.bias"]
        assert "note: never.weight gets no gradient" in plan.summary()
        assert "note: left_out is in no optimizer group: it gets no gradient and never changes" in plan.summary()


class Frozen(nn.Module):
    """A frozen layer at the start, one in the middle through which gradients pass, and a frozen bias."""

    def __init__(self, *, checkpointing: bool) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.start = nn.Linear(5, 5).requires_grad_(False)
        self.first = nn.Linear(5, 5)
        self.middle = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)).requires_grad_(False)
        self.head = nn.Linear(5, 3)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.start(x))
        x = checkpoint(self.middle, x, use_reentrant=False) if self.checkpointing else self.middle(x)
        return self.head(x)


def state_elements(comm: Comm, case: Case) -> list[int]:
    """How many elements a rank's AdamW keeps a mean of, at every stage."""
    found = []
    for stage in STAGES:
        step = zplan.compile(
            build(case), case.loss_fn, case.batch(0), optimizer=case.optimizer, group=comm.group, stage=stage
        )
        step(case.batch(0))
        found.append(sum(state["exp_avg"].numel() for state in step.optimizer.state.values()))
    return found


@WORLDS
@pytest.mark.parametrize("checkpointing", [False, True])
def test_deepspeed_8130_deepspeed_3090_frozen_parameters(pool, world, checkpointing) -> None:
    """Saved and loaded: by `full_state_dict()`."""
    case = Case(functools.partial(Frozen, checkpointing=checkpointing), mean_square, rows)
    after = trains_as_unsharded(pool, case, world)[0]
    trained = ["first.weight", "first.bias", "head.weight"]
    for name, parameter in build(case).named_parameters():
        assert after.tensors[name].shape == parameter.shape
        assert torch.equal(after.tensors[name], parameter) == (name not in trained), name
    for stage, plan in enumerate(plans(case, world)):
        assert [t.name for t in plan.graph.tensors if t.grad is not None] == trained
        for tensor in plan.graph.tensors:
            if tensor.name not in trained:
                assert set(about(plan, tensor.name)) == (set() if stage < 3 else {"Gather"}), tensor.name
    # One bucket by default: its padding has state too.
    trains = [sum(b.numel for b in plan.ownership.buckets if b.trains) for plan in plans(case, world, bucket="25MB")]
    for held in pool.run(world, state_elements, case):
        assert held == [trains[0], *(numel // world for numel in trains[1:])]


class Empty(nn.Module):
    """Parameters of 8, 0 and 24 elements, and linears without outputs, one of them alone in its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.eight = nn.Parameter(torch.ones(8))
        self.none = nn.Parameter(torch.ones(0))
        self.rest = nn.Parameter(torch.ones(24))
        self.nothing = Nothing(4, 0)
        self.nothing_low = Nothing(4, 0).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.cat([self.eight, self.none, self.rest])
        return torch.cat([y, self.nothing(x[:, :4]), self.nothing_low(x[:, :4].bfloat16()).float()], dim=1)


@TWO_RANKS
def test_deepspeed_8279_linear_without_outputs_and_sizes_8_0_24(pool, world) -> None:
    """Saved and loaded: by `full_state_dict()`."""
    case = Case(Empty, mean_square, functools.partial(rows, width=32))
    after = trains_as_unsharded(pool, case, world)[0].tensors
    assert after["nothing.weight"].shape == after["nothing_low.weight"].shape == (0, 4)
    assert after["none"].shape == after["nothing.bias"].shape == (0,)
    for plan in plans(case, world):
        for name in ("none", "nothing.weight", "nothing.bias", "nothing_low.weight"):
            assert plan.ownership.intervals(name) == ()
        assert covered_once(plan, "eight")
        assert covered_once(plan, "rest")


class LogitScale(nn.Module):
    """0-dim parameters: among others, frozen, in bf16, and (`alone`) as all that a model has."""

    def __init__(self, *, alone: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.linear = None
        if not alone:
            self.linear = nn.Linear(5, 5)
            self.fixed = nn.Parameter(torch.tensor(0.5), requires_grad=False)
            self.low = nn.Parameter(torch.tensor(0.25, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        if self.linear is None:
            return x * self.scale.exp()
        return self.linear(x) * self.scale.exp() * self.fixed + self.low


@WORLDS
@pytest.mark.parametrize("alone", [False, True])
def test_run_0_dim_parameter_trains(pool, world, alone) -> None:
    case = Case(functools.partial(LogitScale, alone=alone), mean_square, rows)
    after = trains_as_unsharded(pool, case, world)[0].tensors
    assert after["scale"].shape == ()
    assert after["scale"] != 1.5
    for plan in plans(case, world):
        assert [(each.rank, each.start, each.stop) for each in plan.ownership.intervals("scale")] == [(0, 0, 1)]


class OneElement(nn.Module):
    def __init__(self, *, alone: bool) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.tensor([0.5]))
        self.linear = None if alone else nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return (x if self.linear is None else self.linear(x)) * self.one


def one_by_itself(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """A group with one element, and a group with all others."""
    groups = [[p for name, p in named if name == "one"], [p for name, p in named if name != "one"]]
    return torch.optim.AdamW([{"params": g, "lr": 0.1 / (i + 1)} for i, g in enumerate(groups) if g], foreach=False)


@TWO_RANKS
@pytest.mark.parametrize("alone", [False, True])
def test_deepspeed_129_a_group_with_one_element(pool, world, alone) -> None:
    case = Case(functools.partial(OneElement, alone=alone), mean_square, rows, one_by_itself)
    after = trains_as_unsharded(pool, case, world)[0].tensors
    assert after["one"] != 0.5
    for stage, plan in enumerate(plans(case, world)):
        assert [(each.rank, each.start, each.stop) for each in plan.ownership.intervals("one")] == [(0, 0, 1)]
        assert plan.graph.tensor["one"].group == 0
        # The other ranks' shares are padding.
        bucket = plan.ownership.bucket[plan.ownership.home["one"]]
        assert stage == 0 or all(slot.end <= bucket.part for slot in bucket.slots if slot.tensor == "one")


class Mixed(nn.Module):
    """bf16 experts, an fp32 router and norm, and one weight in fp16, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6).bfloat16() for _ in range(2))
        self.router = nn.Linear(6, 2)
        self.norm = nn.LayerNorm(6)
        self.gain = nn.Parameter(torch.ones(6, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        outputs = torch.stack([expert(x.bfloat16()) for expert in self.experts], dim=-1).float()
        return self.norm((outputs * weights.unsqueeze(-2)).sum(-1)).half() * self.gain


@WORLDS
def test_pytorch_156784_deepspeed_183_bf16_model_with_fp32_router_and_norm(pool, world) -> None:
    case = Case(Mixed, mean_square, functools.partial(rows, width=6))
    after = trains_as_unsharded(pool, case, world)[0].tensors
    words = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    before = build(case).state_dict()
    assert {name: tensor.dtype for name, tensor in after.items()} == {name: t.dtype for name, t in before.items()}
    assert not any(torch.equal(after[name], before[name]) for name in before)
    for bucket in (BUCKET, "25MB"):
        for plan in plans(case, world, bucket=bucket):
            assert {b.dtype for b in plan.ownership.buckets} == set(words.values())
            for each in plan.ownership.buckets:
                assert {words[before[slot.tensor].dtype] for slot in each.slots} == {each.dtype}


class Buffers(nn.Module):
    """BatchNorm statistics, a buffer written in place, one that is re-assigned, and one that is not saved."""

    calls: Tensor
    average: Tensor
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(5))
        self.register_buffer("last", torch.zeros(4, 5), persistent=False)
        self.register_buffer("scale", torch.full((5,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.norm(self.linear(x)) + self.last
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        self.last.copy_(x.detach())
        return (x - self.average) * self.scale


@WORLDS
def test_deepspeed_1101_buffers_are_updated_saved_and_each_rank_s_own(pool, world) -> None:
    """Saved and loaded: by `full_state_dict()`, whose buffers are rank 0's; the plan says that ranks differ."""
    case = Case(Buffers, mean_square, rows)
    written = ["norm.running_mean", "norm.running_var", "average", "last"]
    reference = trains_as_unsharded(pool, case, world)
    before = dict(build(case).named_buffers())
    for run in reference:
        assert run.buffers["calls"] == run.buffers["norm.num_batches_tracked"] == case.steps
        assert torch.equal(run.buffers["scale"], before["scale"])
        assert not any(torch.equal(run.buffers[name], before[name]) for name in written)
    assert not any(torch.equal(reference[0].buffers[name], reference[1].buffers[name]) for name in written)
    assert "last" not in reference[0].tensors
    for plan in plans(case, world):
        note = next(note for note in plan.graph.notes if note.startswith("each rank writes buffers of its own"))
        assert set(note.rpartition(": ")[2].split(", ")) == {*written, "calls", "norm.num_batches_tracked"}
        assert f"note: {note}" in plan.summary()


class EncoderDecoder(nn.Module):
    """No forward of its own: the loss calls its parts, which are registered in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(10, 5)
        self.decoder = nn.ModuleList(nn.Linear(10, 10) for _ in range(2))
        self.bridge = nn.Linear(10, 10)
        self.encoder = nn.ModuleList([nn.Linear(5, 10), nn.Linear(10, 10)])


USED = ["encoder.0", "encoder.1", "bridge", "decoder.0", "decoder.1", "head"]


def several_roots(model: EncoderDecoder, batch: Tensor) -> Tensor:
    x = batch
    for layer in model.encoder:
        x = torch.tanh(layer(x))
    memory = model.bridge(x)
    for layer in model.decoder:
        x = torch.tanh(layer(x + memory))
    return (model.head(x) - batch).square().mean()


@WORLDS
def test_pytorch_154655_encoder_and_decoder_are_gathered_in_order_of_use(pool, world) -> None:
    case = Case(EncoderDecoder, several_roots, rows)
    trains_as_unsharded(pool, case, world)
    for prefetch in (0, 1, 3):
        for stage, plan in enumerate(plans(case, world, prefetch=prefetch)):
            used = list(dict.fromkeys(plan.ownership.home[f"{name}.weight"] for name in USED))
            assert len(used) > 3
            # Buckets are laid out in that order too, whatever the order of registration.
            assert used == sorted(used, key=lambda bucket: int(bucket[1:]))
            gathers = [x.bucket for x in plan.program.instructions if isinstance(x, Gather)]
            forward = list(dict.fromkeys(gathers))
            backward = gathers[len(forward) :]
            assert [name for name in forward if name in used] == ([] if stage == 0 else used)
            if stage == 3:
                # The first weight is not read in backward: nothing is behind it.
                assert [name for name in backward if name in used] == used[:0:-1]
            printed = re.findall(r" gather +(b\d+) = ", plan.schedule.text(ops=True))
            assert printed == gathers


class Differs(nn.Module):
    """A model that every rank can use in another way."""

    def __init__(self, rank: int, how: str) -> None:
        super().__init__()
        self.rank, self.how = rank, how
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.extra = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        odd = self.rank == 1
        match self.how:
            case "a module":
                x = self.second(self.first(x))
                return self.extra(x) if odd else x
            case "no parameters":
                x = self.second(self.first(x))
                return self.extra(torch.tanh(x) if odd else x)
            case "twice":
                return self.extra(self.extra(self.first(x)) if odd else self.first(x))
            case "the order":
                return self.first(self.second(x)) if odd else self.second(self.first(x))
            case "a number":
                return self.first(x) * (0.5 if odd else 0.25)
        return self.second(x) if x.sum() > 0 else self.first(x)


def used_differently(comm: Comm, how: str, stage: int) -> str:
    model = Differs(comm.rank, how)
    try:
        zplan.compile(model, mean_square, rows(comm.rank), optimizer=ADAMW, group=comm.group, stage=stage)
    except zplan.ZplanError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


@WORLDS
@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            "a module",
            "rank 0 has parameter extra.weight: fp32[5, 5], trained: False; rank 1 has parameter extra.weight",
        ),
        ("no parameters", "first difference: rank 0 has op "),
        ("twice", "first difference: rank 0 has op "),
        ("the order", "rank "),
        ("a number", "first difference: rank 0 has op "),
    ],
)
def test_pytorch_158719_deepspeed_7998_a_module_used_on_one_rank_only(pool, world, how, words) -> None:
    for stage in (0, 3):
        found = pool.run(world, used_differently, how, stage)
        assert len(set(found)) == 1, found
        assert found[0].startswith("AgreementError: the ranks hold different plans")
        assert words in found[0]
        assert "try: the same model" in found[0]


def test_pytorch_158719_deepspeed_7998_a_module_used_by_the_values_of_a_batch(pool) -> None:
    """What each rank would decide for itself in each step cannot be traced, and is refused everywhere."""
    found = pool.run(2, used_differently, "by value", 3)
    assert len(set(found)) == 1, found
    assert found[0].startswith("TraceError: the graph cannot be captured")
    assert "return self.second(x) if x.sum() > 0 else self.first(x)" in found[0]


class OneLarge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(5, 5)
        self.large = nn.Linear(5, 20_000, bias=False)
        self.norm = nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.large(self.norm(self.small(x)))


@WORLDS
def test_pytorch_59410_one_tensor_far_larger_than_all_others(pool, world) -> None:
    case = Case(OneLarge, mean_square, rows)
    trains_as_unsharded(pool, case, world)
    for bucket in (BUCKET, "25MB"):
        for stage, plan in enumerate(plans(case, world, bucket=bucket)):
            assert covered_once(plan, "large.weight")
            if stage:
                shares = [each.stop - each.start for each in plan.ownership.intervals("large.weight")]
                assert len(shares) == world
                assert max(shares) < 1.01 * min(shares)
            assert plan.ownership.imbalance < 1.01
            assert f"fullest rank / mean: {plan.ownership.imbalance:.2f}" in plan.summary()


class FewRows(nn.Module):
    """Two rows and one row, of few elements and of many: cut within a row, or on the first ranks alone."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(200, 2)
        self.narrow = nn.Linear(2, 1)
        self.one_row = nn.Embedding(1, 300)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x)) + self.one_row(torch.zeros(len(x), dtype=torch.int64))


@pytest.mark.parametrize("world", [pytest.param(3, marks=pytest.mark.slow), 4])
def test_torchtitan_4593_more_ranks_than_rows(pool, world) -> None:
    """Saved and loaded: by `full_state_dict()`."""
    case = Case(FewRows, mean_square, functools.partial(rows, width=200))
    after = trains_as_unsharded(pool, case, world)[0].tensors
    before = build(case).state_dict()
    assert not any(torch.equal(after[name], before[name]) for name in before)
    for stage, plan in enumerate(plans(case, world)):
        assert all(covered_once(plan, name) for name in before)
        if stage:
            assert len(plan.ownership.intervals("wide.weight")) > 2
            assert len(plan.ownership.intervals("one_row.weight")) > 1
            assert [each.rank for each in plan.ownership.intervals("narrow.weight")] == [0]
            assert "fullest rank / mean: 1." in plan.summary()
