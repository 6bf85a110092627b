"""kernel_test in somebody else's project."""

from pathlib import Path

import pytest

import kvfuzz
from kvfuzz.front.testing import output_folder, target_from

pytest_plugins = ["pytester"]

BUILTIN = Path(kvfuzz.__file__).parent / "kernels" / "builtin" / "gather_cache.py"
STRIDE = "k_token = block * k_block_stride + token * k_token_stride"
DENSE = "k_token = block * block_size * k_token_stride + token * k_token_stride"


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A kernel file and its test, in a folder below the root."""
    tests = pytester.mkdir("tests")
    (tests / "good.py").write_text(BUILTIN.read_text())
    (tests / "bad.py").write_text(BUILTIN.read_text().replace(STRIDE, DENSE))
    pytester.makeini("[pytest]\n")
    return pytester


def _write(project: pytest.Pytester, *lines: str) -> None:
    (project.path / "tests" / "test_kernels.py").write_text("\n".join(["import kvfuzz", *lines]))


def test_an_edited_stride_fails_with_the_finding_and_a_right_kernel_passes(project):
    _write(
        project,
        "test_good = kvfuzz.kernel_test('good.py:gather_cache', max_cases=5)",
        "test_bad = kvfuzz.kernel_test('bad.py:gather_cache')",
    )
    result = project.runpytest_subprocess("-v", "-p", "no:xdist")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "kvfuzz: 0.1.0",
            "tests/test_kernels.py::test_good PASSED*",
            "tests/test_kernels.py::test_bad FAILED*",
            "FINDING  oracle: *",
            "*target * file:gather_cache (gather_cache), content *",
            "kvfuzz replay .kvfuzz/tests-test_kernels.py-test_bad/seeds/*.json "
            "--target tests/bad.py:gather_cache",
            "tests/test_kernels.py::test_good: no finding in 5 cases*",
        ]
    )
    result.stdout.no_fnmatch_line("*Traceback*")
    saved = list((project.path / ".kvfuzz").glob("*test_bad/seeds/*.json"))
    assert len(saved) == 1
    assert (project.path / ".kvfuzz" / ".gitignore").read_text() == "*\n"


def test_what_could_not_be_checked_fails_in_one_line(project):
    _write(
        project,
        "test_gone = kvfuzz.kernel_test('gone.py:gather_cache')",
        "test_vllm = kvfuzz.kernel_test('vllm:reshape_and_cache')",
        "test_source = kvfuzz.kernel_test('vllm:reshape_and_cache', sources={'vllm': 'v'})",
        "test_where = kvfuzz.kernel_test('good.py:gather_cache', where='layout=x')",
    )
    result = project.runpytest_subprocess("-p", "no:xdist")
    result.assert_outcomes(failed=4)
    result.stdout.fnmatch_lines(
        [
            "kvfuzz: target tests/gone.py:gather_cache: no file tests/gone.py",
            "kvfuzz: vllm:reshape_and_cache needs --source vllm=DIR*",
            "kvfuzz: --source vllm=v: no folder */tests/v",
            "kvfuzz: --where 'layout=x'*",
        ]
    )
    result.stdout.no_fnmatch_line("*Traceback*")


def test_options_of_pytest_win_and_show_in_the_header(project):
    _write(project, "test_good = kvfuzz.kernel_test('good.py:gather_cache', budget='nonsense')")
    result = project.runpytest_subprocess(
        "-p", "no:xdist", "--kvfuzz-budget=20s", "--kvfuzz-max-cases=3", "--kvfuzz-seed=9"
    )
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "kvfuzz: 0.1.0 --kvfuzz-max-cases=3 --kvfuzz-budget=20s --kvfuzz-seed=9",
            "*test_good: no finding in 3 cases*",
        ]
    )


def test_a_project_without_kernel_tests_sees_one_header_line_and_loads_nothing(project):
    project.makepyfile(
        test_plain="""
        import sys

        def test_plain():
            assert not {"torch", "triton", "pebble", "kvfuzz.engine.campaign"} & sys.modules.keys()
        """
    )
    result = project.runpytest_subprocess("test_plain.py", "-p", "no:xdist")
    result.assert_outcomes(passed=1)
    assert sum("kvfuzz:" in line for line in result.outlines) == 1


def test_a_relative_target_is_relative_to_its_test(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert target_from(tmp_path / "tests", "k.py:f") == "tests/k.py:f"
    assert target_from(Path("/elsewhere"), "k.py:f") == "/elsewhere/k.py:f"
    assert target_from(tmp_path, "/abs/k.py:f") == "/abs/k.py:f"
    assert target_from(tmp_path, "builtin:gather_cache") == "builtin:gather_cache"


def test_each_test_has_a_folder_of_its_own(tmp_path):
    names = ("a/test_x.py::test_k", "a/test_x.py::test_k2", "b/test_x.py::test_k", "a::C::t[x/y]")
    folders = {output_folder(tmp_path, name) for name in names}
    assert len(folders) == 4
    assert {folder.parent for folder in folders} == {tmp_path / ".kvfuzz"}


def test_kvfuzz_has_no_other_lazy_attribute():
    with pytest.raises(AttributeError, match="no attribute 'kernel_tset'"):
        kvfuzz.kernel_tset  # noqa: B018
