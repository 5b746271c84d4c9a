"""docs/tour.md is true: its blocks run in order in one namespace, and print what the page says they print.

    pytest tests/unit/test_tour.py -m "slow or not slow" --update-golden

writes what they print into the page. Blocks whose first line names a file (`# train.py`) are that file, put together
in the order of the page; the shell block runs beside it.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

TOUR = Path(__file__).parents[2] / "docs" / "tour.md"
FENCED = re.compile(r"^```(?P<language>\w+)\n(?P<source>.*?)^```\n", re.MULTILINE | re.DOTALL)
OUTPUT = re.compile(r"\n```text\n(?P<printed>.*?)^```\n", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# (?P<file>\w+\.py)")

# From a block's source and the line of the page on which it starts (from 0) to what it prints.
Runner = Callable[[str, int], str]


def render(page: str, runners: Mapping[str, Runner]) -> str:
    """The page with what its blocks print behind them; blocks in other languages are left as they are.

    Blocks run from top to bottom, on the lines that they have in the page that is returned.
    """
    written = ""
    at = 0
    while block := FENCED.search(page, at):
        written += page[at : block.end()]
        at = block.end()
        if run := runners.get(block["language"]):
            line = written.count("\n") - block["source"].count("\n") - 1
            printed = run(block["source"], line)
            if shown := OUTPUT.match(page, at):
                at = shown.end()
            written += f"\n```text\n{printed}```\n" if printed else ""
    return written + page[at:]


def python(file: Path) -> Runner:
    """Runs blocks in one namespace; errors, and the lines that plans print, are those of `file`."""
    namespace: dict[str, object] = {"__name__": "tour"}

    def run(source: str, line: int) -> str:
        printed = StringIO()
        code = compile("\n" * line + source, str(file), "exec")
        with redirect_stdout(printed):
            exec(code, namespace)
        return printed.getvalue()

    return run


def shell(folder: Path) -> Runner:
    """Runs commands in `folder`, as somebody who is in the environment of these tests would."""
    paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": os.pathsep.join(paths)}

    def run(source: str, line: int) -> str:
        command = ["sh", "-e", "-c", source]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"line {line} of the page: {done.stderr}"
        return done.stdout

    return run


def files(page: str) -> Iterator[tuple[str, str]]:
    """The files that the page is made of, by name."""
    found: dict[str, str] = {}
    for block in FENCED.finditer(page):
        if named := NAMED.match(block["source"]):
            found[named["file"]] = found.get(named["file"], "") + block["source"]
    yield from found.items()


def compare(request: pytest.FixtureRequest, rendered: str) -> None:
    if request.config.getoption("--update-golden"):
        TOUR.write_text(rendered, encoding="utf-8")
    assert rendered.splitlines() == TOUR.read_text(encoding="utf-8").splitlines()


def test_the_tour_prints_what_it_says(request: pytest.FixtureRequest) -> None:
    compare(request, render(TOUR.read_text(encoding="utf-8"), {"python": python(TOUR)}))


@pytest.mark.slow
def test_the_tour_under_torchrun(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    page = TOUR.read_text(encoding="utf-8")
    for name, source in files(page):
        (tmp_path / name).write_text(source, encoding="utf-8")
    compare(request, render(page, {"sh": shell(tmp_path)}))


PAGE = """\
# A page

```python
a = 2
print(a)
```

```text
2
```

```python
a += 1
```

Between.

```python
print(a)
print("x")
```

```text
3
x
```
"""


def test_a_page_that_is_true_is_left_as_it_is() -> None:
    assert render(PAGE, {"python": python(Path("page.md"))}) == PAGE
    assert render(PAGE, {}) == PAGE


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("```text\n2\n```", "```text\n4\n```"),
        ("3\nx\n", "3\n"),
        ("3\nx\n", "3\nx\ny\n"),
        ("3\nx\n", "3\n x\n"),
        ("\n```text\n2\n```\n", ""),
        ("a += 1\n```\n", "a += 1\n```\n\n```text\nnothing\n```\n"),
    ],
)
def test_a_page_that_is_not_true_is_put_right(old: str, new: str) -> None:
    page = PAGE.replace(old, new)
    assert page != PAGE
    assert render(page, {"python": python(Path("page.md"))}) == PAGE


def test_errors_have_the_lines_of_the_page() -> None:
    page = PAGE.replace('print("x")', "1 / 0").replace("2\n```\n\n", "several\nlines\n```\n\n", 1)
    with pytest.raises(ZeroDivisionError) as caught:
        render(page, {"python": python(Path("page.md"))})
    last = caught.traceback[-1]
    assert (Path(last.path).name, last.lineno) == ("page.md", PAGE.split("\n").index('print("x")'))


def test_blocks_make_files_in_order() -> None:
    page = "```python\n# a.py\nx = 1\n```\n\n```python\ny = 2\n```\n\n```python\n# a.py, continued\nz = 3\n```\n"
    assert dict(files(page)) == {"a.py": "# a.py\nx = 1\n# a.py, continued\nz = 3\n"}
