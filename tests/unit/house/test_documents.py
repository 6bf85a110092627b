"""The documents are true: what they print is run, what they name exists."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text() if (ROOT / "README.md").is_file() else ""


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_the_three_lines_of_the_readme_test_a_kernel(pytester):
    (lines,) = _blocks("python")
    assert len(lines.split("\n\n")) == 2
    pytester.makepyfile(test_mine=lines)
    kernel = pytester.path / "my_kernels.py"
    shutil.copy(ROOT / "kernels" / "builtin" / "gather_cache.py", kernel)
    arguments = ("--kvfuzz-max-cases", "30", "-p", "no:cacheprovider")
    pytester.runpytest_subprocess(*arguments).assert_outcomes(passed=1)
    text = kernel.read_text()
    kernel.write_text(text.replace("k_at = k_token + head", "k_at = k_token - head"))
    result = pytester.runpytest_subprocess(*arguments)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*FINDING  *", "*kvfuzz replay *"])


def test_the_readme_names_every_property_and_exit_code():
    from kvfuzz.errors import Exit
    from kvfuzz.oracles.table import PROPERTIES

    for each in PROPERTIES:
        assert f"| `{each.name}` |" in README
    for code in Exit:
        assert re.search(rf"\b{code.value} ", README), code


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_paths_in_the_documents_exist(document):
    text = (ROOT / document).read_text()
    for path in re.findall(
        r"`((?:kvfuzz|kernels|oracles|strategies|reports|tests)/[\w/.]+)`", text
    ):
        assert (ROOT / path).exists(), f"{document} names {path}"


def test_the_constraints_pin_what_pyproject_ranges():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = (ROOT / "constraints-cpu.txt").read_text()
    assert re.search(r"^torch==2\.13\.0$", pinned, re.MULTILINE)
    assert not any("==" in requirement for requirement in project["dependencies"])


def test_modules_stay_near_one_idea():
    for folder in ("kvfuzz", "strategies", "oracles", "kernels", "reports"):
        for path in (ROOT / folder).rglob("*.py"):
            if not any(part.is_symlink() for part in path.parents):
                assert len(path.read_text().splitlines()) <= 330, path
