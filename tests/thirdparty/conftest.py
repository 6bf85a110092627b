import importlib.util
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location(
    "kvfuzz_test_sources", Path(__file__).with_name("sources.py")
)
sources = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(sources)


@pytest.fixture
def vllm():
    """The `sources` argument for a vLLM release whose tree must have been fetched."""

    def tree(release: str) -> dict[str, str]:
        folder = sources.tree(release)
        if not folder.is_dir():
            pytest.fail(f"no tree of vLLM {release}: python tests/thirdparty/sources.py {release}")
        return {"vllm": str(folder)}

    return tree
