"""What the README shows is what the code prints."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import zplan
from examples import gpt_text
from zplan.planner.estimate import estimate, estimate_text

README = Path(__file__).parents[2] / "README.md"
LLAMA = Path(__file__).parents[1] / "golden" / "large" / "llama-70b-64-h100.txt"
PLAN_LINES, SCHEDULE_LINES, COMPARE_LINES = 8, 11, 5
Make = Callable[..., zplan.Plan]


@pytest.fixture(scope="module")
def make() -> Make:
    """`make(stage=..., ...)`: a plan of the demo's job."""
    work = gpt_text.job()
    batch = next(work.batches(0, 1))
    return lambda **options: zplan.plan(work.model, work.loss_fn, batch, optimizer=work.optimizer, **options)


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, object]:
    """The options of the README's file."""
    path = tmp_path / "zplan.toml"
    path.write_text(block("SPEC")[2], encoding="utf-8")
    return zplan.load_spec(path)


def block(name: str) -> re.Match[str]:
    found = re.search(
        rf"(<!-- {name} -->\n```(?:toml)?\n(?:\$ [^\n]*\n)?)(.*?)(```\n)", README.read_text(encoding="utf-8"), re.DOTALL
    )
    assert found is not None
    return found


def compare(request: pytest.FixtureRequest, name: str, text: str) -> None:
    expected = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    found = block(name)
    if request.config.getoption("--update-golden"):
        new = found.string.replace(found.group(), found[1] + expected + found[3])
        README.write_text(new, encoding="utf-8")
    else:
        assert found[2] == expected


def shown(text: str, lines: int) -> str:
    return "\n".join([*text.splitlines()[:lines], "..."])


def test_readme_shows_a_plan_and_its_schedule(request: pytest.FixtureRequest, make: Make) -> None:
    plan = make(stage=3, world_size=8, bucket="8MB")
    compare(request, "PLAN", shown(str(plan), PLAN_LINES))
    compare(request, "SCHEDULE", shown(str(plan.schedule), SCHEDULE_LINES))


def test_readme_compares_stages(request: pytest.FixtureRequest, make: Make) -> None:
    plans = [make(stage=stage, world_size=2, bucket="8MB") for stage in range(4)]
    compare(request, "COMPARE", shown(zplan.compare(plans), COMPARE_LINES))


def test_readme_shows_why_a_stage_was_chosen(
    request: pytest.FixtureRequest, make: Make, spec: dict[str, object]
) -> None:
    lines = str(make(**spec)).splitlines()
    # Each certificate up to what is alive there, and one tensor for each reason.
    asked = [line.partition("; alive")[0] for line in lines if re.match("budget|auto|  stage", line)]
    table = [line for line in lines if re.match(r"tensor|wte\.weight|wpe\.weight|blocks\.5\.norm1\.weight", line)]
    compare(request, "AUTO", "\n".join([*asked, "...", *table, "..."]))


def test_readme_shows_where_plans_part(request: pytest.FixtureRequest, make: Make, spec: dict[str, object]) -> None:
    compare(request, "DIFF", str(make(**spec).diff(make(**{**spec, "prefetch": 0}))))


def test_readme_estimates(request: pytest.FixtureRequest) -> None:
    table = estimate_text(estimate("7.5e9", 64)).split("\n\n")[1]
    compare(request, "ESTIMATE", f"{table}\n...")


def test_readme_shows_lines_of_the_golden_llama() -> None:
    golden = LLAMA.read_text(encoding="utf-8").splitlines()
    lines = [line for line in block("LLAMA")[2].splitlines() if line != "..."]
    assert lines
    assert [line for line in golden if line in lines] == lines
