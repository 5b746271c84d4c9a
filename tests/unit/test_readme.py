"""What the README shows is what the code prints."""

import re
from pathlib import Path

import pytest

import zplan
from examples import gpt_text

README = Path(__file__).parents[2] / "README.md"
PLAN_LINES, SCHEDULE_LINES = 14, 24


@pytest.fixture(scope="module")
def plans() -> dict[tuple[int, int], zplan.Plan]:
    work = gpt_text.job()
    batch = next(work.batches(0, 1))
    asked = [(3, 8), *((stage, 2) for stage in range(4))]
    return {
        (stage, world): zplan.plan(
            work.model, work.loss_fn, batch, optimizer=work.optimizer, stage=stage, world_size=world, bucket="8MB"
        )
        for stage, world in asked
    }


def shown(text: str, lines: int) -> str:
    return "\n".join([line.rstrip() for line in text.splitlines()[:lines]] + ["..."])


@pytest.mark.parametrize("name", ["SCHEDULE", "PLAN", "COMPARE"])
def test_readme_shows_what_is_printed(plans, request: pytest.FixtureRequest, name: str) -> None:
    expected = {
        "SCHEDULE": lambda: shown(str(plans[3, 8].schedule), SCHEDULE_LINES),
        "PLAN": lambda: shown(str(plans[3, 8]), PLAN_LINES),
        "COMPARE": lambda: "\n".join(
            line.rstrip() for line in zplan.compare([plans[stage, 2] for stage in range(4)]).splitlines()
        ),
    }[name]()
    text = README.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- {name} -->\n```\n(?:\$ [^\n]*\n)?)(.*?)(\n```\n)", re.DOTALL)
    found = pattern.search(text)
    assert found is not None
    if request.config.getoption("--update-golden"):
        README.write_text(text.replace(found.group(), found.group(1) + expected + found.group(3)), encoding="utf-8")
    else:
        assert found.group(2) == expected
