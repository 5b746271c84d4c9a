"""Saves, exported: transformers' own classes read them and compute the same."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import zplan
from tests.architectures import ARCHITECTURES, loss_fn
from tests.ranks.training import ADAMW, seed
from zplan.runtime.comm import Comm
from zplan.runtime.store import read_manifest


class Wrapped(nn.Module):
    """A transformers model under a name, and a head beside it; its embedding does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = ARCHITECTURES["gpt2"].make()
        self.lm.transformer.wpe.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, **batch: Any) -> Any:
        out = self.lm(**batch)
        out.loss = out.loss * self.scale.mean()
        return out


MAKE = {"gpt2": ARCHITECTURES["gpt2"].make, "llama": ARCHITECTURES["llama"].make, "wrapped": Wrapped}


def trained(comm: Comm, name: str, path: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Two steps and a save; returns the whole weights, and the logits of the whole model."""
    case = ARCHITECTURES["llama" if name == "llama" else "gpt2"]
    model = MAKE[name]()
    step = zplan.compile(model, loss_fn, case.batch(0), optimizer=ADAMW, group=comm.group, bucket=4_000, **options)
    for i in range(2):
        step(case.batch(seed(i, comm.rank)))
    step.save(path)
    inner = model.lm if name == "wrapped" else model
    with step.whole_parameters(), torch.no_grad():
        logits = inner.eval()(**case.batch(7)).logits
        if comm.rank == 0:
            inner.config.save_pretrained(f"{path}.config")
    return {"logits": logits, **step.full_state_dict()}


def logits(folder: Path, name: str = "gpt2", **options: Any) -> torch.Tensor:
    case = ARCHITECTURES["llama" if name == "llama" else "gpt2"]
    model = hf.AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    with torch.no_grad():
        return model(**case.batch(7)).logits


@pytest.mark.parametrize(
    ("name", "options"),
    [("gpt2", {"stage": 3}), ("llama", {"stage": 2}), ("gpt2", {"stage": 1, "precision": "bf16"})],
)
def test_from_pretrained_reads_what_was_trained(pool, tmp_path, name: str, options: dict[str, Any]) -> None:
    path = tmp_path / "save"
    expected = pool.run(2, trained, name, str(path), options)[0]
    made = zplan.export(path, tmp_path / "out", config=f"{path}.config")
    assert made.files == ("model.safetensors",)
    assert made.steps == 2
    assert torch.equal(logits(tmp_path / "out", name), expected["logits"])
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(tensor, expected[key]) and tensor.dtype == torch.float32 for key, tensor in found.items())
    assert made.tied == ({"lm_head.weight": "transformer.wte.weight"} if name == "gpt2" else {})
    assert set(found) | set(made.tied) == set(expected) - {"logits"}, "frozen, unused and buffers too"
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata()["format"] == "pt"


@pytest.fixture(scope="module")
def wrapped(pool, tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    path = tmp_path_factory.mktemp("wrapped") / "save"
    return path, pool.run(2, trained, "wrapped", str(path), {"stage": 3})[0]


def test_a_prefix_is_taken_off_and_what_is_not_under_it_is_left_out(wrapped, tmp_path) -> None:
    path, expected = wrapped
    made = zplan.export(path, tmp_path / "out", prefix="lm", config=f"{path}.config")
    assert made.left_out == ("scale",)
    assert torch.equal(logits(tmp_path / "out"), expected["logits"])
    with pytest.raises(zplan.SpecError, match=r"prefix 'ml\.' is that of no parameter in .*save; nearest: lm"):
        zplan.export(path, tmp_path / "other", prefix="ml.")


def test_shards_are_no_larger_than_asked_and_an_index_names_them(wrapped, tmp_path) -> None:
    path, expected = wrapped
    made = zplan.export(path, tmp_path / "out", prefix="lm", config=f"{path}.config", shard=20_000)
    assert len(made.files) > 2
    assert made.files[0] == f"model-00001-of-{len(made.files):05}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    largest = max(tensor.nbytes for name, tensor in expected.items() if name.startswith("lm."))
    for name in made.files:
        tensors = load_file(tmp_path / "out" / name)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= max(20_000, largest)
        assert {index["weight_map"][key] for key in tensors} == {name}
    assert index["metadata"]["total_size"] == made.nbytes
    assert torch.equal(logits(tmp_path / "out"), expected["logits"])


def test_floating_tensors_are_cast(wrapped, tmp_path) -> None:
    path, expected = wrapped
    zplan.export(path, tmp_path / "out", prefix="lm", dtype="bf16")
    found = load_file(tmp_path / "out" / "model.safetensors")
    name = "transformer.h.0.mlp.c_fc.weight"
    assert torch.equal(found[name], expected[f"lm.{name}"].bfloat16())


def test_what_is_wrong_is_named(wrapped, tmp_path) -> None:
    path, _ = wrapped
    with pytest.raises(zplan.SpecError, match="dtype 'bf61' is none of fp32, bf16, fp16, fp64; nearest: bf16"):
        zplan.export(path, tmp_path / "out", dtype="bf61")
    with pytest.raises(zplan.SpecError, match="shard 'big' is no size"):
        zplan.export(path, tmp_path / "out", shard="big")
    with pytest.raises(zplan.SpecError, match=r"has no config\.json to be copied"):
        zplan.export(path, tmp_path / "out", config=tmp_path)
    with pytest.raises(zplan.SpecError, match="there is no checkpoint"):
        zplan.export(tmp_path / "nothing", tmp_path / "out")
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").touch()
    with pytest.raises(zplan.SpecError, match="full is not empty, and nothing in it is replaced"):
        zplan.export(path, full)
    assert not (tmp_path / "out").exists()
    assert [each.name for each in full.iterdir()] == ["mine"]


def test_a_damaged_save_is_refused_by_its_file(pool, tmp_path) -> None:
    path = tmp_path / "save"
    pool.run(2, trained, "llama", str(path), {"stage": 2})
    damaged = path / read_manifest(path).folder / "rank-1.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(zplan.SpecError, match=r"rank-1\.safetensors is damaged"):
        zplan.export(path, tmp_path / "out")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["save", "save.config"]


KILLED = """
import os, signal, sys, zplan
def progress(phase, count):
    if phase == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)
