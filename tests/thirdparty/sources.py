"""Source trees of vLLM releases, fetched from the package index and kept outside the repository.

Run as a script to fetch: `python tests/thirdparty/sources.py 0.18.0 0.24.0`. Nothing is installed
or built. The folder is $KVFUZZ_SOURCES, or `kvfuzz/sources` in the user's cache.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

NEEDED = ("vllm/v1/attention", "vllm/attention")
"""What kvfuzz loads of a tree; the rest of the archive is not unpacked."""


def folder() -> Path:
    """Where source trees are kept, one folder a release."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("KVFUZZ_SOURCES") or Path(cache) / "kvfuzz" / "sources")


def tree(release: str) -> Path:
    """The tree of a vLLM release, which need not exist."""
    return folder() / f"vllm-{release}"


def fetch(release: str) -> Path:
    """Download and unpack a release, unless it is there; returns its tree."""
    target = tree(release)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        _download(release, Path(temporary))
        (archive,) = Path(temporary).glob("vllm-*.tar.gz")
        with tarfile.open(archive) as tar:
            wanted = [m for m in tar.getmembers() if m.name.partition("/")[2].startswith(NEEDED)]
            tar.extractall(temporary, members=wanted, filter="data")
        os.replace(Path(temporary) / f"vllm-{release}", target)
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
