"""The figures of the ZeRO paper (arXiv 1910.02054): table 1, figure 1, and the largest models of section 5."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zplan.errors import SpecError
from zplan.planner.estimate import RECIPES, Estimate, estimate, estimate_json, estimate_text, largest

# GB per GPU at stages 1, 2 and 3, by ranks, as printed.
TABLE = {
    "7.5B": {
        1: ("120", "120", "120"),
        4: ("52.5", "41.3", "30"),
        16: ("35.6", "21.6", "7.5"),
        64: ("31.4", "16.6", "1.88"),
        256: ("30.4", "15.4", "0.47"),
        1024: ("30.1", "15.1", "0.12"),
    },
    "128B": {
        1: ("2048", "2048", "2048"),
        4: ("896", "704", "512"),
        16: ("608", "368", "128"),
        64: ("536", "284", "32"),
        256: ("518", "263", "8"),
        1024: ("513", "257", "2"),
    },
    "1T": {
        1: ("16000", "16000", "16000"),
        4: ("7000", "5500", "4000"),
        16: ("4750", "2875", "1000"),
        64: ("4187", "2218", "250"),
        256: ("4046", "2054", "62.5"),
        1024: ("4011", "2013", "15.6"),
    },
}
CELLS = [
    (model, world, stage, figure)
    for model, rows in TABLE.items()
    for world, row in rows.items()
    for stage, figure in enumerate(row, start=1)
]


def total(model: str, world: int, stage: int) -> float:
    return estimate(model, world)[stage].total_nbytes / 1e9


@pytest.mark.parametrize(("model", "world", "stage", "figure"), CELLS)
def test_estimate_is_the_table_of_the_paper(model: str, world: int, stage: int, figure: str) -> None:
    """The paper rounds 7.5B and truncates the others."""
    digits = len(figure.partition(".")[2])
    off = total(model, world, stage) - float(figure)
    if model == "7.5B":
        assert abs(off) <= 0.5 * 10**-digits + 1e-9
    else:
        assert 0 <= off < 10**-digits


def test_there_are_54_figures() -> None:
    assert len(CELLS) == 54


@pytest.mark.parametrize(("model", "gigabytes"), [("7.5B", 120), ("128B", 2048), ("1T", 16000)])
@pytest.mark.parametrize("world", [1, 4, 1024])
def test_stage_0_holds_16_bytes_a_parameter(model: str, world: int, gigabytes: int) -> None:
    assert total(model, world, 0) == gigabytes


def test_a_stage_by_its_parts() -> None:
    parts = [(each.parameter_nbytes, each.gradient_nbytes, each.state_nbytes) for each in estimate(6400, 64)]
    whole, shard, states = 2 * 6400, 2 * 100, 12 * 100
    assert parts == [(whole, whole, 12 * 6400), (whole, whole, states), (whole, shard, states), (shard, shard, states)]
    assert [each.stage for each in estimate(6400, 64)] == [0, 1, 2, 3]


def test_a_share_is_rounded_up_to_a_whole_parameter() -> None:
    assert [each.total_nbytes for each in estimate(10, 3)] == [160, 20 + 20 + 12 * 4, 20 + 14 * 4, 16 * 4]


def test_fp32_holds_no_second_copy() -> None:
    parts = [
        (each.parameter_nbytes, each.gradient_nbytes, each.state_nbytes)
        for each in estimate(1000, 10, precision="fp32")
    ]
    assert parts == [(4000, 4000, 8000), (4000, 4000, 800), (4000, 400, 800), (400, 400, 800)]
    assert [each.ideal_nbytes for each in estimate(1000, 10, precision="fp32")] == [8000, 8000, 8000, 12000]


def test_k_replaces_the_optimizer_states_of_the_recipe() -> None:
    assert estimate(1000, 1, k=8)[0].state_nbytes == 8000
    assert estimate(1000, 1, k=0)[0].total_nbytes == 4000
    assert estimate(1000, 1, k=12) == estimate(1000, 1)


@pytest.mark.parametrize(("stage", "model"), [(0, "2.0"), (1, "7.6"), (2, "14.4"), (3, "128.0")])
def test_largest_models_are_those_of_the_paper(stage: int, model: str) -> None:
    assert f"{largest('32GB', 64, stage) / 1e9:.1f}" == model


def test_largest_of_fp32_and_of_k() -> None:
    assert largest(16000, 1, 0, precision="fp32") == 1000
    assert largest(12000, 1, "0", k=8) == 1000


def test_nothing_fits_where_memory_is_too_small() -> None:
    assert [largest(15, 64, stage) for stage in range(4)] == [0, 0, 0, 0]


@pytest.mark.parametrize("world", [2, 3, 64, 1000])
def test_traffic_is_that_of_the_paper(world: int) -> None:
    psi = 2 * 7_500_000_000
    estimates = estimate(7.5e9, world)
    assert [each.ideal_nbytes for each in estimates] == [2 * psi, 2 * psi, 2 * psi, 3 * psi]
    for each in estimates:
        assert each.sent_nbytes == each.ideal_nbytes * (world - 1) / world


def test_traffic_of_several_micro_batches() -> None:
    psi = 2 * 1000
    assert [each.ideal_nbytes // psi for each in estimate(1000, 10, micro_batches=4)] == [2, 2, 5, 12]
    assert [each.sent_nbytes for each in estimate(1000, 10, micro_batches=4)] == [3600, 3600, 9000, 21600]
    assert [each.total_nbytes for each in estimate(1000, 10, micro_batches=4)] == [
        each.total_nbytes for each in estimate(1000, 10)
    ]


@pytest.mark.parametrize("precision", list(RECIPES))
def test_one_rank_shares_and_sends_nothing(precision: str) -> None:
    estimates = estimate("1B", 1, precision=precision, micro_batches=3)
    assert [each.sent_nbytes for each in estimates] == [0, 0, 0, 0]
    assert [each.total_nbytes for each in estimates] == [16 * 10**9] * 4


recipes = st.fixed_dictionaries(
    {"precision": st.sampled_from(list(RECIPES)), "k": st.none() | st.integers(min_value=0, max_value=20)}
)
counts = st.integers(min_value=1, max_value=10**13)
worlds = st.integers(min_value=1, max_value=10**5)


@given(params=counts, world=worlds, more=worlds, recipe=recipes)
def test_memory_never_grows_with_the_stage_or_the_world(
    params: int, world: int, more: int, recipe: dict[str, Any]
) -> None:
    totals = [each.total_nbytes for each in estimate(params, world, **recipe)]
    assert totals == sorted(totals, reverse=True)
    for here, there in zip(totals, estimate(params, world + more, **recipe), strict=True):
        assert there.total_nbytes <= here


@given(params=counts, world=worlds, micro_batches=st.integers(min_value=1, max_value=100), recipe=recipes)
def test_what_is_sent_is_the_ideal_times_its_factor(
    params: int, world: int, micro_batches: int, recipe: dict[str, Any]
) -> None:
    for each in estimate(params, world, micro_batches=micro_batches, **recipe):
        assert 0 <= each.sent_nbytes * world - each.ideal_nbytes * (world - 1) < world


@given(
    memory=st.integers(min_value=1, max_value=10**6) | st.integers(min_value=1, max_value=10**13),
    world=st.integers(min_value=1, max_value=70) | worlds,
    stage=st.sampled_from([0, 1, 2, 3]),
    recipe=recipes,
)
def test_largest_is_the_inverse_of_estimate(memory: int, world: int, stage: int, recipe: dict[str, Any]) -> None:
    most = largest(memory, world, stage, **recipe)
    assert most == 0 or estimate(most, world, **recipe)[stage].total_nbytes <= memory
    assert estimate(most + 1, world, **recipe)[stage].total_nbytes > memory


@given(params=counts, world=worlds, stage=st.sampled_from([0, 1, 2, 3]), recipe=recipes)
def test_a_model_fits_in_what_it_needs(params: int, world: int, stage: int, recipe: dict[str, Any]) -> None:
    needed = estimate(params, world, **recipe)[stage].total_nbytes
    assert largest(needed, world, stage, **recipe) >= params


TEXT = """\
estimate: 7.5B parameters (7500000000), world=64 precision=mixed (2 + 2 + 12 bytes per parameter) micro-batches=1
GB per rank, 32.00 GB of memory

