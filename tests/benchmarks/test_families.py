import pytest

from benchmarks.families import DIFFERS, EQUAL, TEXT, outcome


@pytest.mark.parametrize(
    ("status", "last", "blind", "wanted"),
    [
        (0, "7 passed, 3 skipped, 132 deselected in 3s", False, (EQUAL, 7)),
        (0, "3 passed, 4 skipped, 132 deselected in 3s", False, (EQUAL, 3)),
        (0, "5 passed, 2 skipped in 3s", True, (TEXT, 5)),
        (1, "1 failed, 6 passed in 3s", False, (DIFFERS, 6)),
        (1, "7 errors in 3s", False, (DIFFERS, 0)),
        (5, "139 deselected in 3s", False, (DIFFERS, 0)),
        (0, "7 skipped in 3s", True, (DIFFERS, 0)),
    ],
)
def test_what_a_familys_run_says(status: int, last: str, blind: bool, wanted: tuple[str, int]) -> None:
    assert outcome(status, f"....F\nnoise 9 passed\n{last}\n", blind) == wanted
