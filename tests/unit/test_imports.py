"""Planning needs no torch: importing the planner does not load it."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module", ["zplan", "zplan.units", "zplan.graph.ir", "zplan.planner.pipeline", "zplan.planner.plan"]
)
def test_planning_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'numpy'}} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
