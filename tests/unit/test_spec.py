import json
from typing import Any

import pytest
from pydantic import ValidationError

from zplan.errors import SpecError
from zplan.planner.spec import Rule, Spec, load_spec, make_spec

GOOD = {"stage": 3, "world_size": 4, "bucket": "25MB", "prefetch": 1, "depth": 2}


def spec(**options: Any) -> Spec:
    return make_spec(**{**GOOD, **options})


def test_make_spec() -> None:
    assert spec(stage="2") == Spec(stage=2, world_size=4, bucket=25_000_000, prefetch=1, depth=2)


def test_a_dtype_of_torch_is_as_good_as_its_short_name() -> None:
    import torch

    assert spec(precision=torch.bfloat16) == spec(precision="bf16")


def test_what_is_not_said_has_a_default() -> None:
    assert make_spec() == Spec(stage="auto", world_size=1, device="cpu", memory=None, bucket=25_000_000, rules=())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 4}, "stage 4 does not exist: there are 0, 1, 2 and 3"),
        ({"stage": "lowest"}, "stage 'lowest' does not exist: there are 0, 1, 2 and 3"),
        ({"world_size": 0}, "world_size 0: input should be greater than or equal to 1"),
        ({"world_size": 2.5}, "world_size 2.5: input should be a valid integer"),
        ({"bucket": "large"}, "bucket 'large' is no size: write bytes, '25MB' or '80GiB'"),
        ({"bucket": 0}, "bucket 0 must be above zero"),
        ({"memory": "lots"}, "memory 'lots' is no size: write bytes, '25MB' or '80GiB'"),
        ({"memory": -1}, "memory -1 must be above zero"),
        ({"device": "tpu"}, "device 'tpu': input should be 'cpu' or 'cuda'"),
        ({"prefetch": -1}, "prefetch -1: input should be greater than or equal to 0"),
        ({"depth": 0}, "depth 0: input should be greater than or equal to 1"),
        (
            {"precision": "bf61"},
            "precision 'bf61' is none of bf16, fp16, fp32; nearest: bf16, fp16",
        ),
        ({"precision": 16}, "precision 16 is none of bf16, fp16, fp32, and no zplan.Precision(...)"),
        (
            {"precision": {"compute": "bf16", "redcue": "fp32"}},
            "precision: there is no option 'redcue'; nearest: reduce",
        ),
        ({"precision": {"compute": "int8"}}, "precision: compute 'int8': input should be 'bf16', 'fp16' or 'fp32'"),
        (
            {"precision": {"compute": "bf16", "reduce": "fp16"}},
            "precision: reduce 'fp16' is neither fp32 nor what is computed in, bf16",
        ),
        ({"precision": {"compute": "bf16", "modules": {"x": "fp8"}}}, "precision: modules.x 'fp8': input should be"),
        (
            {"precision": {"compute": "fp16", "loss_scale": 0}},
            "precision: loss_scale 0: input should be greater than 0",
        ),
        ({"bugdet": "80GB"}, "there is no option 'bugdet'; nearest: bucket"),
        ({"xyz": 1}, "there is no option 'xyz'; there are stage, world_size, device, memory, bucket"),
        ({"rules": [{"stage": 1}]}, "rule '': pattern is missing"),
        ({"rules": [{"pattern": "a", "stgae": 1}]}, "rule 'a': there is no option 'stgae'; nearest: stage"),
        ({"rules": "wte"}, "rules 'wte': input should be a valid"),
    ],
)
def test_make_spec_refuses_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec(**options)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ({}, "rule 'wte.*' says nothing: give it a stage, a bucket or keep"),
        ({"stage": 5}, "stage 5 does not exist: there are 0, 1, 2 and 3"),
        ({"stage": "auto"}, "stage 'auto' is for the whole plan: give 0, 1, 2 or 3 here"),
        ({"bucket": "big"}, "bucket 'big' is no size"),
        ({"keep": "perhaps"}, "rule 'wte.*': keep 'perhaps': input should be a valid boolean"),
        ({"stage": 1, "kepe": True}, "rule 'wte.*': there is no option 'kepe'; nearest: keep"),
    ],
)
def test_a_rule_refuses_by_name(says: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        Rule("wte.*", **says)
    assert str(caught.value).startswith(words)


def test_a_rule_is_written_by_position_or_by_name() -> None:
    assert Rule("wte.*", stage=0) == Rule(**{"pattern": "wte.*", "stage": "0"})
    assert make_spec(rules=[{"pattern": "wte.*", "bucket": "8MB"}]).rules == (Rule("wte.*", bucket=8_000_000),)


def test_an_empty_pattern_is_refused() -> None:
    with pytest.raises(SpecError, match="rule '': pattern '': string should have at least 1 character"):
        Rule("", stage=1)


def test_a_spec_does_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        spec().stage = 1  # type: ignore[misc]


TOML = """
stage = "auto"
memory = "80GB"

[[rules]]
pattern = "wte.*"
stage = 0
"""


def test_a_file_holds_options(tmp_path) -> None:
    (tmp_path / "spec.toml").write_text(TOML)
    content = {"stage": "auto", "memory": "80GB", "rules": [{"pattern": "wte.*", "stage": 0}]}
    (tmp_path / "spec.json").write_text(json.dumps(content))
    wanted = {"stage": "auto", "memory": 80_000_000_000, "rules": (Rule("wte.*", stage=0),)}
    assert load_spec(tmp_path / "spec.toml") == load_spec(str(tmp_path / "spec.json")) == wanted


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("spec.toml", "stage = ", "spec.toml is no TOML: "),
        ("spec.json", "{", "spec.json is no JSON: "),
        ("spec.json", "[1]", "spec.json holds a list, and must hold options by name"),
        ("spec.toml", "bukcet = 1", "spec.toml: there is no option 'bukcet'; nearest: bucket"),
        ("spec.toml", "bucket = true", "spec.toml: bucket True is no size"),
        ("spec.toml", '[[rules]]\npattern = "a"\nstage = 7', "spec.toml: stage 7 does not exist"),
    ],
)
def test_a_file_is_refused_by_name(tmp_path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecError) as caught:
        load_spec(tmp_path / name)
    assert str(caught.value).startswith(f"{tmp_path}/{words}")


def test_a_file_that_is_not_there(tmp_path) -> None:
    with pytest.raises(SpecError, match=r"none.toml cannot be read: .*No such file"):
        load_spec(tmp_path / "none.toml")