stage  parameters  gradients  optimizer states   total   sent  ideal         fits  largest model
0           15.00      15.00             90.00  120.00  29.53  30.00  2 psi    no             2B
1           15.00      15.00              1.41   31.41  29.53  30.00  2 psi   yes          7.64B
2           15.00       0.23              1.41   16.64  29.53  30.00  2 psi   yes          14.4B
3            0.23       0.23              1.41    1.88  44.30  45.00  3 psi   yes           128B

GB = 1e9 bytes; formulas of Rajbhandari et al., arXiv 1910.02054, sections 3, 5 and 7; activations, buffers and \
fragmentation are not in it
sent per rank and optimizer step, times (N-1)/N = 63/64; ideal: without that factor, as the paper prints it; \
psi = 15.00 GB of parameters
With one micro-batch, a plan of stage 1 gives gradients back bucket by bucket, as stage 2 does: its row is the \
paper's bound."""


def test_the_text() -> None:
    assert estimate_text(estimate("7.5B", 64), memory="32GB") == TEXT


def test_the_text_without_memory() -> None:
    lines = estimate_text(estimate("10M", 4, precision="fp32", k=4, micro_batches=2)).splitlines()
    assert lines[:8] == [
        "estimate: 10M parameters (10000000), world=4 precision=fp32 (4 + 4 + 4 bytes per parameter) micro-batches=2",
        "GB per rank",
        "",
        "stage  parameters  gradients  optimizer states  total  sent  ideal",
        "0            0.04       0.04              0.04   0.12  0.06   0.08  2 psi",
        "1            0.04       0.04              0.01   0.09  0.06   0.08  2 psi",
        "2            0.04       0.01              0.01   0.06  0.09   0.12  3 psi",
        "3            0.01       0.01              0.01   0.03  0.18   0.24  6 psi",
    ]
    assert lines[-1].startswith("sent per rank")


