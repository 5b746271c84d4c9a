"""The command line, and the only place of the package that prints or reads the environment."""

import importlib.util
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from zplan.errors import SpecError, ZplanError

app = typer.Typer(
    name="zplan",
    help="Plan, inspect and run model states of PyTorch training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: zplan schedule examples/gpt_text.py:job --world 8 --stage 3; `zplan COMMAND --help` has more.",
)

JobArgument = Annotated[
    str, typer.Argument(metavar="FILE.py:JOB", help="A function without arguments that returns a zplan.Job.")
]
StageOption = Annotated[str, typer.Option(help="ZeRO stage of every tensor that is not annotated: 0, 1, 2 or 3.")]
BucketOption = Annotated[str, typer.Option(help="Bytes of parameters that travel together: 25MB, 8MiB or 1000000.")]
PrefetchOption = Annotated[int, typer.Option(help="How many buckets ahead of their use gathers are launched.")]
DepthOption = Annotated[int, typer.Option(help="How many reductions may be in flight.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@app.callback()
def options(
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Plan, inspect and run model states of PyTorch training."""


@app.command(
    epilog="Example: zplan schedule examples/gpt_text.py:job --world 8 --stage 3",
)
def schedule(
    job: JobArgument,
    stage: StageOption,
    world: Annotated[int, typer.Option(help="Ranks to plan for; none of them is started.")] = 1,
    bucket: BucketOption = "25MB",
    prefetch: PrefetchOption = 1,
    depth: DepthOption = 2,
    ops: Annotated[bool, typer.Option("--ops", help="One row for each op, nothing folded.")] = False,
    json_: JsonOption = False,
) -> None:
    """Print the plan of a job and its schedule, step by step: collectives, runs, frees, live bytes."""
    work = load_job(job)
    console = Console(stderr=True)
    with tracing(console):
        import zplan

        batch = first(work.batches, 0, world)
        plan = zplan.plan(
            work.model,
            work.loss_fn,
            batch,
            optimizer=work.optimizer,
            stage=stage,
            world_size=world,
            bucket=bucket,
            prefetch=prefetch,
            depth=depth,
        )
    if json_:
        print(json.dumps(as_json(plan)))
        return
    print(plan)
    print()
    print(plan.schedule.text(ops=ops))


@app.command(
    epilog="Example: torchrun --standalone --nproc-per-node 2 -m zplan run examples/gpt_text.py:job "
    "--stage 2 --steps 100",
)
def run(
    job: JobArgument,
    stage: StageOption,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 100,
    bucket: BucketOption = "25MB",
    prefetch: PrefetchOption = 1,
    depth: DepthOption = 2,
    seed: Annotated[int, typer.Option(help="Rank r seeds torch with seed + r.")] = 0,
    json_: JsonOption = False,
) -> None:
    """Train a job on the ranks that torchrun started (or on this process alone)."""
    import torch
    import torch.distributed as dist

    import zplan

    work = load_job(job)
    if work.optimizer is None:
        raise SpecError(f"{job} has no optimizer: give zplan.Job one, such as functools.partial(torch.optim.AdamW)")
    made = dist.is_torchelastic_launched() and not dist.is_initialized()
    if made:
        cuda = next(work.model.parameters()).device.type == "cuda"
        dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    console = Console(stderr=True, quiet=rank != 0)
    torch.manual_seed(seed + rank)
    stream = iter(stream_of(work.batches, rank, world))
    batch = next(stream, None)
    if batch is None:
        raise SpecError(f"{job} has no batches")
    with tracing(console):
        step = zplan.compile(
            work.model,
            work.loss_fn,
            batch,
            optimizer=work.optimizer,
            stage=stage,
            bucket=bucket,
            prefetch=prefetch,
            depth=depth,
        )
    losses: list[float] = []
    started = time.perf_counter()
    with step:
        for loss in train(step, islice(chain_first(batch, stream), steps), steps, console):
            losses.append(loss)
        state = {"steps": len(losses), "first_loss": losses[0], "last_loss": losses[-1]}
    seconds = time.perf_counter() - started
    if made:
        dist.destroy_process_group()
    if rank == 0:
        result = {**state, "seconds": round(seconds, 3), "world": world, "plan": step.plan.hash}
        if json_:
            print(json.dumps(result))
        else:
            print(
                f"{result['steps']} steps on {world} rank{'s' if world > 1 else ''} in {seconds:.1f} s, "
                f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, plan {step.plan.hash}"
            )
        if len(losses) < steps:
            print(f"the job's batches ended after {len(losses)} of {steps} steps", file=sys.stderr)


def train(step: Any, batches: Iterable[Any], steps: int, console: Console) -> Iterator[float]:
    """Yields the loss of each step, averaged over ranks; ends on all ranks when one has no more batches."""
    import torch

    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=console.quiet) as progress:
        bar = progress.add_task("", total=steps, loss="-")
        stream = iter(batches)
        while True:
            batch = next(stream, None)
            # A rank whose batches have ended must not leave the others waiting for it.
            if step.mean(torch.tensor(float(batch is not None), device=step.plan.graph.device)) < 1:
                return
            loss = step(batch)
            value = step.mean(loss[0] if isinstance(loss, tuple) else loss).item()
            progress.update(bar, advance=1, loss=f"{value:.4f}")
            yield value


def load_job(where: str) -> Any:
    """Imports FILE.py and calls JOB; a `SpecError` says which of both is wrong."""
    from zplan.api import Job

    path, _, name = where.rpartition(":")
    if not path or not name:
        raise SpecError(f"{where!r} is no FILE.py:JOB, such as examples/gpt_text.py:job")
    file = Path(path)
    if not file.is_file():
        raise SpecError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise SpecError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.parent))
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        found = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise SpecError(f"{path} has no function {name}; it has {', '.join(found) or 'none'}")
    job = function()
    if not isinstance(job, Job):
        raise SpecError(f"{where} returned a {type(job).__name__}, and must return a zplan.Job")
    return job


def stream_of(batches: Any, rank: int, world: int) -> Iterable[Any]:
    stream: Iterable[Any] = batches(rank, world) if callable(batches) else batches
    return stream


def first(batches: Any, rank: int, world: int) -> Any:
    for batch in stream_of(batches, rank, world):
        return batch
    raise SpecError("the job has no batches")


def chain_first(batch: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield batch
    yield from rest


@contextmanager
def tracing(console: Console) -> Iterator[None]:
    """Says that a model is traced and planned, and how long it took."""
    started = time.perf_counter()
    with console.status("tracing and planning"):
        yield
    console.print(f"traced and planned in {time.perf_counter() - started:.1f} s")


def as_json(plan: Any) -> dict[str, Any]:
    """A plan in numbers: buckets, instructions, memory, traffic."""
    memory, traffic = plan.memory, plan.traffic
    return {
        "hash": plan.hash,
        "world": plan.spec.world_size,
        "buckets": [
            {
                "name": bucket.name,
                "dtype": bucket.dtype,
                "stage": bucket.stage,
                "tensors": [slot.tensor for slot in bucket.slots],
                "part": bucket.part,
                "padding": bucket.padding,
            }
            for bucket in plan.ownership.buckets
        ],
        "instructions": [
            {"text": repr(instruction), "live_bytes": live, "sent_bytes": sent}
            for instruction, live, sent in zip(
                plan.program.instructions, memory.timeline, traffic.by_instruction, strict=True
            )
        ],
        "resident_bytes": memory.resident_bytes,
        "peak_bytes": memory.peak_bytes,
        "peak_instruction": memory.peak_index,
        "sent_bytes_per_rank": traffic.bytes_per_rank,
    }


def main(arguments: list[str] | None = None) -> None:
    """Runs a command. What the user can act on comes as one message; `--traceback` shows where it was raised."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    whole = "--traceback" in given
    command: Callable[..., Any] = app
    try:
        command([word for word in given if word != "--traceback"], prog_name="zplan", standalone_mode=True)
    except Exception as error:  # the user's own file runs inside: whatever it raises ends as one message
        if whole:
            traceback.print_exc()
        else:
            where = "" if isinstance(error, ZplanError) else f"{origin(error)}\n"
            print(f"{where}{type(error).__name__}: {error}", file=sys.stderr)
            if where:
                print("(--traceback shows the whole way there)", file=sys.stderr)
        leave(1)


def leave(code: int) -> None:
    """Ends the process at once where it is one of several ranks: the others may never come to an orderly end.

    The usual way out waits for threads of the process group, and dies of it when another rank is gone.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code) from None


def origin(error: BaseException) -> str:
    """The last line of somebody else's code on the way to an error: that of the user's file, where it has one."""
    home = str(Path(__file__).parent)
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith((home, "<"))
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "zplan"
