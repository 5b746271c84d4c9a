"""What a running step does, seen from outside: gathers counted, storages watched at the border, order of nodes."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import zplan
from tests.ranks.training import CASES, build
from zplan.graph.ir import Phase
from zplan.planner.program import Gather, Launch, Program, Run, Wait, is_chain
from zplan.runtime.comm import Comm
from zplan.runtime.measure import measure
from zplan.runtime.rewrite import INSTRUCTION, inputs
from zplan.runtime.step import bind

c10d = torch.ops._c10d_functional


class Collectives(TorchDispatchMode):
    """Counts collectives and remembers the storage of everything that was gathered.

    On gloo every launch is an all-to-all: which one is a gather is known from the program, whose order is tested too.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.launches = [x for x in program.instructions if isinstance(x, Launch)]
        self.launched = 0
        self.calls: list[str] = []
        self.sizes: list[int] = []
        self.gathered: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional":
            self.calls.append(func._schema.name.partition("::")[2])
            if func is c10d.all_to_all_single.default:
                if isinstance(self.launches[self.launched], Gather):
                    self.gathered.append(result.untyped_storage())
                self.launched += 1
                self.sizes.append(result.numel())
        return result

    def alive(self) -> int:
        """How many gathered storages still hold memory: at its `Free` a gathered bucket is emptied."""
        return sum(storage.nbytes() > 0 for storage in self.gathered)


def compiled(comm: Comm, name: str, **options) -> zplan.TrainStep:
    case = CASES[name]
    model = build(case)
    return zplan.compile(model, case.loss_fn, case.batch(0), optimizer=case.optimizer, group=comm.group, **options)


def reads(step: zplan.TrainStep, phase: Phase) -> int:
    """How many buckets the ops of a phase read."""
    graph, home = step.plan.graph, step.plan.program.home
    ops = [op for op in graph.ops if op.phase is phase and not is_chain(graph, op)]
    return len({bucket for op in ops for name in op.inputs for bucket in home.get(name, ())})


def watch(comm: Comm, name: str, stage: int, prefetch: int, bucket: int = 4_000) -> dict[str, int]:
    """One step with a probe between forward and backward."""
    step = compiled(comm, name, stage=stage, prefetch=prefetch, bucket=bucket)
    seen: dict[str, int] = {}
    collectives = Collectives(step.plan.program)

    def probe() -> None:
        seen["before"] = len(collectives.gathered)
        seen["alive"] = collectives.alive()

    boundary = step.plan.program.boundary
    graph = step.module.graph
    first = next(node for node in graph.nodes if node.meta.get(INSTRUCTION, -1) >= boundary)
    with graph.inserting_before(first):
        graph.call_function(probe)
    step.module.recompile()
    with collectives:
        step(CASES[name].batch(0))
    return {
        **seen,
        "gathers": len(collectives.gathered),
        "forward": reads(step, Phase.FORWARD),
        "backward": reads(step, Phase.BACKWARD),
        "end": collectives.alive(),
    }


def test_stage_3_gathers_a_block_twice(pool) -> None:
    for seen in pool.run(2, watch, "gpt", 3, 1, 40_000):
        assert seen["gathers"] == 2 * seen["forward"] > 2


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("name", ["gpt", "odd"])
def test_stage_3_holds_nothing_whole_between_forward_and_backward(pool, name: str, prefetch: int) -> None:
    for seen in pool.run(2, watch, name, 3, prefetch):
        # One gather in each phase that reads the bucket; backward reads no biases and no embeddings.
        assert seen["before"] == seen["forward"] > 2
        assert seen["gathers"] == seen["forward"] + seen["backward"]
        assert seen["alive"] == 0
        assert seen["end"] == 0


def test_stage_2_keeps_what_it_gathered_until_backward(pool) -> None:
    """The same probe on a stage that keeps: it would see a whole parameter if there were one."""
    for seen in pool.run(2, watch, "gpt", 2, 1):
        assert seen["gathers"] == seen["before"] == seen["forward"] > 2
        assert seen["alive"] == seen["backward"] > 2
        assert seen["end"] == 0


def order(comm: Comm, name: str, stage: int) -> None:
    """Nodes stand in the order of the instructions that they are tagged with, and collectives are called in theirs."""
    step = compiled(comm, name, stage=stage, bucket=4_000)
    program = step.plan.program
    tags = [node.meta[INSTRUCTION] for node in step.module.graph.nodes if INSTRUCTION in node.meta]
    assert tags == sorted(tags)
    assert set(tags) == {-1, *range(len(program.instructions) + 1)}
    collectives = Collectives(step.plan.program)
    with collectives:
        step(CASES[name].batch(0))
    names = [(x, "all_to_all_single" if isinstance(x, Launch) else "wait_tensor") for x in program.instructions]
    assert collectives.calls == [name for x, name in names if isinstance(x, Launch | Wait)]
    assert collectives.launched == len(collectives.launches) > 2
    # What a launch sends: the repeated part, or packed gradients, of the planned bucket.
    sizes = [program.bucket(x.bucket).numel for x in collectives.launches]
    assert collectives.sizes == sizes
    assert any(isinstance(instruction, Run) for instruction in program.instructions)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_instructions_run_in_the_planned_order(pool, stage: int) -> None:
    pool.run(2, order, "gpt", stage)


