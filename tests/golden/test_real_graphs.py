"""Printed programs of traced models, before and after each pass, and their plans."""

import functools
from collections import Counter

import pytest
import torch

import zplan
from tests import models
from zplan.graph.ir import OpKind
from zplan.graph.trace import trace
from zplan.planner.check import check
from zplan.planner.lower import lower
from zplan.planner.memory import Memory
from zplan.planner.pipeline import passes
from zplan.planner.program import Run, is_chain
from zplan.planner.show import schedule_text
from zplan.planner.traffic import Traffic

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


def gpt() -> torch.nn.Module:
    torch.manual_seed(0)
    return models.GPT(vocab=64, width=32, layers=2, heads=2, context=8, dropout=0.1)


def odd() -> torch.nn.Module:
    model = models.OddMLP()
    zplan.annotate(model.twice, stage=0)
    zplan.annotate(model.norm, stage=1)
    return model


MODELS = {"gpt": gpt, "odd": odd}


@pytest.mark.parametrize("name", MODELS)
def test_programs_before_and_after_each_pass(golden, name: str) -> None:
    model = MODELS[name]()
    plan = zplan.plan(
        model, model.loss_fn, model.make_batch(0), optimizer=ADAMW, stage=3, world_size=4, bucket="64KB", prefetch=1
    )
    golden(f"real/{name}/plan", f"{plan}\n")
    program = check(lower(plan.graph, plan.ownership))
    steps = [("lower", lambda program: program), *passes(distance=plan.spec.prefetch, depth=plan.spec.depth)]
    for i, (step, run) in enumerate(steps):
        program = check(run(program))
        golden(f"real/{name}/{i}-{step}", schedule_text(program, Memory(program), Traffic(program)) + "\n")
    assert program == plan.program


def test_every_op_of_a_traced_gpt_is_printed(golden) -> None:
    model = models.GPT(vocab=16, width=8, layers=1, heads=2, context=4, dropout=0.1)
    plan = zplan.plan(model, model.loss_fn, model.make_batch(0), optimizer=ADAMW, stage=3, world_size=2)
    golden("real/gpt/ops", plan.schedule.text(ops=True) + "\n")


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_has_the_same_hash_in_every_run(name: str) -> None:
    hashes = set()
    for _ in range(2):
        model = MODELS[name]()
        traced = trace(model, model.loss_fn, model.make_batch(0), optimizer=ADAMW)
        plan = zplan.plan(model, model.loss_fn, model.make_batch(1), optimizer=ADAMW, stage=2, world_size=8)
        assert plan.graph.hash == traced.graph.hash
        hashes.add(plan.hash)
    assert len(hashes) == 1


def test_casts_of_weights_run_in_both_phases() -> None:
    """Under autocast backward reads the bf16 copies that forward made: they are made again."""
    model = gpt()

    def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return models.GPT.loss_fn(model, batch)

    plan = zplan.plan(model, loss_fn, model.make_batch(0), optimizer=ADAMW, stage=3, world_size=2)
    runs = Counter(x.op for x in plan.program.instructions if isinstance(x, Run))
    casts = [op for op in plan.graph.ops if op.kind is OpKind.CAST and is_chain(plan.graph, op)]
    twice = {op.module for op in casts if runs[op.name] == 2}
    assert {f"blocks.{i}.{name}" for i in range(2) for name in ("qkv", "out", "up", "down")} <= twice
    assert all(runs[op.name] == 1 for op in plan.graph.ops if not is_chain(plan.graph, op))
