"""On one CUDA device: a step in a world of one, and the programs that NCCL would run.

make gpu        or, with a torch of your own:  python -m pytest -m gpu tests/gpu
"""

import functools

import pytest
import torch

import zplan
from tests import models
from zplan.planner.program import AllReduce, Gather, GatherGradient, ReduceScatter

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
ADAMW = functools.partial(torch.optim.AdamW, lr=3e-3, foreach=False)


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def gpt() -> models.GPT:
    torch.manual_seed(0)
    return models.GPT(vocab=64, width=64, layers=2, heads=4, context=32).cuda()


def batch(model: models.GPT, seed: int) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in model.make_batch(seed).items()}


def test_a_step_equals_eager_bit_for_bit() -> None:
    eager, compiled = gpt(), gpt()
    optimizer = ADAMW(eager.parameters())
    with zplan.compile(compiled, compiled.loss_fn, batch(eager, 0), optimizer=ADAMW, stage=3) as step:
        for i in range(4):
            loss = eager.loss_fn(eager, batch(eager, i))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(step(batch(eager, i)), loss.detach())
        found = step.full_state_dict()
    for name, tensor in eager.state_dict().items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages_on_nccl_equal_eager(tmp_path, stage: int) -> None:
    """One device is a world of one; the group is real, and so is the way through NCCL's set-up."""
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        model, eager = gpt(), gpt()
        optimizer = ADAMW(eager.parameters())
        step = zplan.compile(model, model.loss_fn, batch(eager, 0), optimizer=ADAMW, stage=stage)
        for i in range(3):
            loss = eager.loss_fn(eager, batch(eager, i))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(step(batch(eager, i)), loss.detach())
        step.close()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_plan_for_cuda_reduces_natively(stage: int) -> None:
    model = gpt()
    plan = zplan.plan(model, model.loss_fn, batch(model, 0), optimizer=ADAMW, stage=stage, world_size=64)
    kinds = {type(instruction) for instruction in plan.program.instructions}
    assert plan.graph.device == "cuda"
    assert GatherGradient not in kinds
    assert (AllReduce in kinds) == (stage == 0)
    assert (ReduceScatter in kinds) == (Gather in kinds) == (stage > 0)


def test_bf16_over_fp32_masters_equals_a_loop_by_hand() -> None:
    masters, low, compiled = gpt(), gpt().bfloat16(), gpt()
    optimizer = ADAMW(masters.parameters())
    with zplan.compile(compiled, compiled.loss_fn, batch(low, 0), optimizer=ADAMW, stage=3, precision="bf16") as step:
        for i in range(4):
            for held, computes in zip(masters.parameters(), low.parameters(), strict=True):
                computes.data.copy_(held.data)
            loss = low.loss_fn(low, batch(low, i))
            loss.backward()
            for held, computes in zip(masters.parameters(), low.parameters(), strict=True):
                held.grad, computes.grad = computes.grad.float(), None
            optimizer.step()
            assert torch.equal(step(batch(low, i)), loss.detach())
        found = step.full_state_dict()
    for name, tensor in masters.state_dict().items():
        assert torch.equal(found[name], tensor), name


def test_fp16_scales_its_loss_and_skips_what_overflows() -> None:
    model = gpt()
    precision = zplan.Precision(compute="fp16", loss_scale=2.0**40)
    with zplan.compile(model, model.loss_fn, batch(model, 0), optimizer=ADAMW, precision=precision, clip=1.0) as step:
        before = step.full_state_dict()
        step(batch(model, 0))
        assert step.skipped
        assert step.loss_scale == 2.0**39
        assert all(torch.equal(before[name], tensor) for name, tensor in step.full_state_dict().items())
        losses = [step(batch(model, 0)).item() for _ in range(60)]
        assert not step.skipped
        assert losses[-1] < losses[0]


def test_a_save_is_loaded_at_another_stage_and_goes_on_with_the_same_bits(tmp_path) -> None:
    one, two = gpt(), gpt()
    with (
        zplan.compile(one, one.loss_fn, batch(one, 0), optimizer=ADAMW, stage=1, micro_batches=2) as step,
        zplan.compile(two, two.loss_fn, batch(two, 0), optimizer=ADAMW, stage=0, micro_batches=2) as other,
    ):
        step(batch(one, 0), batch(one, 1))
        step.save(tmp_path / "save", extra={"next": 2})
        assert other.load(tmp_path / "save") == {"next": 2}
        torch.manual_seed(7)
        expected = step(batch(one, 2), batch(one, 3))
        torch.manual_seed(7)
        assert torch.equal(other(batch(one, 2), batch(one, 3)), expected)
        found, weights = other.full_state_dict(), step.full_state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
