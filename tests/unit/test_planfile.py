import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

import zplan
from tests.graphs import Layer, chain_graph
from tests.strategies import Case, cases
from zplan.errors import SpecError
from zplan.planner import auto, planfile
from zplan.planner.choices import Choice
from zplan.planner.plan import Plan
from zplan.planner.program import Instruction, Position
from zplan.planner.spec import Rule, make_spec

GRAPH = chain_graph([Layer(), Layer(dtype="bf16"), Layer(frozen=True), Layer(random=True, tied=0)], buffer=True)


def made(**options: Any) -> Plan:
    rules = (Rule("layers.1.*", stage=1, bucket="1KB"),)
    return auto.decide(
        GRAPH, make_spec(**{"world_size": 3, "bucket": 1024, "memory": "1MB", "rules": rules, **options})
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    made().save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def same(one: Plan, two: Plan) -> None:
    assert one == two
    assert one.hash == two.hash
    assert (one.program.hash, one.graph.hash) == (two.program.hash, two.graph.hash)
    assert str(one) == str(two)
    assert one.schedule.text(ops=True) == two.schedule.text(ops=True)
    assert (one.memory.timeline, one.memory.peaks) == (two.memory.timeline, two.memory.peaks)


@pytest.mark.parametrize("stage", ["auto", 0, 1, 2, 3])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_plan_reads_back_as_the_very_same(tmp_path: Path, stage: Any, device: str) -> None:
    plan = made(stage=stage, device=device)
    plan.save(tmp_path / "plan.json")
    same(zplan.load_plan(str(tmp_path / "plan.json")), plan)


@settings(deadline=None, max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_any_plan_reads_back_as_the_very_same(tmp_path_factory: pytest.TempPathFactory, case: Case) -> None:
    spec = make_spec(stage=0, world_size=case.ownership.world, device="cuda" if case.native else "cpu")
    choices = {slot.tensor: Choice(bucket.stage, "drawn") for bucket in case.ownership.buckets for slot in bucket.slots}
    plan = Plan(case.graph, spec, 0, choices, case.ownership, (case.lower(),))
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan.save(path)
    same(zplan.load_plan(path), plan)


def test_saving_again_writes_the_same_bytes(saved: Path) -> None:
    before = saved.read_bytes()
    zplan.load_plan(saved).save(saved)
    assert saved.read_bytes() == before


def test_every_instruction_has_a_tag() -> None:
    assert set(planfile.TAGS.values()) == set(Instruction.__args__)


def test_programs_of_micro_batches_read_back(tmp_path: Path) -> None:
    plan = made(stage=2, micro_batches=3)
    plan.save(tmp_path / "plan.json")
    positions = [program.position for program in zplan.load_plan(tmp_path / "plan.json").programs]
    assert positions == [Position.FIRST, Position.MIDDLE, Position.LAST]


def refused(path: Path) -> str:
    with pytest.raises(SpecError) as caught:
        zplan.load_plan(path)
    words = str(caught.value)
    assert words.startswith(f"plan file {path} ")
    return words.removeprefix(f"plan file {path} ")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert refused(tmp_path / "none.json") == "cannot be read: No such file or directory"


@pytest.mark.parametrize("keep", [1, 100, 2000, -1])
def test_a_truncated_file_is_refused(saved: Path, keep: int) -> None:
    saved.write_bytes(saved.read_bytes()[:keep])
    words = refused(saved)
    assert words.startswith("is cut short or damaged at character " if keep != 1 else "is no JSON: zplan did not")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is no JSON: zplan did not write it"),
        (b"\x80\x02}q\x00.", "is no text: zplan did not write it"),
        (b"hello", "is no JSON: zplan did not write it"),
        (b"[]", "is JSON, but no plan of zplan (it has no format 'zplan plan')"),
        (b'{"model_type": "llama"}', "is JSON, but no plan of zplan"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    assert refused(path).startswith(words)


def edited(path: Path, edit: Any, *, seal: bool = False) -> None:
    """Changes a saved plan; `seal`: as one would who knows the checksum."""
    content = json.loads(path.read_text())
    edit(content)
    if seal:
        content.pop("sha256", None)
        content["sha256"] = planfile._sha256(content)
    path.write_text(json.dumps(content))


def test_another_version_is_refused_by_name(saved: Path) -> None:
    edited(saved, lambda content: content.update(version=2, zplan="9.0"))
    assert refused(saved) == "is of version 2, and this zplan (0.1.0) reads version 1: it was written by zplan 9.0"


@pytest.mark.parametrize(
    "edit",
    [
        lambda content: content["decisions"]["spec"].update(memory=1),
        lambda content: content["programs"][0]["instructions"].pop(),
        lambda content: content["graph"]["ops"][0].update(line="elsewhere.py:1"),
        lambda content: content.update(extra=1),
        lambda content: content.pop("sha256"),
        lambda content: content.update(hash="0" * 16),
    ],
)
def test_a_tampered_file_is_refused(saved: Path, edit: Any) -> None:
    edited(saved, edit)
    assert refused(saved).startswith("was changed after it was written: its checksum does not match\ntry: plan again")


def drop_a_wait(content: dict[str, Any]) -> None:
    instructions = content["programs"][0]["instructions"]
    instructions.remove(next(each for each in instructions if each[0] == "wait"))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (drop_a_wait, "holds a program that breaks a law: law "),
        (lambda content: content.update(extra=1), "does not hold a plan: extra: "),
        (lambda content: content["decisions"]["spec"].update(stage=9), "does not hold a plan: "),
        (lambda content: content["programs"][0]["instructions"].append(["jump", 1]), "does not hold a plan: "),
        (lambda content: content["programs"][0]["instructions"].append([]), "does not hold a plan: "),
        (lambda content: content["programs"][0]["instructions"].append(["free"]), "does not hold a plan: "),
        (
            lambda content: content["programs"][0]["instructions"].append(["run", "nothing"]),
            "holds a program that breaks",
        ),
        (lambda content: content["decisions"]["buckets"].pop(), "holds a program that breaks"),
        (lambda content: content["decisions"]["buckets"][0].update(part="x"), "does not hold a plan: "),
        (lambda content: content["graph"].pop("ops"), "does not hold a plan: "),
        (lambda content: content["graph"]["ops"][0].update(phase="sideways"), "does not hold a plan: "),
        (lambda content: content.update(hash="0" * 16), "was written by zplan 0.1.0, and this is 0.1.0: its plan"),
    ],
)
def test_what_has_a_right_checksum_is_still_checked(saved: Path, edit: Any, words: str) -> None:
    edited(saved, edit, seal=True)
    assert refused(saved).startswith(words)


def test_a_plan_appears_whole_or_not_at_all(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(SpecError, match=r"plan\.json cannot be written: No space left on device"):
        made(stage=1).save(saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"none/plan\.json cannot be written: No such file or directory"):
        made().save(tmp_path / "none" / "plan.json")
