"""docs/tour.md is executed from top to bottom; what a block prints is what stands under it."""

import contextlib
import io
import re
from pathlib import Path

import pytest

TOUR = Path(__file__).parents[2] / "docs" / "tour.md"
BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<text>.*?)```\n)?", re.DOTALL)


def test_the_tour_prints_what_it_shows(request: pytest.FixtureRequest) -> None:
    update = request.config.getoption("--update-golden")
    tour = TOUR.read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "tour"}
    parts, end = [], 0
    for block in BLOCK.finditer(tour):
        printed = io.StringIO()
        line = tour.count("\n", 0, block.start("code"))
        # Blank lines before the code make line numbers in errors those of the file.
        code = compile("\n" * line + block["code"], str(TOUR), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        found = "\n".join(row.rstrip() for row in printed.getvalue().splitlines())
        found += "\n" if found else ""
        if update:
            parts += [tour[end : block.end("code")], "```\n", f"\n```text\n{found}```\n" if found else ""]
            end = block.end()
        else:
            assert found == (block["text"] or ""), f"{TOUR.name}, the block at line {line + 1}"
    assert names.keys() > {"step", "plan"}, "the tour was not run to its end"
    if update:
        TOUR.write_text("".join(parts) + tour[end:], encoding="utf-8")
