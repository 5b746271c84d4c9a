"""The command line, as people start it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JOBS = "tests/jobs.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def call(*words: str, ranks: int = 0) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *launcher, "-m", "zplan", *words]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)


def test_help_shows_an_example() -> None:
    assert "zplan schedule examples/gpt_text.py:job --world 8 --stage 3" in call("schedule", "--help").stdout
    assert "zplan schedule examples/gpt_text.py:job" in call("--help").stdout
    example = " ".join(call("run", "--help").stdout.split())
    assert "torchrun --standalone --nproc-per-node 2 -m zplan run examples/gpt_text.py:job --stage 2" in example


def test_schedule_prints_plan_and_schedule() -> None:
    found = call("schedule", f"{JOBS}:tiny", "--world", "8", "--stage", "3")
    assert found.returncode == 0
    assert "traced and planned in" in found.stderr
    assert found.stdout.startswith("plan ")
    assert "world=8 stage=3 position=only" in found.stdout
    assert "reduce-scatter" in found.stdout
    again = call("schedule", f"{JOBS}:tiny", "--world", "8", "--stage", "3", "--ops")
    assert "aten.addmm.default" in again.stdout
    assert again.stdout.splitlines()[0] == found.stdout.splitlines()[0], "the same hash in every run"


def test_schedule_as_json() -> None:
    found = json.loads(call("schedule", f"{JOBS}:tiny", "--world", "4", "--stage", "2", "--json").stdout)
    assert found["world"] == 4
    assert sum(row["sent_bytes"] for row in found["instructions"]) == found["sent_bytes_per_rank"] > 0
    assert max(row["live_bytes"] for row in found["instructions"]) <= found["peak_bytes"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["schedule", "nowhere.py:job", "--stage", "1"], "SpecError: there is no file nowhere.py"),
        (["schedule", JOBS, "--stage", "1"], "SpecError: 'tests/jobs.py' is no FILE.py:JOB"),
        (
            ["schedule", f"{JOBS}:tny", "--stage", "1"],
            "SpecError: tests/jobs.py has no function tny; nearest: tiny; it has loss_fn",
        ),
        (["schedule", f"{JOBS}:unready", "--stage", "1"], "returned a int, and must return a zplan.Job"),
        (["schedule", f"{JOBS}:raises", "--stage", "1"], "RuntimeError: the data set is not there"),
        (["schedule", f"{JOBS}:tiny", "--stage", "4"], "SpecError: stage '4' does not exist"),
        (["schedule", f"{JOBS}:tiny", "--stage", "1", "--bucket", "big"], "SpecError: bucket 'big' is no size"),
        (["schedule", f"{JOBS}:tiny", "--stage", "1", "--world", "0"], "SpecError: world_size 0"),
        (["schedule", f"{JOBS}:item", "--stage", "1"], "jobs.py:"),
        (["run", f"{JOBS}:no_batches", "--stage", "1"], "SpecError: tests/jobs.py:no_batches has no batches"),
        (["run", f"{JOBS}:no_optimizer", "--stage", "1"], "SpecError: tests/jobs.py:no_optimizer has no optimizer"),
    ],
)
def test_errors_name_the_users_own_thing(words: list[str], message: str) -> None:
    found = call(*words)
    assert found.returncode == 1
    assert message in found.stderr
    assert "Traceback" not in found.stderr
    assert found.stdout == ""


def test_traceback_is_shown_when_asked_for() -> None:
    found = call("schedule", f"{JOBS}:raises", "--stage", "1", "--traceback")
    assert found.returncode == 1
    assert "Traceback (most recent call last)" in found.stderr
    assert "the data set is not there" in found.stderr


def test_run_on_two_ranks_and_on_one() -> None:
    two = call("run", f"{JOBS}:tiny", "--stage", "2", "--steps", "5", "--json", ranks=2)
    assert two.returncode == 0, two.stderr
    result = json.loads(two.stdout)
    assert (result["steps"], result["world"]) == (5, 2)
    assert result["last_loss"] < result["first_loss"]
    assert "training" in two.stderr
    one = call("run", f"{JOBS}:tiny", "--stage", "2", "--steps", "30")
    assert one.returncode == 0, one.stderr
    assert one.stdout.startswith("20 steps on 1 rank in")
    assert "batches ended after 20 of 30 steps" in one.stderr


def test_ranks_with_different_models_all_say_so() -> None:
    found = call("run", f"{JOBS}:differs", "--stage", "2", ranks=2)
    assert found.returncode != 0
    assert found.stderr.count("AgreementError: the ranks hold different plans") == 2
    assert "first difference: rank 0 has parameter 0.weight: fp32[16, 8]" in found.stderr


def test_ranks_stop_together_when_one_has_no_more_batches() -> None:
    found = call("run", f"{JOBS}:uneven", "--stage", "1", "--steps", "8", ranks=2)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("5 steps on 2 ranks")
    assert "batches ended after 5 of 8 steps" in found.stderr


def test_a_batch_of_another_shape_ends_all_ranks_with_words() -> None:
    found = call("run", f"{JOBS}:other_shape", "--stage", "2", "--steps", "8", ranks=2)
    assert found.returncode != 0
    assert (
        "SpecError: batch.0 is torch.float32[3, 8] on cpu, but torch.float32[64, 8] on cpu was traced" in found.stderr
    )
    assert "terminate called" not in found.stderr


@pytest.mark.slow
def test_fifty_launches_in_a_row_exit_cleanly() -> None:
    for launch in range(50):
        found = call("run", f"{JOBS}:tiny", "--stage", str(launch % 4), "--steps", "3", ranks=2)
        assert found.returncode == 0, f"launch {launch}: {found.stderr}"
