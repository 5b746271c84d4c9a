"""The command line, and the only place of the package that prints or reads the environment."""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from zplan.errors import SpecError, ZplanError
from zplan.planner.hardware import GPUS
from zplan.planner.hardware import gpu as gpu_of
from zplan.planner.spec import Rule, load_spec
from zplan.units import format_bytes
from zplan.version import __version__

app = typer.Typer(
    name="zplan",
    help="Plan, inspect and run model states of PyTorch training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: zplan schedule examples/gpt_text.py:job --world 8 --stage 3; `zplan COMMAND --help` has more.",
)

JobArgument = Annotated[
    str | None, typer.Argument(metavar="FILE.py:JOB", help="A function without arguments that returns a zplan.Job.")
]
HfOption = Annotated[
    Path | None,
    typer.Option("--hf", metavar="CONFIG_DIR", help="Instead of a job: a transformers config.json; no weights needed."),
]
BatchOption = Annotated[int, typer.Option("--batch", min=1, help="With --hf: samples per rank and micro-batch.")]
SeqOption = Annotated[int, typer.Option("--seq", min=1, help="With --hf: tokens per sample, where it takes tokens.")]
StageOption = Annotated[
    str | None,
    typer.Option(help="ZeRO stage of every tensor that no rule or annotation gives one: 0 to 3, or auto [default]."),
]
WorldOption = Annotated[int | None, typer.Option(help="Ranks to plan for; none of them is started.")]
GpuOption = Annotated[
    str | None, typer.Option(help=f"Plan for CUDA, within this GPU's memory less a reserve: {', '.join(GPUS)}.")
]
MemoryOption = Annotated[str | None, typer.Option(help="Bytes that a rank may hold at once: 80GB, 24GiB.")]
BucketOption = Annotated[
    str | None, typer.Option(help="Bytes of parameters that travel together: 25MB [default], 8MiB or 1000000.")
]
PrefetchOption = Annotated[
    int | None, typer.Option(help="How many buckets ahead of their use gathers are launched; 1 by default.")
]
DepthOption = Annotated[int | None, typer.Option(help="How many reductions may be in flight; 2 by default.")]
MicroOption = Annotated[
    int | None, typer.Option("--micro-batches", help="Batches of one optimizer step; 1 by default.")
]
PrecisionOption = Annotated[
    str | None, typer.Option("--precision", help="bf16 or fp16 with fp32 masters; by default as the model is.")
]
RuleOption = Annotated[
    list[str] | None,
    typer.Option("--rule", metavar="PATTERN=STAGE", help="A stage for parameters by name, as wte.*=0; repeatable."),
]
SpecOption = Annotated[
    Path | None,
    typer.Option(
        "--spec", help="A TOML or JSON file: stage, world_size, memory, bucket, ..., rules. Words here go first."
    ),
]
OpsOption = Annotated[bool, typer.Option("--ops", help="One row for each op, nothing folded.")]
CollectivesOption = Annotated[
    bool, typer.Option("--collectives", help="A row for each collective, also where that takes pages.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def _version(asked: bool) -> None:
    if asked:
        print(f"zplan {__version__}")
        raise typer.Exit


@app.callback()
def options(
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the whole traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Plan, inspect and run model states of PyTorch training."""


@app.command(epilog="Example: zplan plan examples/gpt_text.py:job --world 64 --memory 1GB --stage auto -o plan.json")
def plan(
    job: JobArgument = None,
    hf: HfOption = None,
    batch: BatchOption = 1,
    seq: SeqOption = 1024,
    world: WorldOption = None,
    gpu: GpuOption = None,
    memory: MemoryOption = None,
    stage: StageOption = None,
    bucket: BucketOption = None,
    prefetch: PrefetchOption = None,
    depth: DepthOption = None,
    micro_batches: MicroOption = None,
    precision: PrecisionOption = None,
    rule: RuleOption = None,
    spec: SpecOption = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Save the plan to this file.")] = None,
    json_: JsonOption = False,
) -> None:
    """Plan a job: who owns which tensor and because of what, memory and traffic; by default the lowest stage that fits.

    A model may be a job of yours, or, with --hf, any transformers config.
    """
    options = {"memory": memory, "stage": stage, "bucket": bucket, "prefetch": prefetch, "depth": depth}
    options |= {"micro_batches": micro_batches, "precision": precision}
    asked = merged(spec, gpu, rule, world=world, **options)
    with shown() as progress:
        import zplan

        made = zplan.plan(**work(job, hf, batch, seq, asked), **asked, progress=progress)
        if output is not None:
            progress("save", 0)
            made.save(output)
    if output is not None:
        print(f"saved to {output}", file=sys.stderr)
    print(json.dumps(as_json(made)) if json_ else made)


@app.command(epilog="Example: zplan compare examples/gpt_text.py:job --world 64 --gpu h100")
def compare(
    job: JobArgument = None,
    hf: HfOption = None,
    batch: BatchOption = 1,
    seq: SeqOption = 1024,
    world: WorldOption = None,
    gpu: GpuOption = None,
    memory: MemoryOption = None,
    bucket: BucketOption = None,
    prefetch: PrefetchOption = None,
    depth: DepthOption = None,
    micro_batches: MicroOption = None,
    precision: PrecisionOption = None,
    rule: RuleOption = None,
    spec: SpecOption = None,
    json_: JsonOption = False,
) -> None:
    """Put every stage side by side: memory, traffic, time, whether it fits, and because of what."""
    asked = merged(
        spec,
        gpu,
        rule,
        world=world,
        memory=memory,
        bucket=bucket,
        prefetch=prefetch,
        depth=depth,
        micro_batches=micro_batches,
        precision=precision,
    )
    asked.pop("stage", None)
    with shown() as progress:
        import zplan
        from zplan.planner.certificate import lowest

        plans = zplan.plans(**work(job, hf, batch, seq, asked), **asked, progress=progress)
    if not json_:
        print(zplan.compare(plans))
        return
    certificates = [made.certificate for made in plans]
    found = lowest(certificates)
    columns = [{**asdict(each), "fits": each.fits, "over_bytes": each.over, "seconds": None} for each in certificates]
    print(json.dumps({"chosen": None if found is None else found.stage, "stages": columns}))


@app.command(epilog="Example: zplan schedule examples/gpt_text.py:job --world 8 --stage 3; zplan schedule plan.json")
def schedule(
    job: Annotated[
        str | None, typer.Argument(metavar="FILE.py:JOB | PLAN.json", help="A job, or a plan that was saved.")
    ] = None,
    hf: HfOption = None,
    batch: BatchOption = 1,
    seq: SeqOption = 1024,
    world: WorldOption = None,
    gpu: GpuOption = None,
    memory: MemoryOption = None,
    stage: StageOption = None,
    bucket: BucketOption = None,
    prefetch: PrefetchOption = None,
    depth: DepthOption = None,
    micro_batches: MicroOption = None,
    precision: PrecisionOption = None,
    rule: RuleOption = None,
    spec: SpecOption = None,
    ops: OpsOption = False,
    collectives: CollectivesOption = False,
    json_: JsonOption = False,
) -> None:
    """Print a plan and its schedule, step by step: collectives, runs, frees, live bytes."""
    options = {"memory": memory, "stage": stage, "bucket": bucket, "prefetch": prefetch, "depth": depth}
    options |= {"micro_batches": micro_batches, "precision": precision}
    asked = merged(spec, gpu, rule, world=world, **options)
    if job is not None and hf is None and job.endswith(".json"):
        if asked:
            raise SpecError(f"{', '.join(asked)}: {job} is a plan and says that already")
        from zplan.planner.planfile import load

        made = load(job)
    else:
        with shown() as progress:
            import zplan

            made = zplan.plan(**work(job, hf, batch, seq, asked), **asked, progress=progress)
    if json_:
        print(json.dumps(as_json(made)))
        return
    print(made)
    print()
    print(made.schedule.text(ops=ops, collectives=collectives))


@app.command(epilog="Example: zplan diff before.json after.json; ends with 1 where they differ, as diff does")
def diff(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="A saved plan.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="Another one.")],
    json_: JsonOption = False,
) -> None:
    """Say where two saved plans part: what was asked for, stages, buckets, instructions, memory and traffic."""
    from zplan.planner.planfile import load

    found = load(before).diff(load(after))
    print(json.dumps(found.as_json()) if json_ else found)
    if found:
        raise typer.Exit(1)


@app.command(epilog="Example: zplan estimate --params 7.5e9 --world 64 --memory 80GB")
def estimate(
    params: Annotated[str, typer.Option(help="Parameters of the model: 7.5e9, 7.5B or 350M.")],
    world: Annotated[int, typer.Option(help="Ranks.")] = 1,
    memory: MemoryOption = None,
    gpu: Annotated[str | None, typer.Option(help=f"The memory of this GPU, less a reserve: {', '.join(GPUS)}.")] = None,
    precision: Annotated[
        str, typer.Option(help="mixed: 2 + 2 + 12 bytes a parameter, as in the paper; fp32: 4 + 4 + 8.")
    ] = "mixed",
    k: Annotated[int | None, typer.Option("--k", help="Bytes of optimizer states a parameter, if others.")] = None,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches per optimizer step.")] = 1,
    json_: JsonOption = False,
) -> None:
    """Model states by the formulas of the ZeRO paper, without a model; activations are not in it."""
    from zplan.planner.estimate import estimate as by_formula
    from zplan.planner.estimate import estimate_json, estimate_text

    if memory is None and gpu is not None:
        memory = str(gpu_of(gpu).budget)
    stages = by_formula(params, world, precision=precision, k=k, micro_batches=micro_batches)
    print(json.dumps(estimate_json(stages, memory=memory)) if json_ else estimate_text(stages, memory=memory))


@app.command(
    epilog="Example: zplan export saves/last -o my-gpt2 --config gpt2 --dtype bf16; then "
    "AutoModelForCausalLM.from_pretrained('my-gpt2')",
)
def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="A folder that step.save or run --save wrote.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="A folder that is new, or empty.")],
    dtype: Annotated[
        str | None, typer.Option(help="Cast floating tensors: fp32, bf16, fp16, fp64; by default as they were held.")
    ] = None,
    shard: Annotated[str, typer.Option(help="Most bytes in one file.")] = "5GB",
    prefix: Annotated[
        str, typer.Option(help="Only what is under this name, without it: model. where a wrapper holds it in .model.")
    ] = "",
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Copy config.json from here, and generation_config.json; they are not changed."
        ),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Write the weights of a save as safetensors that transformers' from_pretrained reads; no ranks, no job needed.

    The save's checksums are verified first. DIR appears whole or not at all. A tied weight is written once.
    """
    with shown(did="exported", counted=format_bytes) as progress:
        import zplan

        made = zplan.export(
            checkpoint, output, dtype=dtype, shard=shard, prefix=prefix, config=config, progress=progress
        )
    if json_:
        print(json.dumps({**asdict(made), "folder": str(made.folder)}))
        return
    files = made.files[0] if len(made.files) == 1 else f"{len(made.files)} files"
    print(f"{made.folder}: {made.tensors} tensors, {format_bytes(made.nbytes)} in {files}, after {made.steps} steps")
    if made.tied:
        print("tied, written once: " + ", ".join(f"{name} as {other}" for name, other in made.tied.items()))
    if made.left_out:
        print(f"left out, not under {prefix}: {', '.join(made.left_out)}")


@app.command(
    epilog="Example: torchrun --standalone --nproc-per-node 2 -m zplan run examples/gpt_text.py:job "
    "--stage 2 --steps 100",
)
def run(
    job: JobArgument,
    plan: Annotated[Path | None, typer.Option("--plan", help="Run this saved plan's decisions.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse a plan of another graph of the model.")] = False,
    stage: StageOption = None,
    memory: MemoryOption = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 100,
    bucket: BucketOption = None,
    prefetch: PrefetchOption = None,
    depth: DepthOption = None,
    micro_batches: MicroOption = None,
    precision: PrecisionOption = None,
    rule: RuleOption = None,
    spec: SpecOption = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=0.001, help="Seconds after which a rank that waits for others gives up; 600 by default."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Rank r seeds torch with seed + r.")] = 0,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="DIR", help="Save the training into this folder.")
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(min=1, help="Steps from one save to the next; by default only the end is saved.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on from the save in --save DIR, if there is one; --steps counts its steps."),
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Train a job on the ranks that torchrun started (or on this process alone); save it, and go on from there."""
    import torch
    import torch.distributed as dist

    import zplan
    from zplan.jobs import chain_first, load_job, stream_of
    from zplan.runtime.group import make_group
    from zplan.runtime.store import holds_save

    asked = merged(
        spec,
        None,
        rule,
        memory=memory,
        stage=stage,
        bucket=bucket,
        prefetch=prefetch,
        depth=depth,
        micro_batches=micro_batches,
        precision=precision,
    )
    for name in ("world_size", "device"):
        asked.pop(name, None)
    if strict and plan is None:
        raise SpecError("--strict says how strictly a plan is taken: give --plan too")
    if save is None and (resume or save_every is not None):
        raise SpecError(f"{'--resume' if resume else '--save-every'} is about a save: give --save DIR too")
    made = load_job(required(job))
    if made.optimizer is None:
        raise SpecError(f"{job} has no optimizer: give zplan.Job one, such as functools.partial(torch.optim.AdamW)")
    own_group = dist.is_torchelastic_launched() and not dist.is_initialized()
    if own_group:
        make_group(next(made.model.parameters()).device.type, timeout=timeout)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    console = Console(stderr=True, quiet=rank != 0)
    torch.manual_seed(seed + rank)
    stream = iter(stream_of(made.batches, rank, world))
    batch = next(stream, None)
    if batch is None:
        raise SpecError(f"{job} has no batches")
    with shown(console) as progress:
        step = zplan.compile(
            made.model,
            made.loss_fn,
            batch,
            optimizer=made.optimizer,
            plan=plan,
            strict=strict,
            progress=progress,
            **asked,
        )
    losses: list[float] = []
    started = time.perf_counter()
    with step:
        batches: Iterable[Any] = chain_first(batch, stream)
        if save is not None and resume and holds_save(save):
            done = step.load(save)
            batches = islice(batches, done["batches"], None)
            console.print(f"going on after step {step.steps} of {save}", highlight=False, soft_wrap=True)
        if step.steps >= steps:
            raise SpecError(f"{save} has {step.steps} steps already: --steps {steps} leaves nothing to do")
        for loss in train(step, batches, steps, console):
            losses.append(loss)
            if save is not None and save_every is not None and step.steps % save_every == 0 and step.steps < steps:
                # Training goes on while it is written.
                step.save(save, extra={"batches": step.steps * step.plan.spec.micro_batches}, blocking=False)
        if not losses:
            raise SpecError(f"{job} has fewer batches than the {step.plan.spec.micro_batches} of one step")
        if save is not None:
            step.save(save, extra={"batches": step.steps * step.plan.spec.micro_batches})
            console.print(f"saved step {step.steps} to {save}", highlight=False, soft_wrap=True)
        state = {"steps": step.steps, "first_loss": losses[0], "last_loss": losses[-1]}
    seconds = time.perf_counter() - started
    if own_group:
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
        if step.steps < steps:
            print(f"the job's batches ended after {step.steps} of {steps} steps", file=sys.stderr)


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
        bar = progress.add_task("", total=steps, completed=step.steps, loss="-")
        stream = iter(batches)
        while step.steps < steps:
            taken = list(islice(stream, step.plan.spec.micro_batches))
            # A rank whose batches have ended must not leave the others waiting for it.
            enough = len(taken) == step.plan.spec.micro_batches
            if step.mean(torch.tensor(float(enough), device=step.plan.graph.device)) < 1:
                return
            loss = step(*taken)
            value = step.mean(loss[0] if isinstance(loss, tuple) else loss).item()
            progress.update(bar, advance=1, loss=f"{value:.4f}")
            yield value


def required(job: str | None) -> str:
    if job is None:
        raise SpecError("what is to be planned? give FILE.py:JOB, such as examples/gpt_text.py:job, or --hf CONFIG_DIR")
    return job


def work(job: str | None, hf: Path | None, batch: int, seq: int, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What is planned, as arguments: model, loss, optimizer, and the first batch of rank 0."""
    if hf is not None:
        if job is not None:
            raise SpecError(f"{job} and --hf {hf}: give one of the two")
        from zplan.huggingface import job as from_config

        made = from_config(hf, batch=batch, sequence=seq)
    else:
        from zplan.jobs import load_job

        made = load_job(required(job))
    from zplan.jobs import first

    item = first(made.batches, 0, asked.get("world_size") or 1)
    return {"model": made.model, "loss_fn": made.loss_fn, "batch": item, "optimizer": made.optimizer}


def merged(spec: Path | None, gpu: str | None, rules: list[str] | None, **options: Any) -> dict[str, Any]:
    """Options as `zplan.plan` takes them: those of the command line, before those of the file."""
    asked = {} if spec is None else load_spec(spec)
    if gpu is not None:
        asked |= {"device": "cuda", "memory": gpu_of(gpu).budget}
    world = options.pop("world", None)
    asked |= {name: value for name, value in {**options, "world_size": world}.items() if value is not None}
    if rules:
        asked["rules"] = (*map(parse_rule, rules), *asked.get("rules", ()))
    return asked


def parse_rule(text: str) -> Rule:
    """`wte.*=0`"""
    pattern, equals, stage = text.rpartition("=")
    if not equals or not pattern:
        raise SpecError(f"--rule {text!r} is no PATTERN=STAGE, such as 'wte.*=0'; --spec takes rules that say more")
    return Rule(pattern, stage=stage)


@contextmanager
def shown(
    console: Console | None = None, *, did: str = "traced and planned", counted: Callable[[int], str] = "{} ops".format
) -> Iterator[Callable[[str, int], None]]:
    """Shows the phase that is running and how much it has made; at the end, what was done and what each phase took."""
    console = console or Console(stderr=True)
    started = time.perf_counter()
    seconds: dict[str, float] = {}
    phases = [("import", started)]

    with console.status("import") as status:

        def progress(phase: str, count: int = 0) -> None:
            moment = time.perf_counter()
            before, since = phases.pop()
            seconds[before] = seconds.get(before, 0.0) + moment - since
            phases.append((phase, moment))
            status.update(f"{phase}{f', {counted(count)}' if count else ''} ({moment - started:.0f} s)")

        yield progress
        progress("", 0)
    took = ", ".join(f"{phase} {took:.1f} s" for phase, took in seconds.items() if phase and took >= 0.05)
    console.print(
        f"{did} in {time.perf_counter() - started:.1f} s" + (f": {took}" if took else ""),
        highlight=False,
        soft_wrap=True,
    )


def as_json(plan: Any) -> dict[str, Any]:
    """A plan in numbers: what each tensor got, buckets, instructions, memory, traffic."""
    memory, traffic = plan.memory, plan.traffic
    certificate = plan.certificate
    return {
        "hash": plan.hash,
        "world": plan.spec.world_size,
        "device": plan.spec.device,
        "stage": plan.stage,
        "budget_bytes": plan.spec.memory,
        "fits": certificate.fits,
        "tensors": [
            {"name": name, "stage": choice.stage, "bucket": plan.ownership.home[name], "because": choice.because}
            for name, choice in plan.choices.items()
        ],
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
        "seconds": None,
        "certificates": [{**asdict(each), "fits": each.fits} for each in plan.certificates],
        "notes": list(plan.graph.notes),
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
