"""The table of combinations in the documentation says ready where a test bears it, and of each test what it bears."""

from pathlib import Path

import pytest
from composition_table import HEAD, MATRIX_PAGE, PAGE, MarkedTest, check, marked_tests, matrix, write, write_matrix

TEST = MarkedTest(frozenset({"scale-pipe", "scale-fsdp"}), "packages/x/tests/test_x.py", "test_a", False, False)
ROW = "| scale-pipe × scale-fsdp | the stage is the module | ready | none |"
PAGE_OF_ONE = f"text\n\n{HEAD}\n|---|---|---|---|\n{ROW}\n\nmore\n"


def test_each_row_has_its_tests_and_each_test_its_row() -> None:
    tests = list(marked_tests())
    assert len(tests) > 30
    assert check(PAGE.read_text(encoding="utf-8"), tests) == []


def test_the_matrix_is_what_the_marks_make() -> None:
    tests, page = list(marked_tests()), MATRIX_PAGE.read_text(encoding="utf-8")
    assert write_matrix(page, tests) == page, "run tests/compositions/composition_table.py"
    assert "| yes |" in matrix([TEST]) and "error" not in matrix([TEST])
    refused = MarkedTest(TEST.techniques, TEST.path, "test_c", True, True)
    assert matrix([refused]).count("error") == 2, "a pair stands on both sides of the diagonal"
    of_three = MarkedTest(TEST.techniques | {"scale-tp"}, TEST.path, "test_d", True, True)
    assert "error" not in matrix([of_three]), "which of the three is not known"


def test_no_row_says_ready_without_a_test() -> None:
    (alone,) = check(PAGE_OF_ONE, [])
    assert "| ready | none |" in alone and "| not tested | none |" in alone
    made = write(PAGE_OF_ONE, [TEST])
    assert check(made, [TEST]) == [] and "| ready | `x: test_x.py` |" in made
    other = MarkedTest(frozenset({"scale-tp", "scale-fsdp"}), "packages/x/tests/test_x.py", "test_b", True, False)
    assert check(made, [TEST, other]) == ["packages/x/tests/test_x.py, test_b: no row for scale-fsdp × scale-tp"]
    assert "two rows" in check(made.replace("\n\nmore", f"\n{ROW}\n\nmore"), [TEST])[0]
    refused = MarkedTest(TEST.techniques, TEST.path, "test_c", True, True)
    assert "| refused | `x: test_x.py` (soak) |" in write(PAGE_OF_ONE, [refused])


def test_a_mark_of_what_is_no_technique_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "packages" / "p" / "tests"
    folder.mkdir(parents=True)
    for names in ('"scale-fsdp", "zero"', '"scale-fsdp"'):
        (folder / "test_a.py").write_text(f"@pytest.mark.composition({names})\ndef test_a(): ...\n")
        with pytest.raises(ValueError, match="test_a: no combination of techniques"):
            list(marked_tests(tmp_path))
