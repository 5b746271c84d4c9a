"""Saves: written at one layout and loaded at another, real ranks and real files."""

import functools
import os
import pickle
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import zplan
from tests.ranks.saves import (
    LAYOUTS,
    Exact,
    assert_same_save,
    batch,
    contents,
    exact,
    groups,
    same,
    states,
    whole,
    words,
)
from tests.ranks.training import CASES, build, seed
from zplan.runtime.comm import Comm
from zplan.runtime.store import FOLDER, MANIFEST

BEFORE, AFTER = 3, 2


def schedule(step: zplan.TrainStep) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(step.optimizer, lambda i: 1 / (1 + i))


def train(step: zplan.TrainStep, scheduler: Any, first: int, last: int) -> list[torch.Tensor]:
    losses = []
    for i in range(first, last):
        losses.append(step(batch(i)))
        scheduler.step()
    return losses


def saved(comm: Comm, stage: Any, path: str, options: dict[str, Any]) -> tuple[Any, ...]:
    """Trains, saves, and trains on."""
    step = exact(comm, stage, **options)
    scheduler = schedule(step)
    train(step, scheduler, 0, BEFORE)
    step.save(path, scheduler=scheduler, extra={"position": BEFORE})
    at = step.full_state_dict(), states(step)
    losses = train(step, scheduler, BEFORE, BEFORE + AFTER)
    return *at, losses, step.full_state_dict(), states(step), step.plan.ownership


