"""examples/fan_out.py as a user starts it."""

import re

import pytest

from tests.examples.example_runner import EXAMPLES, Outputs, run, run_several

pytestmark = pytest.mark.slow

SCRIPT = EXAMPLES / "fan_out.py"
SAME = "the same pages as a search without actors finds"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    folder = tmp_path_factory.mktemp
    again, never = "--pages 1000 --workers 4 --one-fails-in 3 --attempts 30", "--one-fails-in 1 --attempts 3"
    return run_several(
        {
            "plain": lambda: run(SCRIPT, "", folder("plain")),
            "again": lambda: run(SCRIPT, again, folder("again")),
            "never": lambda: run(SCRIPT, f"--pages 50 --workers 2 {never}", folder("never"), code=1),
            "stdin": lambda: run("-", "--pages 300 --workers 3", folder("stdin"), stdin=SCRIPT.read_text()),
        }
    )


def test_ten_thousand_pages_over_sixteen_actors(outputs: Outputs) -> None:
    output = outputs["plain"].result()
    found = re.search(r"^([\d,]+) pages in \d+ waves, .* pages/s$", output, re.MULTILINE)
    assert found and int(found[1].replace(",", "")) >= 10_000, output
    failed = re.search(r"^(\d+) fetches failed and were done again$", output, re.MULTILINE)
    assert failed and int(failed[1]) >= 1, output
    assert re.search(rf"100%\|█+\| {found[1].replace(',', '')}/", output), output  # the finished progress bar
    assert SAME in output


def test_pages_that_fail_again_and_again(outputs: Outputs) -> None:
    output = outputs["again"].result()
    assert re.search(r"again: page \d+ is not available at attempt 2", output), output
    assert SAME in output


def test_a_page_that_can_not_be_fetched_ends_the_program(outputs: Outputs) -> None:
    output = outputs["never"].result()
    # On a busy machine the program may end with a line about a wait of more than a second.
    last = [line for line in output.splitlines() if not line.startswith("monarch_backend: waiting for ")][-1]
    assert last == "RuntimeError: 3 attempts were not enough for 1 of the pages, such as 0", output


def test_from_standard_input(outputs: Outputs) -> None:
    """The program has no file that a worker could import, and no `__main__` guard."""
    assert SAME in outputs["stdin"].result()
