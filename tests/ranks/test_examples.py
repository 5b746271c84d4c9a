"""The examples, at small size, as people start them."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import zplan
from zplan.jobs import first, load_job

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160", "PYTHONPATH": str(ROOT)}
SMALL = ["--width", "32", "--layers", "1", "--evaluate-every", "3"]


def start(name: str, *words: str, ranks: int = 2) -> str:
    """Runs an example and returns what it printed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *launcher, str(EXAMPLES / name), *words]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an example finds when it is started: the folder it is in."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.mark.parametrize("name", ["gpt_text", "train_gpt", "digits", "causal_lm"])
def test_every_example_is_a_job_that_can_be_planned(beside: None, name: str) -> None:
    work = load_job(f"{EXAMPLES / name}.py:job")
    plan = zplan.plan(
        work.model, work.loss_fn, first(work.batches, 0, 2), optimizer=work.optimizer, world_size=2, stage=2
    )
    assert plan.spec.world_size == 2
    assert "reduce-scatter" in str(plan.schedule)


def saved(path: Path) -> tuple[dict[str, torch.Tensor], list[Any], int]:
    """Whole weights and the optimizer's states of a save of train_gpt.py, read by one rank, and its steps."""
    train_gpt = importlib.import_module("train_gpt")
    work = train_gpt.job(width=32, layers=1)
    batch = first(work.batches, 0, 1)
    before = torch.get_rng_state()
    with zplan.compile(
        work.model, work.loss_fn, batch, optimizer=work.optimizer, stage=0, micro_batches=4, precision="bf16", clip=1.0
    ) as step:
        step.load(path, scheduler=())
        torch.set_rng_state(before)
        states = [step.optimizer.state[p] for group in step.optimizer.param_groups for p in group["params"]]
        return step.full_state_dict(), states, step.steps


@pytest.mark.parametrize(
    ("one", "other"), [(2, 3), pytest.param(3, 3, marks=pytest.mark.slow), pytest.param(1, 0, marks=pytest.mark.slow)]
)
def test_training_that_was_stopped_goes_on_bit_for_bit_also_at_another_stage(beside, tmp_path, one, other) -> None:
    words = [*SMALL, "--steps", "7", "--save-every", "2"]
    never = start("train_gpt.py", *words, "--stage", str(one), "--save", str(tmp_path / "never"))
    first_part = start(
        "train_gpt.py", *words, "--stage", str(one), "--save", str(tmp_path / "parts"), "--stop-after", "3"
    )
    second_part = start("train_gpt.py", *words, "--stage", str(other), "--save", str(tmp_path / "parts"))
    assert "going on after step 3" in second_part
    evaluated = [re.findall(r"step \d+: loss .*", text) for text in (never, first_part, second_part)]
    assert len(evaluated[0]) == 3
    assert evaluated[0] == evaluated[1] + evaluated[2]
    weights, states, steps = saved(tmp_path / "never")
    weights_2, states_2, steps_2 = saved(tmp_path / "parts")
    assert steps == steps_2 == 7
    torch.testing.assert_close(weights_2, weights, rtol=0, atol=0)
    torch.testing.assert_close(states_2, states, rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_digits_are_read(precision: str) -> None:
    text = start("digits.py", "--steps", "60", "--stage", "3", "--precision", precision)
    found = re.search(r"([\d.]+)% of the test images are read rightly", text)
    assert found is not None, text
    assert float(found[1]) > 90


def test_a_causal_model_comes_back_to_transformers_with_the_same_loss(tmp_path) -> None:
    text = start("causal_lm.py", "--steps", "3", "--memory", "34MB", "--export", str(tmp_path / "lm"))
    assert "auto: stage 1 is the lowest that fits" in text
    again, trained = re.findall(r"loss ([\d.]+), and ([\d.]+) in training", text)[0]
    assert again == trained


@pytest.mark.slow
def test_a_plan_of_any_config_is_printed_without_training(tmp_path) -> None:
    transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=256, n_positions=64).save_pretrained(tmp_path)
    words = ["--plan-only", "--model-config", str(tmp_path), "--stage", "3", "--precision", "bf16"]
    text = start("causal_lm.py", *words, ranks=0)
    assert "precision: computes in bf16" in text
    assert "transformer.wte.weight" in text
    assert "training" not in text