zplan.export(sys.argv[1], sys.argv[2], shard=20_000, progress=progress)
"""


@pytest.mark.parametrize("phase", ["write", "commit"])
def test_an_export_that_is_killed_leaves_nothing_that_looks_whole(wrapped, tmp_path, phase: str) -> None:
    path, _ = wrapped
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), str(out), phase], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not out.exists()
    assert any(tmp_path.iterdir()), "it had begun"
    zplan.export(path, out)
    assert [each.name for each in tmp_path.iterdir()] == ["out"], "what the other left is gone"


FULL = """
import resource, sys, zplan
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
zplan.export(sys.argv[1], sys.argv[2])
"""


def test_a_full_disk_is_told_and_leaves_nothing(wrapped, tmp_path) -> None:
    path, _ = wrapped
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(path), str(tmp_path / "out")], capture_output=True, text=True, check=False
    )
    assert "StateError: export to" in done.stderr
    assert "cannot be written" in done.stderr
    assert not list(tmp_path.iterdir())


def test_from_the_command_line(wrapped, tmp_path) -> None:
    path, expected = wrapped
    words = [
        "export",
        str(path),
        "-o",
        str(tmp_path / "out"),
        "--prefix",
        "lm.",
        "--config",
        f"{path}.config",
        "--json",
    ]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "zplan", *words], capture_output=True, text=True, check=False, cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["files"] == ["model.safetensors"]
    assert "exported in" in done.stderr
    assert torch.equal(logits(tmp_path / "out"), expected["logits"])
