import json
import os
from pathlib import Path

import msgspec
import pytest

from kvfuzz.engine.journal import Entry, Journal
from kvfuzz.engine.store import OutputFolder, read_seed, write_atomic
from kvfuzz.errors import UsageError
from kvfuzz.model.lower import lower


def test_an_interrupted_write_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "seed.json"
    write_atomic(path, b"old")
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("disk gone")))
    with pytest.raises(OSError, match="disk gone"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_output_folder_that_cannot_be_made_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--out .*file/out: cannot be written"):
        OutputFolder(tmp_path / "file" / "out")


def test_a_missing_seed_file_is_refused_by_name(tmp_path):
    with pytest.raises(UsageError, match=r"nothing\.json: No such file"):
        read_seed(tmp_path / "nothing.json")


def test_a_clean_end_leaves_no_journal(tmp_path, gather_scene):
    journal = Journal(tmp_path)
    journal.about_to_run("builtin:gather_cache", lower(gather_scene))
    assert list(tmp_path.iterdir())
    journal.close()
    assert not list(tmp_path.iterdir())


def _orphan(folder: Path, case, target="builtin:gather_cache") -> Path:
    journal = Journal(folder)
    journal.about_to_run(target, case)
    (own,) = folder.glob(f"journal-{os.getpid()}.json")
    return own.rename(folder / "journal-4194303.json")  # past the largest pid of any default


def test_a_case_whose_process_died_is_handed_back_until_its_file_is_removed(tmp_path, gather_scene):
    case = lower(gather_scene)
    orphan = _orphan(tmp_path, case)
    for _ in range(2):
        assert Journal(tmp_path).left_over("builtin:gather_cache") == [(case, orphan)]
    orphan.unlink()
    assert Journal(tmp_path).left_over("builtin:gather_cache") == []


def test_the_journal_holds_the_last_case_alone_however_long_the_one_before(tmp_path, gather_scene):
    case = lower(gather_scene)
    shorter = msgspec.structs.replace(case, fields=case.fields[:1])
    journal = Journal(tmp_path)
    for each in (shorter, case, shorter):
        journal.about_to_run("builtin:gather_cache", each)
        (path,) = tmp_path.iterdir()
        assert msgspec.json.decode(path.read_bytes(), type=Entry).case == each
    journal.close()
    journal.about_to_run("builtin:gather_cache", case)  # and begins again after its end
    assert msgspec.json.decode(path.read_bytes(), type=Entry).case == case


def test_a_journal_that_was_cut_off_is_left_alone(tmp_path, gather_scene):
    orphan = _orphan(tmp_path, lower(gather_scene))
    orphan.write_bytes(orphan.read_bytes()[:-10])
    assert Journal(tmp_path).left_over("builtin:gather_cache") == []
    assert orphan.exists()


def test_journals_of_other_targets_and_unreadable_ones_stay(tmp_path, gather_scene):
    orphan = _orphan(tmp_path, lower(gather_scene), target="conch:reshape_and_cache")
    broken = tmp_path / "journal-4194302.json"
    broken.write_text(json.dumps({"half": "a case"}))
    (tmp_path / "journal-abc.json").write_text("{}")
    assert Journal(tmp_path).left_over("builtin:gather_cache") == []
    assert orphan.exists()
    assert broken.exists()
