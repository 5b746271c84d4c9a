"""Precision: what people write about the dtypes of a run."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zplan.errors import SpecError, words_of

Dtype = Literal["bf16", "fp16", "fp32"]


class Precision(BaseModel):
    """What a model computes in; trained parameters are held and updated in fp32, and so are the optimizer's states.

    `compute`: the dtype of parameters in forward and backward, and of what a gather carries; floating inputs of the
    model are cast to it, buffers are not. `reduce`: what a reduction of gradients carries; None: the same.
    `modules`: another compute dtype by module name (`fnmatchcase`; the innermost module that a pattern matches decides,
    and of several patterns the first): floating inputs of such a module are cast to it, its outputs back. Modules with
    running statistics (BatchNorm) keep the dtypes they have, unless a pattern says otherwise. fp16 scales the loss by
    `loss_scale`, halves that when gradients are not finite, which skips the update on every rank, and doubles it after
    `growth_interval` steps without.

    >>> Precision(compute="bf16", modules={"*.norm": "fp32"}).reduced
    'bf16'
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    compute: Dtype
    reduce: Dtype | None = None
    modules: Mapping[str, Dtype] = Field(default_factory=dict)
    loss_scale: float = Field(default=65536.0, gt=0, allow_inf_nan=False)
    growth_interval: int = Field(default=2000, ge=1)

    def __init__(self, **says: Any) -> None:
        try:
            super().__init__(**says)
        except ValidationError as error:
            raise SpecError(f"precision: {words_of(error, list(Precision.model_fields))}") from None
        if self.reduce not in (None, self.compute, "fp32"):
            raise SpecError(
                f"precision: reduce {self.reduce!r} is neither fp32 nor what is computed in, {self.compute}"
            )

    @property
    def reduced(self) -> str:
        """The dtype of gradients on the wire."""
        return self.reduce or self.compute

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled: fp16 has too few exponents for small gradients."""
        return "fp16" in (self.compute, *self.modules.values())