def test_the_text_is_ascii_and_names_what_fits_to_the_byte() -> None:
    model = estimate(1000, 1)
    assert estimate_text(model, memory=16000).isascii()
    assert estimate_text(model, memory=16000).count(" yes ") == 4
    assert estimate_text(model, memory=15999).count(" no ") == 4


def test_the_dict() -> None:
    made = estimate_json(estimate(6400, 64), memory=20000)
    assert json.loads(json.dumps(made)) == made
    assert {key: value for key, value in made.items() if key != "stages"} == {
        "params": 6400,
        "world": 64,
        "micro_batches": 1,
        "precision": {"name": "mixed", "parameter": 2, "gradient": 2, "state": 12},
        "memory_bytes": 20000,
    }
    assert made["stages"][2] == {
        "stage": 2,
        "parameter_bytes": 12800,
        "gradient_bytes": 200,
        "state_bytes": 1200,
        "total_bytes": 14200,
        "sent_bytes_per_rank": 25200,
        "ideal_bytes_per_rank": 25600,
        "fits": True,
        "largest_params": largest(20000, 64, 2),
    }
    assert [row["fits"] for row in made["stages"]] == [False, False, True, True]
    assert "fits" not in estimate_json(estimate(6400, 64))["stages"][0]


def test_an_estimate_does_not_change() -> None:
    first: Estimate = estimate(1, 1)[0]
    with pytest.raises(AttributeError):
        first.stage = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"world": 0}, "world 0 must be a whole number, 1 or more"),
        ({"world": -2}, "world -2 must be a whole number, 1 or more"),
        ({"world": 2.0}, "world 2.0 must be a whole number, 1 or more"),
        ({"world": True}, "world True must be a whole number, 1 or more"),
        ({"micro_batches": 0}, "micro_batches 0 must be a whole number, 1 or more"),
        ({"k": -1}, "k -1 must be a whole number, 0 or more"),
        ({"params": 0}, "params 0 must be above zero"),
        ({"params": "big"}, "params 'big' is no count: write 7500000000, '7.5e9' or '7.5B'"),
        (
            {"precision": "mixd"},
            "precision 'mixd' does not exist: there are mixed and fp32; nearest: mixed",
        ),
        (
            {"precision": "FP32"},
            "precision 'FP32' does not exist: there are mixed and fp32; nearest: fp32",
        ),
        ({"precision": "int8"}, "precision 'int8' does not exist: there are mixed and fp32"),
    ],
)
def test_estimate_refuses(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        estimate(**{"params": 1000, "world": 4, **wrong})
    assert str(caught.value) == words


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"stage": 4}, "stage 4 does not exist: there are 0, 1, 2 and 3"),
        ({"world": 0}, "world 0 must be a whole number, 1 or more"),
        ({"precision": "fp31"}, "precision 'fp31' does not exist: there are mixed and fp32; nearest: fp32"),
        ({"memory": 0}, "memory 0 must be above zero"),
        ({"memory": "lots"}, "memory 'lots' is no size: write bytes, '25MB' or '80GiB'"),
    ],
)
def test_largest_refuses(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        largest(**{"memory": "32GB", "world": 4, "stage": 0, **wrong})
    assert str(caught.value) == words


def test_the_text_refuses_a_memory_that_is_no_size() -> None:
    with pytest.raises(SpecError, match=r"^memory 'lots' is no size"):
        estimate_text(estimate(1000, 4), memory="lots")
