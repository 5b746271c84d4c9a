"""The command line, as people start it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.saves import assert_same_save
from zplan.cli import main

ROOT = Path(__file__).parents[2]
JOBS = "tests/jobs.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def call(*words: str, ranks: int = 0) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *launcher, "-m", "zplan", *words]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)


def inside(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    """In this process, where a command of its own would tell no more: its exit code and what it printed."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return ended.value.code, *capsys.readouterr()


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


def saved(folder: Path, name: str, *words: str) -> Path:
    path = folder / name
    found = call("plan", f"{JOBS}:tiny", "--world", "4", *words, "-o", str(path))
    assert found.returncode == 0, found.stderr
    assert f"saved to {path}" in found.stderr
    return path


def test_plan_compare_schedule_diff_and_run_go_together(tmp_path: Path) -> None:
    three = saved(tmp_path, "three.json", "--stage", "3", "--rule", "0.*=0")
    auto = saved(tmp_path, "auto.json", "--memory", "1MB")
    printed = call("schedule", str(three)).stdout
    assert "rule 1: 0.*" in printed
    assert "world=4 stage=mixed position=only" in printed
    same, differs = call("diff", str(three), str(three)), call("diff", str(auto), str(three))
    assert (same.returncode, same.stdout) == (0, "the plans are the same\n")
    assert differs.returncode == 1
    assert "stage: auto -> 3" in differs.stdout
    as_json = json.loads(call("diff", str(auto), str(three), "--json").stdout)
    assert {"what": "stage", "before": "auto", "after": "3"} in as_json["asked"]
    found = call("schedule", str(three), "--stage", "1")
    assert "stage: " in found.stderr
    assert "is a plan and says that already" in found.stderr


def test_a_saved_plan_is_run(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert call("plan", f"{JOBS}:tiny", "--world", "2", "--stage", "2", "-o", str(path)).returncode == 0
    found = call("run", f"{JOBS}:tiny", "--plan", str(path), "--strict", "--steps", "2", "--json", ranks=2)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["plan"] == json.loads(path.read_text())["hash"]
    other = call("run", f"{JOBS}:tiny", "--plan", str(path), "--steps", "2")
    assert other.returncode == 1
    assert "is for 2 ranks, and there are 1" in other.stderr


def test_compare_says_which_stage_fits() -> None:
    text = call("compare", f"{JOBS}:tiny", "--world", "4", "--memory", "18KB")
    assert text.returncode == 0, text.stderr
    assert "predicted time  not modelled yet" in text.stdout
    assert "because: stage" in text.stdout
    found = json.loads(call("compare", f"{JOBS}:tiny", "--world", "4", "--memory", "18KB", "--json").stdout)
    assert [each["stage"] for each in found["stages"]] == [0, 1, 2, 3]
    fits = [each["stage"] for each in found["stages"] if each["fits"]]
    assert found["chosen"] == (fits[0] if fits else None)


def test_plan_as_json_and_by_a_spec_file(tmp_path: Path) -> None:
    file = tmp_path / "spec.toml"
    file.write_text('world_size = 8\nstage = 2\n[[rules]]\npattern = "2.*"\nstage = 1\n')
    found = json.loads(call("plan", f"{JOBS}:tiny", "--spec", str(file), "--stage", "3", "--json").stdout)
    assert (found["world"], found["stage"], found["seconds"]) == (8, 3, None)
    assert [each["stage"] for each in found["tensors"]] == [3, 3, 1, 1]
    assert found["tensors"][2]["because"] == "rule 1: 2.*"


def test_a_config_of_transformers_is_planned(tmp_path: Path) -> None:
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = call("plan", "--hf", str(tmp_path), "--batch", "2", "--seq", "16", "--world", "8", "--gpu", "l4")
    assert found.returncode == 0, found.stderr
    assert "device=cuda (traced on cpu)" in found.stdout
    assert "note: traced on a CPU for CUDA" in found.stdout
    assert "forward " in found.stderr, "seconds by phase"


def test_estimate_prints_the_papers_numbers() -> None:
    found = call("estimate", "--params", "7.5e9", "--world", "64", "--memory", "32GB")
    assert found.returncode == 0, found.stderr
    for number in ("120.00", "31.41", "16.64", "1.88"):
        assert number in found.stdout
    stages = json.loads(call("estimate", "--params", "7.5B", "--world", "64", "--json").stdout)
    assert "7500000000" in json.dumps(stages)


def test_shell_completion_is_there() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "zplan"],
        cwd=ROOT,
        env={**ENVIRONMENT, "_ZPLAN_COMPLETE": "complete_bash", "COMP_WORDS": "zplan sch", "COMP_CWORD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.stdout.split() == ["schedule"]


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
        (["plan"], "SpecError: what is to be planned? give FILE.py:JOB"),
        (
            ["plan", f"{JOBS}:tiny", "--hf", "there"],
            "SpecError: tests/jobs.py:tiny and --hf there: give one",
        ),
        (["plan", f"{JOBS}:tiny", "--rule", "0.*"], "SpecError: --rule '0.*' is no PATTERN=STAGE"),
        (["plan", f"{JOBS}:tiny", "--rule", "9.*=1"], "SpecError: rule 1 '9.*' matches no parameter"),
        (["plan", f"{JOBS}:tiny", "--gpu", "h10"], "SpecError: no GPU is known as 'h10'; nearest: h100"),
        (["plan", f"{JOBS}:tiny", "--memory", "1KB"], "BudgetError: no stage fits: "),
        (["plan", f"{JOBS}:tiny", "--spec", "none.toml"], "SpecError: none.toml cannot be read"),
        (["diff", "a.json", "b.json"], "SpecError: plan file a.json cannot be read"),
        (["estimate", "--params", "many"], "SpecError: params 'many'"),
        (["run", f"{JOBS}:tiny", "--resume"], "SpecError: --resume is about a save: give --save DIR too"),
        (["run", f"{JOBS}:no_batches", "--stage", "1"], "SpecError: tests/jobs.py:no_batches has no batches"),
        (["run", f"{JOBS}:no_optimizer", "--stage", "1"], "SpecError: tests/jobs.py:no_optimizer has no optimizer"),
    ],
)
def test_errors_name_the_users_own_thing(monkeypatch, capsys, words: list[str], message: str) -> None:
    code, out, err = inside(monkeypatch, capsys, *words)
    assert code == 1
    assert message in err
    assert "Traceback" not in err
    assert out == ""


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


