"""The documents are true: what they print is run, what they name exists."""

import re
import shutil
import subprocess
import sys
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
    (said,) = re.findall(r"^Exit codes: (.*?)\n\n", README, re.DOTALL | re.MULTILINE)
    codes = [int(code) for code in re.findall(r"(?:^|, )(\d+) ", said.replace("\n", " "))]
    assert codes == sorted(Exit)


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_paths_in_the_documents_exist(document):
    text = (ROOT / document).read_text()
    for path in re.findall(
        r"`((?:kvfuzz|kernels|oracles|strategies|reports|tests)/[\w/.]+)`", text
    ):
        assert (ROOT / path).exists(), f"{document} names {path}"


def test_the_constraints_pin_what_pyproject_leaves_open():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = [*project["dependencies"], *project["optional-dependencies"]["cpu"]]
    assert not any("==" in requirement for requirement in ranges)
    pins = re.findall(r"^(\w+)==", (ROOT / "constraints-cpu.txt").read_text(), re.MULTILINE)
    for name in ("torch", "triton"):
        assert name in pins
        assert any(requirement.startswith(f"{name}>=") for requirement in ranges)


def test_the_finding_that_the_readme_shows_has_the_rows_that_the_command_prints(tmp_path):
    (shown,) = [block for block in _blocks("") if block.startswith("FINDING")]
    command = [sys.executable, "-m", "kvfuzz", "run", "mutant:hardcoded_block_stride"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    # What is drawn and how far it shrinks may change: the rows and their order may not.
    labels = re.findall(r"^  (\w[\w ]*?)  ", shown, re.MULTILINE)
    printed = re.findall(r"^  (\w[\w ]*?)  ", done.stdout, re.MULTILINE)
    assert len(labels) > 6
    assert [label for label in printed if label in labels][: len(labels)] == labels
    assert re.search(r"^kvfuzz replay kvfuzz-out/seeds/\w{16}\.json$", done.stdout, re.MULTILINE)


def test_properties_are_named_once_and_in_one_order():
    from kvfuzz.model.verdict import PLAN_PROPERTY_NAMES, PROPERTY_NAMES
    from kvfuzz.oracles.plan_table import PLAN_PROPERTIES
    from kvfuzz.oracles.table import PROPERTIES

    assert tuple(each.name for each in PROPERTIES) == PROPERTY_NAMES
    assert tuple(each.name for each in PLAN_PROPERTIES["cache_views"]) == PLAN_PROPERTY_NAMES
    for properties in PLAN_PROPERTIES.values():
        names = [each.name for each in properties]
        assert names == [name for name in PLAN_PROPERTY_NAMES if name in names]


def test_modules_stay_near_one_idea():
    for folder in ("kvfuzz", "strategies", "oracles", "kernels", "reports"):
        for path in (ROOT / folder).rglob("*.py"):
            if not any(part.is_symlink() for part in path.parents):
                assert len(path.read_text().splitlines()) <= 330, path
