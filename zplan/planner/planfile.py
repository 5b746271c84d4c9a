"""Plan files: a plan as one JSON object that reads back as the very same plan, on any machine, without torch.

`decisions` (spec, choices, buckets) are bound to names, shapes and dtypes of parameters; `programs` to `graph`,
which is kept too, so that a schedule can be printed where there is no model. `sha256` is of all the rest.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from zplan.errors import CheckError, SpecError
from zplan.graph.ir import Graph
from zplan.planner.buckets import Bucket
from zplan.planner.certificate import Certificate
from zplan.planner.check import check
from zplan.planner.choices import Choice
from zplan.planner.ownership import Ownership
from zplan.planner.plan import Plan
from zplan.planner.program import (
    Accumulate,
    AllReduce,
    Caps,
    Cast,
    Free,
    Gather,
    GatherGradient,
    Instruction,
    Pack,
    Position,
    Program,
    ReduceScatter,
    Run,
    Update,
    Wait,
)
from zplan.planner.spec import Spec
from zplan.version import __version__

FORMAT = "zplan plan"
VERSION = 1
# Each instruction is a list: its tag here, then its fields in order. A union without tags reads back as another class.
TAGS: dict[str, type[Any]] = {
    "cast": Cast,
    "gather": Gather,
    "pack": Pack,
    "accumulate": Accumulate,
    "reduce-scatter": ReduceScatter,
    "all-reduce": AllReduce,
    "gather-grad": GatherGradient,
    "wait": Wait,
    "run": Run,
    "free": Free,
    "update": Update,
}
_TAG = {kind: tag for tag, kind in TAGS.items()}


class Decisions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    spec: Spec
    stage: int
    choices: dict[str, Choice]
    buckets: tuple[Bucket, ...]
    certificates: tuple[Certificate, ...]


class Lowered(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    instructions: tuple[tuple[Any, ...], ...]
    entry: tuple[str, ...]
    exit: tuple[str, ...]
    position: Position
    caps: Caps
    native: bool
    earlier: int


class PlanFile(BaseModel):
    """What is in a file, but for `sha256`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["zplan plan"]
    version: Literal[1]
    zplan: str
    hash: str
    decisions: Decisions
    programs: tuple[Lowered, ...]
    graph: Graph


def save(plan: Plan, path: str | Path) -> None:
    """Writes beside `path` first and then takes its place, so that a reader sees the old file or the whole new one."""
    content = _content(plan)
    content["sha256"] = _sha256(content)
    target = Path(path)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        try:
            with unfinished.open("w", encoding="utf-8") as file:
                json.dump(content, file, separators=(",", ":"))
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(target)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise SpecError(f"plan file {target} cannot be written: {error.strerror}") from None


def load(path: str | Path) -> Plan:
    """Reads what `save` wrote. Raises `SpecError` for what is foreign, cut short, changed, or of another version."""
    name = f"plan file {path}"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SpecError(f"{name} is no text: zplan did not write it") from None
    try:
        content = json.loads(text)
    except RecursionError:
        raise SpecError(f"{name} is nested too deep: zplan did not write it") from None
    except json.JSONDecodeError as error:
        if text.lstrip().startswith('{"format":"' + FORMAT):
            raise SpecError(f"{name} is cut short or damaged at character {error.pos}: {error.msg.lower()}") from None
        raise SpecError(f"{name} is no JSON: zplan did not write it") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise SpecError(f"{name} is JSON, but no plan of zplan (it has no format {FORMAT!r})")
    if content.get("version") != VERSION:
        raise SpecError(
            f"{name} is of version {content.get('version')}, and this zplan ({__version__}) reads version {VERSION}: "
            f"it was written by zplan {content.get('zplan')}"
        )
    if content.pop("sha256", None) != _sha256(content):
        raise SpecError(f"{name} was changed after it was written: its checksum does not match\ntry: plan again")
    try:
        file = PlanFile.model_validate_json(json.dumps(content))
        plan = _plan(file)
        for program in plan.programs:
            check(program)
    except ValidationError as error:
        first = error.errors()[0]
        raise SpecError(f"{name} does not hold a plan: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except CheckError as error:
        raise SpecError(f"{name} holds a program that breaks a law: {str(error).splitlines()[0]}") from None
    except (SpecError, LookupError, TypeError, ValueError) as error:
        raise SpecError(f"{name} does not hold a plan: {type(error).__name__}: {error}") from None
    if plan.hash != file.hash:
        raise SpecError(
            f"{name} was written by zplan {file.zplan}, and this is {__version__}: its plan reads back as another one "
            f"({plan.hash}, not {file.hash})\ntry: plan again"
        )
    return plan


def _content(plan: Plan) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "zplan": __version__,
        "hash": plan.hash,
        "decisions": Decisions(
            spec=plan.spec,
            stage=plan.stage,
            choices=dict(plan.choices),
            buckets=plan.ownership.buckets,
            certificates=plan.certificates,
        ).model_dump(mode="json"),
        "programs": [
            {
                "instructions": [_write(instruction) for instruction in program.instructions],
                "entry": program.entry,
                "exit": program.exit,
                "position": program.position.value,
                "caps": TypeAdapter(Caps).dump_python(program.caps, mode="json"),
                "native": program.native,
                "earlier": program.earlier,
            }
            for program in plan.programs
        ],
        "graph": TypeAdapter(Graph).dump_python(plan.graph, mode="json"),
    }


def _plan(file: PlanFile) -> Plan:
    decisions = file.decisions
    ownership = Ownership(decisions.buckets, decisions.spec.world_size)
    programs = tuple(
        Program(
            graph=file.graph,
            ownership=ownership,
            instructions=tuple(map(_read, lowered.instructions)),
            entry=lowered.entry,
            exit=lowered.exit,
            position=lowered.position,
            caps=lowered.caps,
            native=lowered.native,
            earlier=lowered.earlier,
        )
        for lowered in file.programs
    )
    if not programs:
        raise ValueError("there is no program")
    return Plan(
        graph=file.graph,
        spec=decisions.spec,
        stage=decisions.stage,
        choices=decisions.choices,
        ownership=ownership,
        programs=programs,
        certificates=decisions.certificates,
    )


def _write(instruction: Instruction) -> list[Any]:
    kind = type(instruction)
    return [_TAG[kind], *(getattr(instruction, name) for name in kind.__slots__)]


def _read(fields: tuple[Any, ...]) -> Instruction:
    tag, *values = fields
    if tag == "update":
        values = [tuple(values[0])]
    instruction: Instruction = TAGS[tag](*values)
    return instruction


def _sha256(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
