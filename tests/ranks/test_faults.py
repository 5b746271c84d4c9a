"""Killed, stopped and starved ranks: what the others say, and how the run goes on."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks.fault_job import STEPS, go
from zplan.runtime.comm import Comm

HERE = Path(__file__)
ROOT = HERE.parents[2]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
JOB = str(HERE.with_name("fault_job.py"))


def unbroken(comm: Comm, stage: int, steps: int) -> dict[str, torch.Tensor]:
    return go(None, steps, stage=stage, group=comm.group)


def restarted(tmp_path: Path, world: int, *options: str, restarts: int) -> subprocess.CompletedProcess[str]:
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", f"--max-restarts={restarts}"]
    return subprocess.run(
        [sys.executable, *command, JOB, str(tmp_path / "saves"), str(tmp_path / "result.safetensors"), *options],
        env=ENV, capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("world", "stage", "kills", "steps", "within"),
    [
        (2, 3, 2, STEPS, 0.6),
        pytest.param(2, 2, 20, 400, 1.2, marks=pytest.mark.slow),
        pytest.param(3, 1, 4, 60, 1.2, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed_goes_on_from_its_last_save(pool, tmp_path, world, stage, kills, steps, within) -> None:
    """SIGKILL to a random rank at a random moment of training, saves included; the launcher starts all of them again.
    At the end the weights are those of a run that never stopped, bit for bit."""
    options = [f"--stage={stage}", f"--kills={kills}", f"--steps={steps}", f"--within={within}"]
    done = restarted(tmp_path, world, *options, restarts=kills + 1)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count('"attempt"') == kills + 1, "as many restarts as kills"
    found = load_file(tmp_path / "result.safetensors")
    for weights in pool.run(world, unbroken, stage, steps):
        assert list(sorted(weights)) == sorted(found)
        for name, tensor in weights.items():
            assert torch.equal(found[name], tensor), name


def test_a_stopped_rank_is_given_up_after_the_timeout_by_the_name_of_the_collective(tmp_path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "one"}
    command = [sys.executable, JOB, str(tmp_path / "saves"), str(tmp_path / "result"), "--hang=3", "--timeout=10"]
    ranks = [
        subprocess.Popen(command, env={**ENV, **launched, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        _, words = ranks[0].communicate(timeout=240)
        assert ranks[0].returncode not in (0, None)
        assert ranks[1].poll() is None, "it is there, and answers nothing"
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGKILL)
            rank.wait()
            if rank.stderr is not None:
                rank.stderr.close()
    assert "StepError: instruction " in words
    assert "of bucket b" in words
    assert "another rank has ended or hangs: look at its own error" in words


STARVED = """
import resource, sys, torch, zplan
from functools import partial
from torch import nn
def limit(more):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, resource.RLIM_INFINITY))
torch.set_num_threads(1)
class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, {width})
    def forward(self, x):
        return self.up(x).square().mean()
model, batch = Wide(), torch.ones({rows}, 8)
small = nn.Linear(8, 1)
zplan.compile(small, lambda m, b: m(b).sum(), batch, optimizer=torch.optim.SGD, stage=0)
if {compiles}:
    limit(40 << 20)
step = zplan.compile(model, lambda m, b: m(b), batch, optimizer=partial(torch.optim.AdamW, lr=1e-3), stage=0)
for _ in range(2):
    step(batch)
limit(10 << 20)
{what}
"""


@pytest.mark.parametrize(
    ("compiles", "width", "rows", "what", "words"),
    [
        (
            False,
            400_000,
            64,
            "step(batch)",
            r"StepError: instruction \d+, forward of up: aten\.addmm\.default failed: out of memory: RuntimeError",
        ),
        (True, 4_000_000, 1, "", "StateError: out of memory while b0 of 2 buckets was laid out, 122.1 MiB"),
        pytest.param(
            False,
            4_000_000,
            1,
            "step.full_state_dict()",
            "StateError: out of memory while full_state_dict made b0 whole",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_want_of_memory_says_what_was_being_done(compiles, width, rows, what, words) -> None:
    code = STARVED.format(compiles=compiles, width=width, rows=rows, what=what)
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(words, done.stderr), done.stderr[-2000:]
    assert "try: a higher stage, more ranks" in done.stderr
