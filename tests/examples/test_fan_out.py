"""examples/fan_out.py as a user starts it."""

import re
from pathlib import Path

from tests.examples.programs import EXAMPLES, run

SCRIPT = EXAMPLES / "fan_out.py"
SAME = "the same pages as a search without actors finds"


def test_ten_thousand_pages_over_sixteen_actors(tmp_path: Path) -> None:
    output = run(SCRIPT, "", tmp_path)
    found = re.search(r"^([\d,]+) pages in \d+ waves, .* pages/s$", output, re.MULTILINE)
    assert found and int(found[1].replace(",", "")) >= 10_000, output
    failed = re.search(r"^(\d+) fetches failed and were done again$", output, re.MULTILINE)
    assert failed and int(failed[1]) >= 1, output
    assert re.search(rf"100%\|█+\| {found[1].replace(',', '')}/", output), output  # the progress bar at its end
    assert SAME in output


def test_pages_that_fail_again_and_again(tmp_path: Path) -> None:
    output = run(SCRIPT, "--pages 1000 --workers 4 --one-fails-in 3 --attempts 30", tmp_path)
    assert re.search(r"again: page \d+ is not available at attempt 2", output), output
    assert SAME in output


def test_a_page_that_can_not_be_fetched_ends_the_program(tmp_path: Path) -> None:
    output = run(SCRIPT, "--pages 50 --workers 2 --one-fails-in 1 --attempts 3", tmp_path, code=1)
    # Where the machine is busy, a word that the end takes more than a second comes after it.
    last = [line for line in output.splitlines() if not line.startswith("monarch_backend: waiting for ")][-1]
    assert last == "RuntimeError: 3 attempts were not enough for 1 of the pages, such as 0", output


def test_from_standard_input(tmp_path: Path) -> None:
    """No file that a worker could import, and no `__main__` guard."""
    output = run("-", "--pages 300 --workers 3", tmp_path, stdin=SCRIPT.read_text())
    assert SAME in output
