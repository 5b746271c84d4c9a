"""Several micro-batches and one update: the bits of an unsharded loop that adds up in the same order.

Stages 0 and 1 add up micro-batches first, then ranks; stages 2 and 3 ranks first, then micro-batches.
"""

import copy
import functools
import itertools

import pytest
import torch

import zplan
from tests.ranks.training import CASES, STEPS, Case, Run, assert_same, build, seed
from zplan.planner.program import Position, ReduceScatter
from zplan.runtime.comm import Comm
from zplan.runtime.measure import measure

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def batches(case: Case, step: int, rank: int, micro_batches: int) -> list:
    return [case.batch(seed(100 * step + i, rank)) for i in range(micro_batches)]


def sharded(comm: Comm, case: Case, micro_batches: int, together: bool, options: dict) -> Run:
    model = build(case)
    step = zplan.compile(model, case.loss_fn, case.batch(0), optimizer=case.optimizer, group=comm.group, **options)
    losses = []
    for i in range(STEPS):
        torch.manual_seed(seed(i, comm.rank))
        given = batches(case, i, comm.rank, micro_batches)
        if together:
            losses.append(step(*given))
        else:
            each = [step.accumulate(batch) for batch in given[:-1]]
            losses.append(torch.stack([*each, step(given[-1])]).mean())
    return Run(losses, step.full_state_dict(), dict(model.named_buffers()))


def unsharded(case: Case, world: int, micro_batches: int, ranks_first: bool) -> list[Run]:
    torch.set_num_threads(1)
    replicas = [build(case)]
    replicas += [copy.deepcopy(replicas[0]) for _ in range(world - 1)]
    trained = [[p for p in replica.parameters() if p.requires_grad] for replica in replicas]
    optimizers = [case.optimizer([(n, p) for n, p in r.named_parameters() if p.requires_grad]) for r in replicas]
    losses: list[list[torch.Tensor]] = [[] for _ in replicas]
    for i in range(STEPS):
        # grads[rank][micro-batch][parameter]
        grads: list[list[list[torch.Tensor | None]]] = []
        for rank, replica in enumerate(replicas):
            torch.manual_seed(seed(i, rank))
            grads.append([])
            each = []
            for batch in batches(case, i, rank, micro_batches):
                loss = case.loss_fn(replica, batch)
                loss.backward()
                each.append(loss.detach())
                grads[-1].append([p.grad for p in trained[rank]])
                for p in trained[rank]:
                    p.grad = None
            losses[rank].append(torch.stack(each).mean())
        for index, shared in enumerate(zip(*trained, strict=True)):
            table = [[micro[index] for micro in of_rank] for of_rank in grads]
            if table[0][0] is None:
                continue
            total = over_ranks_first(table) if ranks_first and world > 1 else over_micro_batches_first(table)
            average = (total / (world * micro_batches)).to(table[0][0].dtype)
            for parameter in shared:
                parameter.grad = average.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    whole = dict(replicas[0].state_dict())
    return [Run(kept, whole, dict(r.named_buffers())) for kept, r in zip(losses, replicas, strict=True)]


