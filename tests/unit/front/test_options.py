"""Durations, source trees and configuration files."""

import pytest

from kvfuzz.errors import UsageError
from kvfuzz.front.config import Defaults, load_config
from kvfuzz.front.options import parse_duration, parse_sources


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("60s", 60.0), ("5m", 300.0), ("2h", 7200.0), ("0.5s", 0.5), (" 1s ", 1.0)],
)
def test_a_duration_is_a_number_with_its_unit(text, seconds):
    assert parse_duration(text, name="--budget") == seconds


@pytest.mark.parametrize(
    "text",
    ["0", "0s", "0.0m", "", "60", "s", "-1s", "1d", "1m30s", "1e9h", "9" * 400 + "h", "nan"],
)
def test_any_other_duration_is_refused_with_value_and_form(text):
    with pytest.raises(UsageError) as caught:
        parse_duration(text, name="--budget")
    assert f"--budget {text}: expected a number above 0" in str(caught.value)
    assert "60s, 5m or 2h" in str(caught.value)


def test_sources_are_folders_by_project(tmp_path):
    assert parse_sources([f"vllm={tmp_path}"]) == {"vllm": str(tmp_path)}
    assert parse_sources([]) == {}


@pytest.mark.parametrize("text", ["vllm", "vllm=", "=dir"])
def test_a_malformed_source_is_refused(text):
    with pytest.raises(UsageError, match="expected PROJECT=DIR"):
        parse_sources([text])


def test_a_source_that_is_no_folder_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no folder /nowhere"):
        parse_sources(["vllm=/nowhere"])
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="no folder"):
        parse_sources([f"vllm={tmp_path / 'file'}"])


def test_without_a_file_the_built_in_defaults_hold(tmp_path):
    assert load_config(tmp_path) == Defaults()


def test_pyproject_gives_defaults_and_kvfuzz_toml_wins(tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        '[tool.kvfuzz]\nbudget = "5m"\nmax-cases = 7\n[tool.kvfuzz.source]\nvllm = "v"\n'
    )
    assert load_config(tmp_path) == Defaults(budget="5m", max_cases=7, source={"vllm": "v"})
    (tmp_path / "kvfuzz.toml").write_text('arch = "gfx950"\nkeep-going = true\n')
    assert load_config(tmp_path) == Defaults(arch="gfx950", keep_going=True)


def test_a_pyproject_of_another_tool_says_nothing(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.ruff]\nline-length = 100\n")
    assert load_config(tmp_path) == Defaults()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("budgt = '5m'", "kvfuzz.toml: unknown key 'budgt'; did you mean budget?"),
        ("max-cases = '7'", "kvfuzz.toml: Expected `int | null`, got `str` - at `$.max-cases`"),
        ("max-cases = 0", "kvfuzz.toml: Expected `int` >= 1 - at `$.max-cases`"),
        ("where = ", "kvfuzz.toml: no valid TOML"),
    ],
)
def test_a_wrong_configuration_names_the_file_and_the_key(tmp_path, text, said):
    (tmp_path / "kvfuzz.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        load_config(tmp_path)
    assert said in str(caught.value)


def test_a_tool_table_that_is_no_table_is_refused(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool]\nkvfuzz = 3\n")
    with pytest.raises(UsageError, match=r"pyproject.toml \[tool.kvfuzz\]: expected a table"):
        load_config(tmp_path)
