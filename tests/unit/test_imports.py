"""Planning needs no torch: importing the planner does not load it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import zplan


@pytest.mark.parametrize(
    "module", ["zplan", "zplan.units", "zplan.graph.ir", "zplan.planner.pipeline", "zplan.planner.plan"]
)
def test_planning_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'numpy'}} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_private_torch_names_live_in_one_file() -> None:
    """`torch._x`, `torch.y._z` and `from torch... import _w` stand in graph/compat.py alone."""
    package = Path(zplan.__file__).parent
    private = re.compile(r"\btorch(\.\w+)*\._(?!_)\w+|from torch[\w.]* import .*\b_\w+|from torch[\w.]*\._\w+")
    found = [
        f"{path.relative_to(package)}:{number}: {line.strip()}"
        for path in sorted(package.rglob("*.py"))
        if path.name != "compat.py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if private.search(line)
    ]
    assert found == []
    assert private.search((package / "graph" / "compat.py").read_text(encoding="utf-8"))