def test_run_takes_several_batches_for_one_step() -> None:
    found = call("run", f"{JOBS}:tiny", "--stage", "3", "--steps", "9", "--micro-batches", "4", ranks=2)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("5 steps on 2 ranks")
    assert "batches ended after 5 of 9 steps" in found.stderr
    few = call("run", f"{JOBS}:tiny", "--stage", "1", "--micro-batches", "21")
    assert few.returncode == 1
    assert "tests/jobs.py:tiny has fewer batches than the 21 of one step" in few.stderr


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


def test_a_run_is_saved_and_goes_on_from_there_at_another_stage(monkeypatch, capsys, tmp_path: Path) -> None:
    words = ["run", f"{JOBS}:tiny", "--micro-batches", "2", "--json"]
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    never = call(*words, "--stage", "2", "--steps", "6", "--save", whole, ranks=2)
    assert f"saved step 6 to {whole}" in never.stderr
    one = call(*words, "--stage", "2", "--steps", "3", "--save", parts, "--save-every", "2", "--resume", ranks=2)
    assert "going on" not in one.stderr
    two = call(*words, "--stage", "3", "--steps", "6", "--save", parts, "--resume", ranks=2)
    assert f"going on after step 3 of {parts}" in two.stderr
    ends = [json.loads(each.stdout) for each in (never, two)]
    assert [end["steps"] for end in ends] == [6, 6]
    assert ends[0]["last_loss"] == ends[1]["last_loss"]
    assert_same_save(Path(whole), Path(parts))
    _, _, refused = inside(monkeypatch, capsys, *words, "--steps", "6", "--save", parts, "--resume")
    assert f"{parts} has 6 steps already: --steps 6 leaves nothing to do" in refused
