"""torch's own distributed suite for backend "monarch": one pytest test for each of its tests.

`make test` runs it on two ranks and compares the number passed with a recorded one. `make test-slow` also runs Gloo
and the tests that need more ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from monarch_backend._core.torch_version import torch_version
from tests.torch_suite import harness, skips, substitutions
from tests.torch_suite.harness import Outcome, Suite

NAMES = harness.test_names()

# Release of torch -> number of tests that Gloo passes on two ranks. test_recorded_number_is_gloos checks the numbers.
GLOO_PASSES = {(2, 9): 93, (2, 13): 91, (2, 14): 91, (2, 15): 91}

GetSuite = Callable[..., Suite]


@pytest.fixture(scope="session")
def suite() -> Iterator[GetSuite]:
    """Return ``suite(backend, world_size)``. It loads each suite at its first use."""
    loaded: dict[tuple[str, int], Suite] = {}

    def get(backend: str = "monarch", world_size: int = 2) -> Suite:
        key = (backend, world_size)
        if key not in loaded:
            loaded[key] = Suite(*key)
        return loaded[key]

    yield get
    for one in loaded.values():
        one.close()


def _passed(suite: Suite) -> list[str]:
    return [name for name in NAMES if suite.run(name).status == "passed"]


def _explain(outcome: Outcome) -> str:
    return f"{outcome.why}\n--- what the ranks printed:\n{outcome.output}"


def test_substitutions_still_match() -> None:
    source = harness.suite_path().read_text()
    assert substitutions.unmatched(source) == []
    assert substitutions.unreviewed(source) == []


@pytest.mark.slow
def test_every_test_is_collected(suite: GetSuite) -> None:
    assert sorted(NAMES) == sorted(suite().names)


@pytest.mark.slow
def test_a_hung_test_fails_with_its_stacks() -> None:
    impatient = Suite("monarch", hang=0.2)
    try:
        outcome = impatient.run("test_monitored_barrier_gloo")  # waits 2 s for a rank that never joins
    finally:
        impatient.close()
    assert outcome.status == "failed"
    assert "did not end within 0.2 s" in outcome.why
    assert "in test_monitored_barrier_gloo" in outcome.output


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_monarch(suite: GetSuite, name: str) -> None:
    outcome = suite().run(name)
    if outcome.status == "failed":
        pytest.fail(_explain(outcome), pytrace=False)
    if outcome.status == "skipped":
        why = skips.why(outcome.why)
        assert why, f"not a reason of ours: {outcome.why!r}; see skips.py and substitutions.py"
        pytest.skip(f"{outcome.why} ({why})")


@pytest.mark.slow
def test_as_many_as_gloo(suite: GetSuite) -> None:
    if torch_version() not in GLOO_PASSES:
        pytest.skip("no number recorded for this torch; the slow target measures Gloo beside us")
    assert len(_passed(suite())) >= GLOO_PASSES[torch_version()]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_gloo_passes_no_additional_tests(suite: GetSuite, name: str) -> None:
    gloo = suite("gloo").run(name)
    if gloo.status == "failed":
        pytest.fail(f"torch's own Gloo fails here: {_explain(gloo)}", pytrace=False)
    ours = suite().run(name)
    assert gloo.status == "skipped" or ours.status == "passed", _explain(ours)


@pytest.mark.slow
@pytest.mark.nightly
def test_recorded_number_is_gloos(suite: GetSuite) -> None:
    assert len(_passed(suite("gloo"))) == GLOO_PASSES.get(torch_version()), "record it in GLOO_PASSES"


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [4, pytest.param(8, marks=pytest.mark.nightly)])
def test_larger_worlds(suite: GetSuite, world_size: int) -> None:
    waiting = [name for name in NAMES if skips.for_world_size(suite().run(name).why)]
    gloo = {name: suite("gloo", world_size).run(name) for name in waiting}
    ours = {name: suite("monarch", world_size).run(name) for name in waiting}
    failed = {name: _explain(o) for name, o in ours.items() if o.status == "failed"}
    assert not failed, "\n\n".join(f"{name}: {text}" for name, text in failed.items())
    lost = [name for name in waiting if gloo[name].status == "passed" and ours[name].status != "passed"]
    assert not lost
    assert any(o.status == "passed" for o in ours.values())