def add(terms: list[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, [term.float() for term in terms])


def over_ranks_first(table: list[list[torch.Tensor]]) -> torch.Tensor:
    return add([add(list(column)) for column in zip(*table, strict=True)])


def over_micro_batches_first(table: list[list[torch.Tensor]]) -> torch.Tensor:
    """Each rank's sum is rounded to the gradients' own dtype for the wire; with one rank there is none."""
    sums = [add(row) for row in table]
    return sums[0] if len(sums) == 1 else add([total.to(table[0][0].dtype) for total in sums])


@functools.cache
def expected(name: str, world: int, micro_batches: int, ranks_first: bool):
    return unsharded(CASES[name], world, micro_batches, ranks_first)


FEW = [
    ("gpt", 2, 0, 4), ("gpt", 2, 1, 4), ("gpt", 2, 2, 4), ("gpt", 2, 3, 4), ("gpt", 3, 3, 2), ("gpt", 1, 3, 4),
    ("odd", 3, 0, 2), ("odd", 3, 1, 3), ("odd", 3, 2, 3), ("odd", 3, 3, 3), ("odd", 2, 2, 2), ("odd", 1, 0, 2),
    ("plain", 3, 1, 4), ("plain", 4, 2, 3), ("gpt autocast", 2, 2, 2),
]  # fmt: skip
ALL = itertools.product(("gpt", "odd"), (1, 2, 3), range(4), (2, 3, 4))
REST = [pytest.param(*row, marks=pytest.mark.slow) for row in ALL if row not in FEW]


@pytest.mark.parametrize(("name", "world", "stage", "micro_batches"), [*FEW, *REST])
def test_micro_batches_give_the_bits_of_an_unsharded_loop(pool, name, world, stage, micro_batches) -> None:
    options = {"stage": stage, "bucket": 4_000, "micro_batches": micro_batches}
    together = (world + stage + micro_batches) % 2 == 0
    runs = pool.run(world, sharded, CASES[name], micro_batches, together, options)
    for run, reference in zip(runs, expected(name, world, micro_batches, stage >= 2), strict=True):
        assert_same(run, reference)


@pytest.mark.parametrize(("first", "second"), [(0, 1), (2, 3)])
def test_stages_of_a_pair_agree_and_bucket_or_prefetch_change_nothing(pool, first: int, second: int) -> None:
    one = pool.run(3, sharded, CASES["gpt"], 3, True, {"stage": first, "bucket": 4_000, "prefetch": 0, "depth": 1})
    two = pool.run(3, sharded, CASES["gpt"], 3, False, {"stage": second, "bucket": 200_000, "prefetch": 3})
    for a, b in zip(one, two, strict=True):
        assert_same(a, b)


def test_deepspeed_7981_two_micro_batches_are_one_batch_of_both_up_to_rounding(pool) -> None:
    """The same number of loss terms in each."""
    plain = CASES["plain"]
    # SGD: AdamW would divide what differs in the last bits by gradients that are nearly zero.
    (micro,) = pool.run(1, sharded, Case(plain.make, plain.loss_fn, plain.batch, SGD), 2, True, {"stage": 2})
    doubled = Case(plain.make, plain.loss_fn, both, SGD)
    (whole,) = pool.run(1, sharded, doubled, 1, True, {"stage": 2})
    for name, tensor in whole.tensors.items():
        # fp32 sums in another order.
        assert torch.allclose(micro.tensors[name], tensor, rtol=1e-5, atol=1e-6), name


def both(number: int):
    """`seed(100 * step, 0)` -> the two micro-batches of that step."""
    one, two = CASES["plain"].batch(number), CASES["plain"].batch(number + seed(1, 0))
    return torch.utils._pytree.tree_map(lambda a, b: torch.cat([a, b]) if isinstance(a, torch.Tensor) else a, one, two)


def lifecycle(comm: Comm) -> list[str]:
    case = CASES["gpt"]
    step = zplan.compile(build(case), case.loss_fn, case.batch(0), optimizer=case.optimizer, group=comm.group, stage=2)
    before = step.full_state_dict()
    step.accumulate(case.batch(1))
    step.accumulate(case.batch(2))
    words = []

    def whole() -> None:
        with step.whole_parameters():
            pass

    for what in (step.full_state_dict, lambda: step.evaluate(case.batch(0)), whole, lambda: step(), torn(step)):
        try:
            what()
        except zplan.ZplanError as error:
            words.append(f"{type(error).__name__}: {error}".splitlines()[0])
    short = {name: value[:1] for name, value in case.batch(0).items()}
    try:
        step.accumulate(short)
    except zplan.SpecError as error:
        words.append(str(error))
    loss = step(case.batch(3))
    assert loss.isfinite()
    assert any(not torch.equal(before[name], tensor) for name, tensor in step.full_state_dict().items())
    return words


def torn(step: zplan.TrainStep):
    """A second batch of another shape: refused before the first one runs."""
    case = CASES["gpt"]
    short = {name: value[:1] if isinstance(value, torch.Tensor) else value for name, value in case.batch(0).items()}

    def run() -> None:
        pending = step._pending
        try:
            step(case.batch(0), short)
        finally:
            assert step._pending == pending

    return run


def test_what_would_see_a_step_half_done_is_refused(pool) -> None:
    waits = "2 micro-batches wait for their update: finish with step(batch) first"
    for words in pool.run(2, lifecycle):
        assert words[:3] == [
            f"StateError: {what}: {waits}" for what in ("full_state_dict", "evaluate", "whole_parameters")
        ]
        assert words[3] == "SpecError: step takes a batch, or several micro-batches, and got none"
        assert words[4].startswith("SpecError: batch.tokens is torch.int64[1, 16]")
        assert words[5].startswith("batch.tokens is torch.int64[1, 16]"), "what is pending is still there"


def measured(comm: Comm, name: str, stage: int) -> tuple[list[int], list[int]]:
    """Peaks predicted and measured: of each micro-batch alone."""
    case = CASES[name]
    step = zplan.compile(
        build(case),
        case.loss_fn,
        case.batch(0),
        optimizer=case.optimizer,
        group=comm.group,
        stage=stage,
        bucket=16_000,
        micro_batches=3,
    )
    step(*(case.batch(i) for i in range(3)))
    return [step.plan.memory.peak_bytes], [measure(step, *(case.batch(i) for i in range(3))).peak_bytes]


@pytest.mark.parametrize("stage", range(4))
def test_the_peak_over_micro_batches_is_predicted_to_the_byte(pool, stage: int) -> None:
    for predicted, found in pool.run(2, measured, "gpt", stage):
        assert predicted == found


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5])
def test_traffic_is_that_of_the_table(micro_batches: int) -> None:
    """2, 2, 1 + m, 3 m psi, times (N - 1) / N."""
    case = CASES["gpt"]
    model = build(case)
    plans = zplan.plans(
        model, case.loss_fn, case.batch(0), optimizer=case.optimizer, world_size=4, micro_batches=micro_batches,
        bucket=64_000,
    )  # fmt: skip
    parts = [sum(bucket.part_nbytes for bucket in plan.ownership.buckets) for plan in plans]
    # The position table is not read in backward, where stage 3 would gather it again.
    once = [3 * plan.ownership.bucket[name].part_nbytes for plan in plans[3:] for name in unread(plan)]
    m = micro_batches
    assert [plan.traffic.bytes_per_rank for plan in plans] == [
        2 * 3 * parts[0],
        2 * 3 * parts[1],
        (1 + m) * 3 * parts[2],
        3 * m * 3 * parts[3] - m * sum(once),
    ]


def unread(plan: zplan.Plan) -> list[str]:
    """Buckets that are gathered once in a micro-batch of stage 3."""
    from zplan.planner.program import Gather

    gathers = [x.bucket for x in plan.program.instructions if isinstance(x, Gather)]
    return [name for name in dict.fromkeys(gathers) if gathers.count(name) == 1]


def test_programs_by_position() -> None:
    case = CASES["gpt"]
    plans = zplan.plans(build(case), case.loss_fn, case.batch(0), world_size=2, micro_batches=5)
    for plan in plans:
        assert [each.position for each in plan.programs] == [Position.FIRST, Position.MIDDLE, Position.LAST]
        assert "micro-batches=5" in str(plan)
        text = str(plan.schedule)
        assert [f"position={word} " in text for word in ("first", "middle", "last")] == [True] * 3
    counts = [
        [sum(isinstance(x, ReduceScatter) for x in program.instructions) > 0 for program in plan.programs]
        for plan in plans
    ]
    assert counts == [[False, False, True]] * 2 + [[True, True, True]] * 2
