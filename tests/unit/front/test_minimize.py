"""`kvfuzz seeds minimize`: what it writes, what it leaves alone, and how it ends."""

import io

import msgspec
import pytest

from kvfuzz.engine.store import read_seed
from kvfuzz.errors import Exit
from kvfuzz.model.seed import dump

MUTANT = "mutant:hardcoded_block_stride"


@pytest.fixture
def failing(seed_file):
    """A seed that fails on a mutant; it lies in a folder of its own."""
    seed = msgspec.structs.replace(read_seed(seed_file), target=MUTANT)
    folder = seed_file.parent / "kept"
    folder.mkdir()
    path = folder / "big.json"
    path.write_bytes(dump(seed))
    return path


def _files(folder):
    return sorted(each.name for each in folder.iterdir())


def test_a_smaller_seed_is_written_beside_the_old_one_and_replays(kvfuzz, failing):
    before = failing.read_bytes()
    ended = kvfuzz("seeds", "minimize", str(failing))
    assert (ended.code, ended.err) == (Exit.CLEAN, "")
    assert failing.read_bytes() == before
    (new,) = set(_files(failing.parent)) - {"big.json"}
    seed = read_seed(failing.with_name(new))
    assert new == f"{seed.id}.json"
    assert seed.property == "oracle"
    assert seed.case.geometry.num_blocks == 2
    assert seed.provenance.note == f"minimised from {read_seed(failing).id}"
    lines = ended.out.splitlines()
    assert lines[0] == f"minimised: {failing} -> {failing.with_name(new)}"
    assert ["num_blocks", "5", "->", "2"] in [line.split() for line in lines]
    assert ["num_rows", "8", "->", "1"] in [line.split() for line in lines]
    assert lines[-1] == f"kvfuzz replay {failing.with_name(new)}"
    again = kvfuzz(*lines[-1].split()[1:])
    assert again.code == Exit.FINDING
    assert "the same bytes now" in again.out

    minimal = kvfuzz("seeds", "minimize", str(failing.with_name(new)))
    assert minimal.code == Exit.CLEAN
    assert minimal.out.startswith(f"already minimal: {failing.with_name(new)} (")
    assert _files(failing.parent) == sorted([new, "big.json"])


def test_a_pasted_seed_goes_to_the_folder_that_is_named(kvfuzz, failing, monkeypatch, tmp_path):
    pasted = io.TextIOWrapper(io.BytesIO(failing.read_bytes()))
    monkeypatch.setattr("sys.stdin", pasted)
    ended = kvfuzz("seeds", "minimize", "-", "--out", "made/here", "--budget", "30s")
    assert ended.code == Exit.CLEAN, ended.err
    (new,) = _files(tmp_path / "made" / "here")
    assert ended.out.startswith(f"minimised: - -> made/here/{new}\n")
    assert _files(failing.parent) == ["big.json"]


def test_a_file_of_the_new_name_is_never_overwritten(kvfuzz, failing):
    kvfuzz("seeds", "minimize", str(failing))
    (new,) = set(_files(failing.parent)) - {"big.json"}
    failing.with_name(new).write_text("somebody's own")
    assert kvfuzz("seeds", "minimize", str(failing)).code == Exit.CLEAN
    assert failing.with_name(new).read_text() == "somebody's own"


def test_a_seed_that_does_not_fail_any_more_is_not_checked(kvfuzz, failing):
    ended = kvfuzz("seeds", "minimize", str(failing), "--target", "builtin:gather_cache")
    assert (ended.code, ended.out) == (Exit.NOT_CHECKED, "")
    assert ended.err == (
        f"kvfuzz: seed {failing}: oracle holds for builtin:gather_cache; there is nothing to "
        "minimise\n"
    )
    assert _files(failing.parent) == ["big.json"]


def test_a_seed_whose_property_gave_way_to_another_says_which(kvfuzz, failing):
    seed = msgspec.structs.replace(read_seed(failing), property="immutable")
    failing.write_bytes(dump(seed))
    ended = kvfuzz("seeds", "minimize", str(failing))
    assert ended.code == Exit.NOT_CHECKED
    assert "immutable holds for mutant:hardcoded_block_stride, and oracle" in ended.err


def test_an_absent_target_does_not_keep_the_next_seed_from_being_minimised(kvfuzz, failing):
    absent = failing.with_name("absent.json")
    seed = msgspec.structs.replace(read_seed(failing), target="vllm:cp_mha_gather_cache")
    absent.write_bytes(dump(seed))
    ended = kvfuzz("seeds", "minimize", str(absent), str(failing))
    assert ended.code == Exit.NOT_CHECKED
    assert "needs --source vllm=DIR" in ended.err
    assert ended.out.count("minimised: ") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "Missing argument 'SEED...'"),
        (("gone.json",), "seed gone.json: No such file"),
        (("-", "-"), "seeds minimize - -: stdin holds one seed"),
        (("kept/big.json", "--budget", "0s"), "--budget 0s: expected a number above 0"),
        (("kept/big.json", "--out", "kept/big.json"), "--out kept/big.json: no folder"),
        (("kept/big.json", "--target", "builtin:reshape_and_cache"), "is a reshape_and_cache"),
    ],
)
def test_what_means_nothing_is_usage(kvfuzz, failing, arguments, said):
    ended = kvfuzz("seeds", "minimize", *arguments)
    assert ended.code == Exit.USAGE
    assert said in ended.err
    assert _files(failing.parent) == ["big.json"]


def test_a_case_that_kills_its_process_is_reduced_within_the_budget(kvfuzz, failing):
    """Each probe that dies costs a new process: the big deletions come first."""
    path = failing.with_name("k.py")
    path.write_text(
        "import os\n"
        "def gather_cache(\n"
        "    key_cache, value_cache, key, value, block_table, cu_seqlens_kv, **more\n"
        "):\n"
        "    if key_cache.shape[2] > 1:\n"
        "        os.abort()\n"
    )
    seed = msgspec.structs.replace(read_seed(failing), target="file:gather_cache", property="crash")
    failing.write_bytes(dump(seed))
    target = f"{path}:gather_cache"
    ended = kvfuzz("seeds", "minimize", str(failing), "--target", target, "--budget", "6s")
    assert ended.code == Exit.CLEAN, ended.err
    (new,) = set(_files(failing.parent)) - {"big.json", "k.py", "__pycache__"}
    small = read_seed(failing.with_name(new))
    assert (small.property, small.target) == ("crash", "file:gather_cache")
    assert small.case.geometry.num_kv_heads == 2
    assert len(small.case.scene.batch.sequences) == 1
    assert ended.out.endswith(f"kvfuzz replay {failing.with_name(new)} --target {target}\n")
