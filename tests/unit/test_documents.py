"""Documents are executed from top to bottom; what a block prints is what stands under it."""

import contextlib
import io
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<text>.*?)```\n)?", re.DOTALL)


# A name that the last block of each makes: it was run to its end.
@pytest.mark.parametrize(("document", "last"), [("tour.md", "step"), ("stages.md", "peaks")])
def test_a_document_prints_what_it_shows(request: pytest.FixtureRequest, document: str, last: str) -> None:
    path = DOCS / document
    update = request.config.getoption("--update-golden")
    shown = path.read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": path.stem}
    parts, end = [], 0
    for block in BLOCK.finditer(shown):
        printed = io.StringIO()
        line = shown.count("\n", 0, block.start("code"))
        # Blank lines before the code make line numbers in errors those of the file.
        code = compile("\n" * line + block["code"], str(path), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        found = "\n".join(row.rstrip() for row in printed.getvalue().splitlines())
        found += "\n" if found else ""
        if update:
            parts += [shown[end : block.end("code")], "```\n", f"\n```text\n{found}```\n" if found else ""]
            end = block.end()
        else:
            assert found == (block["text"] or ""), f"{document}, the block at line {line + 1}"
    assert last in names, f"{document} was not run to its end"
    if update:
        path.write_text("".join(parts) + shown[end:], encoding="utf-8")
