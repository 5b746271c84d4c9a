"""Spec: what a person asks for, checked before anything is traced; from arguments or from a file."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from zplan.errors import SpecError, nearest, words_of
from zplan.planner.stages import AUTO, parse_stage
from zplan.precision import Dtype, Precision
from zplan.units import parse_size


class Rule(BaseModel):
    """What holds for the parameters whose names match `pattern`: `*` is any text, dots too, as in `fnmatchcase`.

    `stage`: 0 to 3. `bucket`: the most bytes they travel in together. `keep`: at stage 3, whether a whole parameter
    stays over the gap between forward and backward, which makes it stage 2 and prints as that. For each of the three,
    the first rule that matches and says it wins.

    >>> Rule("blocks.*.weight", stage=3)
    Rule(pattern='blocks.*.weight', stage=3, bucket=None, keep=None)
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pattern: str = Field(min_length=1)
    stage: int | None = None
    bucket: int | None = None
    keep: bool | None = None

    def __init__(self, pattern: Any = None, /, **says: Any) -> None:
        if pattern is not None:
            says["pattern"] = pattern
        name = f"rule {says.get('pattern', '')!r}"
        try:
            super().__init__(**says)
        except ValidationError as error:
            raise SpecError(f"{name}: {words_of(error, list(Rule.model_fields))}") from None
        if (self.stage, self.bucket, self.keep) == (None, None, None):
            raise SpecError(f"{name} says nothing: give it a stage, a bucket or keep")

    @field_validator("stage", mode="before")
    @classmethod
    def _stage(cls, value: object) -> int | None:
        return None if value is None else parse_stage(value)

    @field_validator("bucket", mode="before")
    @classmethod
    def _bucket(cls, value: Any) -> int | None:
        return None if value is None else parse_size(value, what="bucket")


class Spec(BaseModel):
    """What is wanted. Sizes are bytes, or text such as "25MB" and "80GiB".

    `stage`: of every tensor that no rule and no annotation gives one; "auto" is the lowest that fits `memory`, the most
    bytes that one rank may hold at once. `device`: the type that runs it, which may be another than the one it is
    traced on. `bucket`: of whole parameters that travel together. `prefetch`: in buckets. `depth`: reductions that may
    be in flight. `micro_batches`: batches of one optimizer step. `precision`: a dtype, or a `Precision`; None: as the
    model's own parameters are.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: int | Literal["auto"] = "auto"
    world_size: int = Field(default=1, ge=1)
    device: Literal["cpu", "cuda"] = "cpu"
    memory: int | None = None
    bucket: int = parse_size("25MB")
    prefetch: int = Field(default=1, ge=0)
    depth: int = Field(default=2, ge=1)
    micro_batches: int = Field(default=1, ge=1)
    precision: Precision | None = None
    rules: tuple[Rule, ...] = ()

    @field_validator("precision", mode="before")
    @classmethod
    def _precision(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            return Precision(**value)
        if value is None or isinstance(value, Precision):
            return value
        known = get_args(Dtype)
        # torch.bfloat16 is as clear as "bf16".
        value = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}.get(str(value), value)
        if value not in known:
            near = nearest(value, list(known)) if isinstance(value, str) else ""
            raise SpecError(f"precision {value!r} is none of {', '.join(known)}{near}, and no zplan.Precision(...)")
        return Precision(compute=value)

    @field_validator("stage", mode="before")
    @classmethod
    def _stage(cls, value: object) -> int | str:
        if value == AUTO:
            return AUTO
        try:
            return parse_stage(value)
        except SpecError as error:
            raise SpecError(f"{error}, and 'auto'") from None

    @field_validator("memory", mode="before")
    @classmethod
    def _memory(cls, value: Any) -> int | None:
        return None if value is None else parse_size(value, what="memory")

    @field_validator("bucket", mode="before")
    @classmethod
    def _bucket(cls, value: Any) -> int:
        return parse_size(value, what="bucket")

    @property
    def reduce(self) -> str:
        """The dtype that gradients of parameters with masters are reduced in; "" where each keeps its own."""
        return self.precision.reduced if self.precision else ""

    @property
    def native(self) -> bool:
        """Whether collectives are the backend's own: on all devices but the CPU, whose gloo has no reduce-scatter."""
        return self.device != "cpu"


def make_spec(**options: Any) -> Spec:
    """Builds a spec; what is wrong with it comes as a `SpecError` that names the option and what is near it."""
    try:
        return Spec(**options)
    except ValidationError as error:
        raise SpecError(words_of(error, list(Spec.model_fields))) from None


def load_spec(path: str | Path) -> dict[str, Any]:
    """Reads a TOML or JSON file of options; returns those it holds, as arguments for `plan` and `compile`.

    Rules are a list: `[[rules]]` with `pattern = "wte.*"` and `stage = 0`. Raises `SpecError` with the file's name.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{file} cannot be read: {error}") from None
    try:
        content = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise SpecError(f"{file} is no {'JSON' if file.suffix == '.json' else 'TOML'}: {error}") from None
    if not isinstance(content, dict):
        raise SpecError(f"{file} holds a {type(content).__name__}, and must hold options by name")
    try:
        spec = make_spec(**content)
    except SpecError as error:
        raise SpecError(f"{file}: {error}") from None
    return {name: getattr(spec, name) for name in spec.model_fields_set}