def holds(comm: Comm) -> list[int]:
    """Bytes of parameters and optimizer state that a rank holds at each stage."""
    found = []
    for stage in range(4):
        step = compiled(comm, "gpt", stage=stage, bucket=4_000)
        step(CASES["gpt"].batch(0))
        state = [v for s in step.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        found.append(sum(t.numel() * t.element_size() for t in state))
        assert all(p.grad is None for group in step.optimizer.param_groups for p in group["params"])
    return found


def test_optimizer_state_is_sharded_from_stage_1_on(pool) -> None:
    for whole, *sharded in pool.run(4, holds):
        assert all(abs(nbytes - whole / 4) < 0.15 * whole for nbytes in sharded), (whole, sharded)


def lifecycle(comm: Comm) -> list[str]:
    """What people do around a step, right and wrong."""
    words = []
    case = CASES["gpt"]
    model = build(case)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    step = zplan.compile(
        model, case.loss_fn, case.batch(0), optimizer=case.optimizer, group=comm.group, stage=3, bucket=4_000
    )
    with step:
        assert all(p.device.type == "meta" for p in model.parameters())
        for attempt in (
            lambda: model(case.batch(0)["tokens"]),
            lambda: model.blocks[0].up(torch.zeros(1)),
            lambda: step(),
            lambda: step(case.batch(0)["tokens"]),
            lambda: step({**case.batch(0), "tokens": case.batch(0)["tokens"][:1]}),
            lambda: step({**case.batch(0), "tokens": case.batch(0)["tokens"].float()}),
        ):
            try:
                attempt()
            except zplan.ZplanError as error:
                words.append(f"{type(error).__name__}: {error}")
        with step.whole_parameters() as whole:
            assert whole is model
            assert model.head.weight is model.embed.weight
            assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
            model.eval()
            model(case.batch(0)["tokens"])
            model.train()
            with torch.no_grad():
                model.norm.weight.zero_()
            try:
                step(case.batch(0))
            except zplan.StateError as error:
                words.append(str(error))
        after = step.full_state_dict()
        assert list(after) == list(before)
        assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    try:
        step(case.batch(0))
    except zplan.StateError as error:
        words.append(str(error))
    return words


def test_lifecycle(pool) -> None:
    for words in pool.run(3, lifecycle):
        assert len(words) == 8, words
        expected = [
            "StateError: GPT was called, but zplan holds its weights in shards: open `with step.whole_parameters()",
            "StateError: blocks.0.up (Linear) was called",
            "SpecError: step takes a batch, or several micro-batches, and got none",
            "SpecError: the batch has another structure",
            "SpecError: batch.tokens is torch.int64[1, 16] on cpu, but torch.int64[2, 16] on cpu was traced",
            "SpecError: batch.tokens is torch.float32[2, 16]",
            "step: whole_parameters() is open",
            "step: this step is closed",
        ]
        for found, start in zip(words, expected, strict=True):
            assert found.startswith(start), found


def asked_for_state(comm: Comm) -> list[str]:
    case = CASES["gpt"]
    model = build(case)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    words = []
    with zplan.compile(model, case.loss_fn, case.batch(0), optimizer=case.optimizer, group=comm.group, stage=3) as step:
        for ask in (model.state_dict, model.blocks[0].state_dict, lambda: model.load_state_dict(weights)):
            try:
                ask()
            except zplan.StateError as error:
                words.append(str(error))
        assert list(step.full_state_dict()) == list(weights)
        with step.whole_parameters() as whole:
            assert list(whole.state_dict()) == list(weights)
    try:
        model.state_dict()
    except zplan.StateError as error:
        words.append(str(error))
    return words


def test_a_state_dict_of_shards_is_refused_with_the_way_to_the_whole_one(pool) -> None:
    held = "but zplan holds its weights in shards"
    for words in pool.run(2, asked_for_state):
        assert words == [
            f"GPT was asked for its state_dict, {held}: take step.full_state_dict()",
            f"blocks.0 (Block) was asked for its state_dict, {held}: take step.full_state_dict()",
            f"GPT was to load a state_dict, {held}: load it before compile",
            "GPT was asked for its state_dict, but the step that held its weights is closed: take "
            "step.full_state_dict() before close(), and load it into a model of your own",
        ]


def synced(comm: Comm, sync: bool) -> list[float]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    with torch.no_grad():
        for tensor in (*model.parameters(), model[1].running_mean):
            tensor.fill_(comm.rank + 1)
    step = zplan.compile(
        model,
        lambda model, batch: model(batch).square().mean(),
        torch.ones(2, 4),
        optimizer=torch.optim.SGD,
        group=comm.group,
        sync=sync,
        stage=0,
    )
    with step.whole_parameters() as model:
        return [model[0].weight.mean().item(), model[1].running_mean.mean().item()]


def test_ranks_start_as_rank_0_unless_told_otherwise(pool) -> None:
    assert pool.run(2, synced, True) == [[1.0, 1.0], [1.0, 1.0]]
    assert pool.run(2, synced, False) == [[1.0, 1.0], [2.0, 2.0]]


def test_a_world_of_one_has_no_group_and_no_collective() -> None:
    torch.manual_seed(0)
    comm = Comm(None)
    step = compiled(comm, "odd", stage=3)
    collectives = Collectives(step.plan.program)
    with collectives, step:
        step(CASES["odd"].batch(0))
    assert collectives.calls == []
    assert all(bucket.whole_at_rest for bucket in step.plan.ownership.buckets)


def buffers(comm: Comm) -> None:
    """A forward inside of `whole_parameters` may put a new tensor in a buffer's place; steps go on from its values."""
    case = CASES["odd"]
    step = compiled(comm, "odd", stage=3)
    step(case.batch(0))
    with step.whole_parameters() as model:
        before = model.average.clone()
        model(case.batch(1)[0])
        assert not torch.equal(model.average, before)
    between = {name: tensor.clone() for name, tensor in step.full_state_dict().items()}
    assert torch.equal(between["average"], model.average)
    step(case.batch(2))
    after = step.full_state_dict()
    for name in ("average", "calls", "norm.running_mean"):
        assert not torch.equal(after[name], between[name]), name
        assert torch.equal(after[name], dict(model.named_buffers())[name]), name
    assert after["calls"] == 3


def test_buffers_live_on_through_whole_parameters(pool) -> None:
    pool.run(1, buffers)


def test_nothing_is_held_by_the_caller() -> None:
    """The list that a step is handed comes back empty, and a batch can be let go while its step still runs."""
    case = CASES["gpt"]
    step = compiled(Comm(None), "gpt", stage=3)
    values = {**step.residents(), **bind(step.trace, case.batch(0))}
    residents = [values[name] for name in inputs(step.plan.program)]
    assert len(residents) > 10
    step.module(residents)
    assert residents == []


def peaks(comm: Comm, stage: int) -> tuple[int, int]:
    case = CASES["gpt"]
    step = compiled(comm, "gpt", stage=stage, bucket=40_000)
    step(case.batch(0))
    found = measure(step, case.batch(0))
    assert found.resident_bytes == step.plan.memory.resident_bytes
    return step.plan.memory.peak_bytes, found.peak_bytes


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_predicted_peak_is_the_measured_one(pool, stage: int) -> None:
    """Within 2 %: a tensor of a few bytes inside an optimizer or a profiler is not counted."""
    for predicted, measured in pool.run(2, peaks, stage):
        assert predicted == pytest.approx(measured, rel=0.02)


def one_leaves(comm: Comm) -> str:
    """What gloo raises at a wait when a peer is gone, raised at the fourth wait."""
    case = CASES["gpt"]
    step = compiled(comm, "gpt", stage=3, bucket=4_000)
    step(case.batch(0))
    graph = step.module.graph
    wait = [node for node in graph.nodes if node.target is c10d.wait_tensor.default][3]
    wait.target = fail
    step.module.recompile()
    return words_of_two_steps(step, case.batch(0))


def words_of_two_steps(step: zplan.TrainStep, batch: object) -> str:
    words = []
    for _ in range(2):
        try:
            step(batch)
        except zplan.ZplanError as error:
            words.append(f"{type(error).__name__}: {error}")
    return "\n".join(words)


def fail(*_: object) -> None:
    raise RuntimeError("Connection closed by peer")


def test_a_failing_step_names_its_instruction_and_takes_no_more(pool) -> None:
    words = pool.run(1, one_leaves_alone)[0]
    first, second = words.splitlines()
    assert first.startswith("StepError: instruction ")
    assert "forward of blocks.0.up, models.py:" in first
    assert "aten.addmm.default failed: RuntimeError: out of luck" in first
    assert second.startswith("StateError: step: an earlier step failed, and what it left may be torn: instruction ")


def one_leaves_alone(comm: Comm) -> str:
    case = CASES["gpt"]
    step = compiled(comm, "gpt", stage=3)
    program = step.plan.program
    op = next(op for op in program.graph.ops if op.module == "blocks.0.up" and op.target == "aten.addmm.default")
    index = program.instructions.index(Run(op.name))
    node = next(node for node in step.module.graph.nodes if node.meta.get(INSTRUCTION) == index)
    node.target = unlucky
    step.module.recompile()
    return words_of_two_steps(step, case.batch(0))


def unlucky(*_: object) -> None:
    raise RuntimeError("out of luck")


def test_a_lost_rank_is_told_by_the_collective(pool) -> None:
    for words in pool.run(2, one_leaves):
        first = words.splitlines()[0]
        assert first.startswith("StepError: instruction ")
        assert "the wait for gather 3 of bucket b3 failed: RuntimeError: Connection closed by peer" in first
        assert "another rank has ended or hangs: look at its own error" in first