def loaded(comm: Comm, stage: Any, paths: list[str], options: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Loads each save in turn into one step, and trains on."""
    step = exact(comm, stage, **options)
    scheduler = schedule(step)
    step(batch(1))  # so that there is something to be replaced
    found = []
    for path in paths:
        extra = step.load(path, scheduler=scheduler)
        assert (extra, step.steps) == ({"position": BEFORE}, BEFORE)
        at = step.full_state_dict(), states(step)
        losses = train(step, scheduler, BEFORE, BEFORE + AFTER)
        found.append((*at, losses, step.full_state_dict(), states(step), step.plan.ownership))
    return found


def compare(one: list[tuple[Any, ...]], other: list[tuple[Any, ...]]) -> None:
    """What all ranks of two runs returned: weights and moments at the save and at the end, and losses."""
    for (a, _, losses, b, *_), (c, _, expected, d, *_) in [(mine, theirs) for mine in one for theirs in other]:
        same(a, c)
        same(b, d)
        assert all(torch.equal(x, y) for x, y in zip(losses, expected, strict=True))
    for index in (1, 4):
        same(*(whole(run[0][-1], [of_rank[index] for of_rank in run]) for run in (one, other)))


def test_deepspeed_2898_pytorch_65650_what_any_layout_saved_any_other_loads_and_trains_on(pool, tmp_path) -> None:
    """Weights and moments bit for bit, straight after the load and after more steps.

    Exact, because all ranks see one batch and its gradients are integers: see `Exact`.
    """
    runs, paths = {}, {}
    for world, stage in LAYOUTS:
        paths[world, stage] = str(tmp_path / f"{world}-{stage}")
        runs[world, stage] = pool.run(world, saved, stage, paths[world, stage], {"bucket": 600})
    first = runs[LAYOUTS[0]]
    assert "exp_avg of matrix" in whole(first[0][-1], [of_rank[1] for of_rank in first])
    for layout, run in runs.items():
        compare(run, first)
        found = pool.run(*layout[:1], loaded, layout[1], list(paths.values()), {"bucket": 600})
        for i in range(len(paths)):
            compare([of_rank[i] for of_rank in found], run)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"stage": 3, "bucket": 300}, {"stage": 3, "bucket": "1MB"}),
        ({"stage": 3, "bucket": 2000}, {"stage": 0, "rules": (zplan.Rule("*a*", stage=3), zplan.Rule("low", stage=1))}),
        ({"stage": 1, "rules": (zplan.Rule("matrix", stage=3),)}, {"stage": 2, "bucket": 64}),
    ],
    ids=["bucket", "rules", "rules to stage 2"],
)
def test_bucket_size_and_rules_may_be_others(pool, tmp_path, before, after) -> None:
    path = str(tmp_path)
    run = pool.run(3, saved, before.pop("stage"), path, before)
    found = pool.run(4, loaded, after.pop("stage"), [path], after)
    compare([of_rank[0] for of_rank in found], run)


def gpt_run(comm: Comm, path: str, stage: int, resumed: bool, options: dict[str, Any]) -> tuple[Any, ...]:
    """A GPT with dropout on another batch on each rank; generators are seeded once, before the first step."""
    case = CASES["gpt"]
    torch.manual_seed(0)
    step = zplan.compile(
        build(case), case.loss_fn, case.batch(0), optimizer=case.optimizer, group=comm.group, stage=stage, **options
    )
    torch.manual_seed(comm.rank)
    start = 0
    if resumed:
        torch.rand(3)
        start = step.load(path)["batches"]
    losses = []
    for i in range(start, 4):
        if i == 2 and not resumed:
            step.save(path, extra={"batches": i})
        losses.append(step(case.batch(seed(i, comm.rank))))
    return [*losses[-2:], torch.tensor(step.loss_scale)], step.full_state_dict()


# The save falls after two good steps of three: where these are forgotten, the scale at the end is another.
FP16 = zplan.Precision(compute="fp16", loss_scale=64.0, growth_interval=3)


@pytest.mark.parametrize(
    ("world", "stage", "other", "precision"),
    [(2, 3, 1, None), (3, 0, 3, None), (2, 3, 0, "bf16"), (3, 1, 2, "bf16"), (2, 2, 3, FP16)],
)
def test_a_gpt_with_dropout_goes_on_as_if_it_had_never_stopped(pool, tmp_path, world, stage, other, precision) -> None:
    """Random states too; on as many ranks, so that gradients are the same sums."""
    path, asked = str(tmp_path), {"precision": precision}
    run = pool.run(world, gpt_run, path, stage, False, {"bucket": 4_000, **asked})
    found = pool.run(world, gpt_run, path, other, True, {"bucket": 16_000, **asked})
    assert run[0][0][-1] == (128.0 if precision is FP16 else 1.0)
    for (losses, state), (expected, end) in zip(found, run, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
        same(state, end)


def odd_saved(comm: Comm, name: str, path: str, options: dict[str, Any]) -> Any:
    case = CASES[name]
    step = zplan.compile(
        build(case), case.loss_fn, case.batch(0), optimizer=case.optimizer, group=comm.group, **options
    )
    for i in range(2):
        step(case.batch(seed(i, comm.rank)))
    step.save(path)
    return step.full_state_dict()


def odd_loaded(comm: Comm, name: str, path: str, again: str, options: dict[str, Any]) -> Any:
    case = CASES[name]
    model = build(case)
    step = zplan.compile(model, case.loss_fn, case.batch(0), optimizer=case.optimizer, group=comm.group, **options)
    step.load(path)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    step.save(again)
    return step.full_state_dict(), buffers


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_load_and_a_save_give_the_same_save_and_every_rank_the_buffers_of_the_first(pool, tmp_path, world) -> None:
    """BatchNorm, tied, frozen, unused, 0-dim, 16 bit, nothing at all; stages mixed before, other ones after."""
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    expected = pool.run(3, odd_saved, "odd mixed", one, {"stage": 3, "bucket": 400})[0]
    for state, buffers in pool.run(world, odd_loaded, "odd", one, two, {"stage": 2, "bucket": 200}):
        same(state, expected)
        for name, buffer in buffers.items():
            assert torch.equal(buffer, expected[name]), name
        assert buffers["norm.running_mean"].abs().sum() > 0
    # Ranks that the save does not know have random states of their own.
    assert_same_save(one, two, without=("rng/",))
    states = [contents(two)[1][f"rng/cpu/{rank}"] for rank in range(world)]
    first = contents(one)[1]
    for rank, state in enumerate(states):
        if rank < 3:
            assert torch.equal(state, first[f"rng/cpu/{rank}"])
        else:
            assert not any(torch.equal(state, other) for other in states[:rank])


def test_deepspeed_3824_tied_weights_come_back_under_both_names_and_tied(pool, tmp_path) -> None:
    path = str(tmp_path)
    expected = pool.run(2, odd_saved, "gpt", path, {"stage": 3})[0]
    manifest, tensors = contents(path)
    assert manifest.contents.parameters["embed.weight"].aliases == ("embed.weight", "head.weight")
    assert "model/head.weight" not in tensors, "written once"
    for weights, tied in pool.run(3, tied_loaded, path):
        same(weights, expected)
        assert tied


def tied_loaded(comm: Comm, path: str) -> tuple[Any, bool]:
    case = CASES["gpt"]
    step = zplan.compile(build(case), case.loss_fn, case.batch(0), optimizer=case.optimizer, group=comm.group, stage=2)
    step.load(path)
    with step.whole_parameters() as model:
        tied = model.embed.weight is model.head.weight
    return step.full_state_dict(), tied


OPTIMIZERS = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1),
    "SGD momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adam amsgrad": functools.partial(torch.optim.Adam, lr=torch.tensor(0.1), amsgrad=True),
    "fused": functools.partial(torch.optim.AdamW, lr=0.1, fused=True),
    "NAdam": functools.partial(torch.optim.NAdam, lr=0.1),
    "RAdam": functools.partial(torch.optim.RAdam, lr=0.1),
    "Adamax": torch.optim.Adamax,
    "Adagrad": functools.partial(torch.optim.Adagrad, initial_accumulator_value=0.5),
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": functools.partial(torch.optim.RMSprop, momentum=0.5, centered=True),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
}


def round_trip(comm: Comm, name: str, path: str, steps: int, again: str) -> dict[str, torch.Tensor]:
    make = OPTIMIZERS[name]
    if "Rprop" not in name:
        make = functools.partial(groups, make)
    step = exact(comm, 2, optimizer=make, bucket=600)
    if again:
        step.load(path)
        step.save(again)
    for i in range(steps):
        step(batch(i))
    if not again:
        step.save(path)
        step(batch(1))
    return step.full_state_dict()


FEW = ("SGD momentum", "Adam amsgrad", "fused", "Adagrad", "ASGD")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in OPTIMIZERS]
)
def test_states_of_every_element_wise_optimizer(pool, tmp_path, name: str) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    expected = pool.run(2, round_trip, name, one, 2, "")[0]
    # The batch that came after the save.
    found = pool.run(3, one_more, name, one, two)
    assert_same_save(one, two, without=("rng/",))
    for state in found:
        same(state, expected)


def one_more(comm: Comm, name: str, path: str, again: str) -> dict[str, torch.Tensor]:
    make = OPTIMIZERS[name]
    step = exact(comm, 3, optimizer=make if name == "Rprop" else functools.partial(groups, make), bucket=2000)
    step.load(path)
    step.save(again)
    step(batch(1))
    return step.full_state_dict()


def test_a_save_before_the_first_step(pool, tmp_path) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    pool.run(2, round_trip, "fused", one, 0, "")
    pool.run(3, one_more, "fused", one, two)
    assert_same_save(one, two, without=("rng/",))


def behind(comm: Comm, path: str, reference: str) -> bool:
    """Saves in the background, and takes steps while not a byte of it has been written."""
    step = exact(comm, 2)
    for i in range(2):
        step(batch(i))
    step.save(reference, extra=[torch.ones(2)])
    go = threading.Event()

    def held_back(phase: str, count: int) -> None:
        if phase == "write":
            assert go.wait(60)

    extra = [torch.ones(2)]
    saving = step.save(path, extra=extra, blocking=False, progress=held_back)
    assert saving is not None
    extra[0] += 1
    for i in range(3):
        step(batch(i))
    early = saving.done()
    go.set()
    saving.wait()
    assert saving.done()
    saving.wait()
    return early


@pytest.mark.parametrize("world", [1, 3])
def test_a_save_in_the_background_is_the_blocking_one_though_steps_go_on(pool, tmp_path, world: int) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    assert pool.run(world, behind, one, two) == [False] * world
    assert_same_save(one, two)
    assert sorted(each.name for each in next(Path(one).glob("data-*")).iterdir()) == [
        f"rank-{rank}.safetensors" for rank in range(world)
    ]


def in_a_row(comm: Comm, path: str) -> list[Any]:
    """Three saves without waiting, a load, and a close: each waits for the one before."""
    with exact(comm, 3) as step:
        for i in range(3):
            step(batch(i))
            step.save(path, extra=i, blocking=False)
        step(batch(3))
        found = [step.load(path), step.steps]
        step.save(path, extra="last", blocking=False)
    with exact(comm, 1) as step:
        return [*found, step.load(path)]


def test_what_comes_after_a_save_in_the_background_waits_for_it(pool, tmp_path) -> None:
    assert pool.run(2, in_a_row, str(tmp_path)) == [[2, 3, "last"]] * 2
    assert only_one_save(tmp_path)


def only_one_save(path: Path) -> bool:
    names = sorted(each.name for each in path.iterdir())
    return len(names) == 2 and bool(FOLDER.fullmatch(names[0])) and names[1] == MANIFEST


def full(comm: Comm, path: str, victims: list[int], blocking: bool) -> list[Any]:
    """No file may grow beyond a limit on some ranks: what a full disk is to a write."""
    step = exact(comm, 2)
    step(batch(0))
    step.save(path, extra="good")

    def save() -> None:
        saving = step.save(path, extra="bad", blocking=blocking)
        if saving is not None:
            saving.wait()

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    step(batch(1))
    before = step.full_state_dict()
    if comm.rank in victims:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        found = words(save)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    same(before, step.full_state_dict())
    left = sorted(each.name for each in Path(path).iterdir())
    comm.barrier()
    step.save(path + "-other", extra="works again")
    return [found, step.load(path), left]


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("victims", [[0], [1], [0, 1]])
def test_a_full_disk_leaves_the_save_before_and_says_what_was_to_be_written(pool, tmp_path, victims, blocking) -> None:
    found = pool.run(2, full, str(tmp_path / "save"), victims, blocking)
    assert found[0] == found[1], "the same words on every rank"
    error, extra, left = found[0]
    assert extra == "good"
    assert len(left) == 2
    for victim in victims:
        assert f"rank {victim}: StateError: save to {tmp_path}/save: " in error
        assert f"rank-{victim}.safetensors cannot be written: File too large" in error
    assert "bytes) were to be written" in error
    assert "what was saved there before is as it was" in error


def damaged(comm: Comm, path: str, other: str) -> tuple[list[str], str]:
    """Loads a save whose files are bad one way after the other; a step that has trained elsewhere stays as it is."""
    step = exact(comm, 1)
    step.load(path)
    step(batch(2))
    step.save(other)
    before, moments = step.full_state_dict(), states(step)
    folder = next(Path(path).glob("data-*"))
    found = []
    for name in ("rank-0.safetensors", "rank-2.safetensors"):
        file = folder / name
        good = file.read_bytes()
        bad = bytearray(good)
        bad[-100] ^= 1
        for content in (bytes(bad), good[:-1], None):
            comm.barrier()
            if comm.rank == 0:
                file.unlink() if content is None else file.write_bytes(content)
            comm.barrier()
            found.append(words(lambda: step.load(path)))
            comm.barrier()
            if comm.rank == 0:
                file.write_bytes(good)
            comm.barrier()
    manifest = Path(path) / MANIFEST
    text = manifest.read_text()
    for content in (text.replace('"steps":3', '"steps":4'), text[:-9], "{}"):
        comm.barrier()
        if comm.rank == 0:
            manifest.write_text(content)
        comm.barrier()
        found.append(words(lambda: step.load(path)))
    same(before, step.full_state_dict())
    for (_, _, _, mine), (_, _, _, was) in zip(states(step), moments, strict=True):
        same(mine, was)
    step.load(other)
    return found, str(folder)


def test_a_damaged_or_missing_file_is_named_and_nothing_is_changed(pool, tmp_path) -> None:
    path = tmp_path / "save"
    pool.run(3, saved_plain, str(path))
    (found, folder), other = pool.run(2, damaged, str(path), str(tmp_path / "other"))
    assert found == other[0]
    for name, (flipped, short, gone) in (("rank-0", found[:3]), ("rank-2", found[3:6])):
        assert f"SpecError: {folder}/{name}.safetensors is damaged: it is not what was written" in flipped
        assert f"SpecError: {folder}/{name}.safetensors is damaged: it has " in short
        assert f"SpecError: {folder}/{name}.safetensors is missing, a part of the checkpoint" in gone
    assert found[6] == f"SpecError: {path}/{MANIFEST} was changed after it was written: its checksum does not match"
    assert found[7].startswith(f"SpecError: {path}/{MANIFEST} is damaged, or zplan did not write it: ")
    assert found[8].startswith(f"SpecError: {path}/{MANIFEST} is JSON, but no checkpoint of zplan")


def saved_plain(comm: Comm, path: str, stage: int = 3) -> None:
    step = exact(comm, stage)
    for i in range(3):
        step(batch(i))
    step.save(path, extra={"t": torch.arange(3)})


def unpickled(comm: Comm, path: str) -> list[Any]:
    """Loads where everything that unpickles raises."""
    step = exact(comm, 2)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was unpickled")

    before = {name: getattr(pickle, name) for name in ("load", "loads", "Unpickler", "_Unpickler")}
    torch_load = torch.load
    try:
        for name in before:
            setattr(pickle, name, refuse)
        torch.load = refuse
        return step.load(path)["t"].tolist()
    finally:
        torch.load = torch_load
        for name, value in before.items():
            setattr(pickle, name, value)


@pytest.mark.parametrize("world", [1, 2])
def test_nothing_is_unpickled(pool, tmp_path, world: int) -> None:
    pool.run(3, saved_plain, str(tmp_path))
    assert pool.run(world, unpickled, str(tmp_path)) == [[0, 1, 2]] * world
    for file in tmp_path.rglob("*"):
        assert file.is_dir() or file.suffix in (".json", ".safetensors"), file


class Wider(Exact):
    def __init__(self) -> None:
        super().__init__(width=6)


class Renamed(Exact):
    def __init__(self) -> None:
        super().__init__(matrix="matrices")


class Untied(Exact):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = torch.nn.Parameter(self.table.weight.detach().clone())


class Bigger(Exact):
    def __init__(self) -> None:
        super().__init__()
        self.extra_scale = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros(3))


class Counting(Exact):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))


class Narrow(Exact):
    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Parameter(self.wide.detach().half())


class Thawed(Exact):
    def __init__(self) -> None:
        super().__init__()
        self.frozen.requires_grad_(True)


def one_group(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named)


def other_groups(named: Any) -> torch.optim.Optimizer:
    named = list(named)
    first = [p for n, p in named if n == "wide"]
    return torch.optim.AdamW([{"params": [p for n, p in named if n != "wide"]}, {"params": first}])


def refused(comm: Comm, path: str) -> list[str]:
    found = []
    for model in MODELS:
        step = exact(comm, 3, model=model)
        found.append(words(lambda step=step: step.load(path)))
    for make in (functools.partial(groups, torch.optim.Adam), one_group, other_groups):
        step = exact(comm, 2, optimizer=make)
        found.append(words(lambda step=step: step.load(path)))
    step = exact(comm, 1)
    scheduler = schedule(step)
    found.append(words(lambda: step.load(path, scheduler=scheduler)))
    found.append(words(lambda: step.load(f"{path}/nowhere")))
    found.append(words(lambda: step.load(Path(path).parent / "plain.txt")))
    found.append(words(lambda: step.load(Path(path).parent)))
    found.append(words(lambda: step.save(Path(path).parent / "plain.txt")))
    found.append(words(lambda: step.save(path, extra={"a": [0, object()]})))
    found.append(words(lambda: step.save(path, extra={"rank": comm.rank})))
    found.append(words(lambda: step.save(path if comm.rank else f"{path}-0")))
    found.append(words(lambda: step.save(path, scheduler=3)))
    step.optimizer.param_groups[1]["lr"] = 1.0 + comm.rank
    found.append(words(lambda: step.save(path)))
    step.accumulate(batch(0))
    found.append(words(lambda: step.save(path)))
    found.append(words(lambda: step.load(path)))
    step.close()
    found.append(words(lambda: step.save(path)))
    return found


MODELS = [Wider, Renamed, Untied, Bigger, Counting, Narrow, Thawed]


def test_words(pool, tmp_path) -> None:
    path = str(tmp_path / "save")
    (tmp_path / "plain.txt").write_text("hello")
    pool.run(3, saved_plain, path)
    one, two = pool.run(2, refused, path)
    assert one == two
    model, other = f"SpecError: checkpoint {path} is of another model:", "another optimizer:"
    waits = "1 micro-batch waits for its update: finish with step(batch) first"
    for found, expected in zip(one, [
        f"{model} table.weight is fp32[7, 5] there, and fp32[7, 6] here",
        f"{model} it has no matrices, fp32[33, 9] in this model; nearest: matrix",
        f"{model} table.weight is tied to head.weight there, and not here",
        f"{model} it has no extra_scale, fp32[2] in this model",
        f"{model} it has no buffer count, [3] in this model",
        f"{model} wide is fp32[130] there, and fp16[130] here",
        f"SpecError: checkpoint {path} is of {other} frozen is in no group (frozen) there, and in group 0 here",
        f"SpecError: checkpoint {path} is of {other} AdamW there, and Adam here; their states are not the same thing",
        f"SpecError: checkpoint {path} is of {other} 2 parameter groups there, and 1 here",
        f"SpecError: checkpoint {path} is of {other} scale is in group 1 there, and in group 0 here",
        f"SpecError: checkpoint {path} was saved with no scheduler, and is loaded with the scheduler LambdaLR",
        f"SpecError: there is no checkpoint {path}/nowhere",
        f"SpecError: {tmp_path}/plain.txt is no checkpoint of zplan: it has no zplan.json, it is a file",
        f"SpecError: {tmp_path} is no checkpoint of zplan: it has no zplan.json",
        f"AgreementError: 1 of 2 ranks failed, 1 did not\nrank 0: SpecError: save: {tmp_path}/plain.txt is a file",
        "SpecError: extra.a[1] is a builtins.object, and a save takes numbers, strings, tensors, and dicts, lists",
        "SpecError: extra is not the same on rank 0 and on rank 1, and one of them is saved or loaded for all",
        "SpecError: path is not the same on rank 0 and on rank 1",
        "SpecError: scheduler is a int without state_dict(): give a scheduler, or several",
        "SpecError: optimizer.group1 is not the same on rank 0 and on rank 1",
        f"StateError: save: {waits}",
        f"StateError: load: {waits}",
        "StateError: save: this step is closed",
    ], strict=True):  # fmt: skip
        if not found.startswith(expected):
            raise AssertionError(f"{found}\ninstead of\n{expected}")


def test_a_model_that_lost_a_parameter_is_told_which(pool, tmp_path) -> None:
    pool.run(2, larger, str(tmp_path))
    for found in pool.run(2, smaller, str(tmp_path)):
        assert "it has extra_scale, [2], and this model none" in found


def larger(comm: Comm, path: str) -> None:
    exact(comm, 2, model=Bigger).save(path)


def smaller(comm: Comm, path: str) -> str:
    step = exact(comm, 2)
    return words(lambda: step.load(path))


def scheduled(comm: Comm, path: str) -> list[Any]:
    """Several schedulers; a load that leaves them out must say so."""
    step = exact(comm, 3)

    def made() -> list[Any]:
        lrs = torch.optim.lr_scheduler
        return [lrs.MultiStepLR(step.optimizer, [1, 3]), lrs.ReduceLROnPlateau(step.optimizer, patience=0)]

    many, plateau = made()
    for i in range(3):
        step(batch(i))
        many.step()
        plateau.step(1.0)
    lr = [group["lr"] for group in step.optimizer.param_groups]
    step.save(path, scheduler=[many, plateau])
    state = many.state_dict(), plateau.state_dict()
    fresh = made()
    found = [words(lambda: step.load(path)), words(lambda: step.load(path, scheduler=fresh[0]))]
    step.optimizer.param_groups[0]["lr"] = 7.0
    step.load(path, scheduler=())
    assert fresh[0].state_dict() != state[0]
    assert [group["lr"] for group in step.optimizer.param_groups] == lr
    step.load(path, scheduler=fresh)
    assert (fresh[0].state_dict(), fresh[1].state_dict()) == state
    return found


def test_schedulers(pool, tmp_path) -> None:
    start = (
        f"SpecError: checkpoint {tmp_path} was saved with the scheduler MultiStepLR, ReduceLROnPlateau, and is loaded"
    )
    for none, one in pool.run(2, scheduled, str(tmp_path)):
        assert none.startswith(f"{start} with no scheduler")
        assert one.startswith(f"{start} with the scheduler MultiStepLR")


def by_torch(comm: Comm, path: str) -> dict[str, torch.Tensor]:
    import torch.distributed.checkpoint as dcp

    from zplan.runtime.store import Reader

    flat = {"model/matrix": torch.zeros(33 * 9), "optimizer/exp_avg/wide": torch.zeros(130)}
    dcp.load(flat, storage_reader=Reader(path), process_group=comm.group)
    return flat


def test_torch_distributed_checkpoint_reads_it(pool, tmp_path) -> None:
    pool.run(3, saved_plain, str(tmp_path))
    _, tensors = contents(tmp_path)
    for flat in pool.run(2, by_torch, str(tmp_path)):
        for key, tensor in flat.items():
            assert torch.equal(tensor, tensors[key])


def test_each_rank_writes_its_own_share_alone(pool, tmp_path) -> None:
    pool.run(4, saved_plain, str(tmp_path), 2)
    manifest, _ = contents(tmp_path)
    for key in ("model/matrix", "optimizer/exp_avg/matrix", "optimizer/exp_avg_sq/matrix"):
        chunks = manifest.tensors[key].chunks
        assert len(chunks) > 1, "cut over ranks"
        assert len({file for file, *_ in chunks}) == len(chunks)


@pytest.mark.parametrize(
    ("world", "mode"),
    [
        (1, "phases"),
        pytest.param(2, "phases", marks=pytest.mark.slow),
        pytest.param(1, "20", marks=pytest.mark.slow),
        pytest.param(2, "20", marks=pytest.mark.slow),
    ],
)
def test_a_save_that_is_killed_leaves_the_one_before_or_is_there_whole(tmp_path, world: int, mode: str) -> None:
    """At each phase, or at 20 random moments; each rank in turn, in the background and not."""
    command = [sys.executable, "-m", "tests.ranks.killed", str(tmp_path / "save"), str(world), mode]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    print(found.stdout)
    assert found.stdout.endswith("all is well\n"), found.stderr
    if mode == "phases":
        assert "blocking True: old" in found.stdout
