"""Source trees of vLLM releases, fetched from the package index and kept outside the repository.

Run as a script to fetch: `python tests/thirdparty/sources.py 0.18.0 0.24.0`. Nothing is installed
or built. The folder is $KVFUZZ_SOURCES, or `kvfuzz/sources` in the user's cache.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

NEEDED = (
    "vllm/v1/attention",
    "vllm/attention",
    "vllm/v1/kv_cache_interface.py",
    "vllm/v1/kv_cache_layout.py",
    "vllm/v1/kv_cache_spec_registry.py",
    "vllm/v1/kv_offload/cpu/swap_blocks_triton.py",
    "vllm/v1/worker/block_table.py",
    "vllm/v1/worker/gpu/attn_utils.py",
    "vllm/v1/worker/gpu/block_table.py",
    "vllm/v1/worker/gpu/buffer_utils.py",
    "vllm/v1/worker/gpu_model_runner.py",
    "vllm/v1/worker/mamba_utils.py",
    "vllm/v1/worker/utils.py",
    "vllm/model_executor/layers/mamba/ops/gather_initial_states.py",
    "vllm/model_executor/layers/mamba/ops/scatter_states.py",
    "vllm/models/deepseek_v4/common/ops/cache_utils.py",
    "vllm/utils/math_utils.py",
    "vllm/distributed/kv_transfer/kv_connector/v1/hf3fs/utils/gather_scatter_helper.py",
)
"""What the tests load of a tree; the rest of the archive is not unpacked."""

RECORD = "NEEDED"
"""The file of a tree that tells what was unpacked."""


def folder() -> Path:
    """Where source trees are kept, one folder a release."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("KVFUZZ_SOURCES") or Path(cache) / "kvfuzz" / "sources")


def tree(release: str) -> Path:
    """The tree of a vLLM release, which need not exist."""
    return folder() / f"vllm-{release}"


def is_complete(target: Path) -> bool:
    """Whether a tree was unpacked with all that is needed today."""
    record = target / RECORD
    return record.is_file() and record.read_text().split() == list(NEEDED)


def fetch(release: str) -> Path:
    """Download and unpack a release, unless all of it is there; returns its tree."""
    target = tree(release)
    if is_complete(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        _download(release, Path(temporary))
        (archive,) = Path(temporary).glob("vllm-*.tar.gz")
        with tarfile.open(archive) as tar:
            wanted = [m for m in tar.getmembers() if m.name.partition("/")[2].startswith(NEEDED)]
            tar.extractall(temporary, members=wanted, filter="data")
        fresh = Path(temporary) / f"vllm-{release}"
        (fresh / RECORD).write_text("\n".join(NEEDED))
        shutil.rmtree(target, ignore_errors=True)
        os.replace(fresh, target)
    return target


def _download(release: str, into: Path) -> None:
    # The source archive's metadata is made by its own build script, told to build for nothing.
    environment = {
        **os.environ,
        "VLLM_TARGET_DEVICE": "empty",
        "VLLM_VERSION_OVERRIDE": release,
    }
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-binary", "vllm")
    command = [sys.executable, "-m", "pip", "download", *options, f"vllm=={release}"]
    done = subprocess.run(
        [*command, "--dest", str(into)], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"vLLM {release} could not be fetched:\n{done.stderr.strip()}")


if __name__ == "__main__":
    for wanted_release in sys.argv[1:]:
        print(fetch(wanted_release))
