"""Clipping over shards, and steps that all ranks skip."""

import copy
import functools

import pytest
import torch

import zplan
from tests.ranks.training import CASES, STEPS, build, mean_gradient, seed
from zplan.runtime.comm import Comm

# Not AdamW: it divides gradients by their own size, and with it what the last bits of the scale are.
SGD = functools.partial(torch.optim.SGD, lr=0.05)


def clipped(comm: Comm, name: str, clip: float, options: dict) -> tuple[list[float], dict[str, torch.Tensor]]:
    case = CASES[name]
    step = zplan.compile(
        build(case), case.loss_fn, case.batch(0), optimizer=SGD, group=comm.group, clip=clip, **options
    )
    norms = []
    for i in range(STEPS):
        torch.manual_seed(seed(i, comm.rank))
        step(case.batch(seed(i, comm.rank)))
        norms.append(step.grad_norm.item())
        assert not step.skipped
    return norms, step.full_state_dict()


def unsharded(name: str, world: int, clip: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    case = CASES[name]
    torch.set_num_threads(1)
    replicas = [build(case)]
    replicas += [copy.deepcopy(replicas[0]) for _ in range(world - 1)]
    optimizers = [SGD([(n, p) for n, p in r.named_parameters() if p.requires_grad]) for r in replicas]
    norms = []
    for i in range(STEPS):
        for rank, replica in enumerate(replicas):
            torch.manual_seed(seed(i, rank))
            case.loss_fn(replica, case.batch(seed(i, rank))).backward()
        for shared in zip(*(r.parameters() for r in replicas), strict=True):
            average = mean_gradient([p.grad for p in shared])
            for parameter in shared:
                parameter.grad = None if average is None else average.clone()
        exact = torch.stack([p.grad.double().norm() for p in replicas[0].parameters() if p.grad is not None]).norm()
        norms.append(exact.item())
        for replica, optimizer in zip(replicas, optimizers, strict=True):
            norm = torch.nn.utils.clip_grad_norm_(replica.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        # torch takes the norm of a bf16 gradient in bf16.
        narrow = any(p.dtype is torch.bfloat16 for p in replicas[0].parameters())
        assert norm.item() == pytest.approx(exact.item(), rel=2e-3 if narrow else 1e-5)
    return norms, dict(replicas[0].state_dict())


@pytest.mark.parametrize("clip", [1.0, 0.01, float("inf")])
@pytest.mark.parametrize(("name", "world", "stage"), [("gpt", 2, 0), ("gpt", 3, 3), ("odd", 3, 2), ("odd mixed", 2, 3)])
def test_deepspeed_5150_pytorch_170862_clipping_over_shards_is_clip_grad_norm(pool, name, world, stage, clip) -> None:
    """Within 1e-5 of torch's where gradients are fp32; tied parameters (gpt's head) counted once."""
    options = {"stage": stage, "bucket": 4_000}
    norms, tensors = unsharded(name, world, clip)
    for found, state in pool.run(world, clipped, name, clip, options):
        assert found[0] == pytest.approx(norms[0], rel=1e-5)
        # Later ones are of weights that torch's rounded scale has moved.
        assert found == pytest.approx(norms, rel=5e-3 if "odd" in name else 1e-5)
        for key, tensor in tensors.items():
            # What torch rounds in its norm is in its scale: 16 bit may round to a neighbour.
            near = 2**-7 if tensor.dtype is torch.bfloat16 or "odd" in name else 1e-5
            assert torch.allclose(state[key], tensor, rtol=near, atol=near / 10), key


def test_every_rank_and_stage_measures_the_same_norm(pool) -> None:
    runs = [pool.run(3, clipped, "gpt", 0.1, {"stage": stage, "bucket": 64_000}) for stage in range(4)]
    norms = [found for run in runs for found, _ in run]
    assert all(found == pytest.approx(norms[0], rel=1e-9) for found in norms)
    for run in runs:
        assert len({tuple(norms) for norms, _ in run}) == 1, "on all ranks the same bits"


def exploding(comm: Comm, skip: bool, stage: int) -> tuple[list[bool], list[bool], bool]:
    """The second step's gradients are infinite on rank 1 alone."""
    case = CASES["plain"]

    def loss_fn(model: torch.nn.Module, batch: tuple) -> torch.Tensor:
        *inner, factor = batch
        return case.loss_fn(model, inner[0]) * factor

    step = zplan.compile(
        build(case),
        loss_fn,
        (case.batch(0), torch.tensor(1.0)),
        optimizer=case.optimizer,
        group=comm.group,
        stage=stage,
        skip_nonfinite=skip,
    )
    skipped, unchanged = [], []
    for i in range(3):
        before = step.full_state_dict()
        bad = i == 1 and comm.rank == 1
        step((case.batch(seed(i, comm.rank)), torch.tensor(float("inf") if bad else 1.0)))
        after = step.full_state_dict()
        skipped.append(step.skipped)
        unchanged.append(all(torch.equal(before[name], after[name]) for name in before))
    return skipped, unchanged, all(tensor.isfinite().all() for tensor in after.values())


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_all_ranks_skip_a_step_whose_gradients_are_not_finite(pool, stage: int) -> None:
    for skipped, unchanged, finite in pool.run(2, exploding, True, stage):
        assert skipped == unchanged == [False, True, False]
        assert finite
    for skipped, _, finite in pool.run(2, exploding, False, stage):
        assert skipped == [False] * 3
        assert not finite


def words(comm: Comm) -> list[str]:
    case = CASES["plain"]
    found = []

    def made(**options) -> zplan.TrainStep:
        return zplan.compile(
            build(case), case.loss_fn, case.batch(0), optimizer=case.optimizer, group=comm.group, **options
        )

    def differs() -> None:
        made(clip=1.0 + comm.rank)

    def asked(**options):
        return lambda: made(**options).grad_norm

    for what in (lambda: made(clip=0.0), lambda: made(clip=float("nan")), differs, asked(), asked(clip=1.0)):
        try:
            what()
        except zplan.ZplanError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_words(pool) -> None:
    one, two = pool.run(2, words)
    assert one == two
    assert one[0] == "SpecError: clip 0.0 is no norm: give a number above zero"
    assert one[1] == "SpecError: clip nan is no norm: give a number above zero"
    assert one[2].startswith("AgreementError: the ranks hold different plans")
    assert "norm=1.0" in one[2]
    assert "norm=2.0" in one[2]
    assert one[3] == "StateError: grad_norm: it is measured where clip= is given"
    assert one[4] == "StateError: grad_norm: no step has been made yet"
