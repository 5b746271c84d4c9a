"""Spec: what a person asks for, checked before anything is traced."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from zplan.errors import SpecError
from zplan.planner.stages import parse_stage
from zplan.units import parse_size


class Schedule(BaseModel):
    """How collectives are placed. `prefetch` in buckets, `depth` in reductions in flight."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefetch: int = Field(default=1, ge=0)
    depth: int = Field(default=2, ge=1)
    native_all_reduce: bool = False


class Spec(BaseModel):
    """The decisions that do not depend on the model. `bucket` in bytes of whole parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: int
    world_size: int = Field(ge=1)
    bucket: int = Field(gt=0)
    schedule: Schedule = Schedule()

    @field_validator("stage", mode="before")
    @classmethod
    def _stage(cls, value: object) -> int:
        return parse_stage(value)

    @field_validator("bucket", mode="before")
    @classmethod
    def _bucket(cls, value: int | str) -> int:
        return parse_size(value, what="bucket")


def make_spec(*, prefetch: int, depth: int, native_all_reduce: bool, **options: Any) -> Spec:
    """Builds a spec; what is wrong with it comes as a `SpecError` that names the option."""
    try:
        schedule = Schedule(prefetch=prefetch, depth=depth, native_all_reduce=native_all_reduce)
        return Spec(schedule=schedule, **options)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "spec"
        raise SpecError(f"{where} {first.get('input')!r}: {first['msg'].lower()}") from None
