import subprocess
import sys

import pytest

from kvfuzz.errors import NotCheckedError
from kvfuzz.kernels.catalogue import list_targets
from kvfuzz.kernels.resolve import resolve
from kvfuzz.model.ops.table import BY_OP
from kvfuzz.model.plan_case import PLAN_OPS
from kvfuzz.model.scene import OPS
from kvfuzz.model.script import STATEFUL_OP
from kvfuzz.model.steps import PAGE_OPS
from kvfuzz.model.target import TargetSpec


def test_listing_targets_imports_neither_torch_nor_triton():
    code = (
        "import sys; from kvfuzz.kernels.catalogue import list_targets; list_targets(); "
        "print(sorted({'torch', 'triton', 'hypothesis'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_every_listed_name_is_unique_and_described():
    listed = list_targets()
    assert len({target.name for target in listed}) == len(listed)
    assert all(target.description for target in listed)


@pytest.mark.parametrize("listed", list_targets(), ids=lambda target: target.name)
def test_a_listed_target_resolves_to_its_own_name_and_op(listed):
    assert listed.op in (*OPS, *PLAN_OPS, *PAGE_OPS, *BY_OP, STATEFUL_OP)
    try:
        adapter = resolve(TargetSpec(listed.name))
    except NotCheckedError:
        assert listed.name.startswith(("conch:", "vllm:"))
    else:
        # Whole pages are copied, swapped and cleared in a cache in use.
        op = STATEFUL_OP if listed.op in PAGE_OPS else listed.op
        assert (adapter.info.name, adapter.info.op) == (listed.name, op)
        assert len(adapter.info.content) == 16
