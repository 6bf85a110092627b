"""The pytest plugin: options for kernel tests, a header line, one line a test at the end.

It is loaded in every project that has kvfuzz installed, so it imports nothing but the standard
library, and kvfuzz itself when it is asked for.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

OPTIONS = ("max_cases", "budget", "seed")


def pytest_addoption(parser: "pytest.Parser") -> None:
    """Options that win over what each kernel test declares."""
    group = parser.getgroup("kvfuzz", "kvfuzz.kernel_test")
    group.addoption(
        "--kvfuzz-max-cases", type=_positive, metavar="N", help="Cases for each kernel test."
    )
    group.addoption("--kvfuzz-budget", metavar="60s|5m|2h", help="Time for each kernel test.")
    group.addoption(
        "--kvfuzz-seed", type=int, metavar="N", help="Random number that the draws start from."
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(f"{text}: expected at least 1")
    return value


def pytest_report_header(config: "pytest.Config") -> str:
    """The version, and every option that was given."""
    from kvfuzz import __version__

    given = {name: config.getoption(f"kvfuzz_{name}") for name in OPTIONS}
    shown = [
        f"--kvfuzz-{name.replace('_', '-')}={value}"
        for name, value in given.items()
        if value is not None
    ]
    return " ".join([f"kvfuzz: {__version__}", *shown])


def pytest_terminal_summary(terminalreporter: "pytest.TerminalReporter") -> None:
    """How much each kernel test checked; what a test did not check must not go unseen."""
    from kvfuzz.front.testing import RECORD

    lines = [
        str(value)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == RECORD
    ]
    if lines:
        terminalreporter.section("kvfuzz")
        for line in lines:
            terminalreporter.line(line)
