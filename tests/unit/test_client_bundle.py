"""The code tree that travels with a job: what is in it, and that it is the same bytes every time."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from stoker import bundle
from stoker.bundle import files_of, pack
from stoker_proto import ProblemError


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def git(root: Path, *args: str) -> None:
    subprocess.run(["git", "-C", str(root), *args], check=True, capture_output=True)


def names(root: Path, *include: str) -> list[str]:
    return [str(p.relative_to(root)) for p in files_of(root, include)]


def test_the_same_files_give_the_same_digest_whatever_their_times(tmp_path: Path) -> None:
    one = tree(tmp_path / "one", {"train.py": "x = 1\n", "data/a": "a"})
    two = tree(tmp_path / "two", {"data/a": "a", "train.py": "x = 1\n"})
    os.utime(two / "train.py", (1, 1))
    assert pack(one, (), tmp_path / "1.tgz") == pack(two, (), tmp_path / "2.tgz")
    assert (tmp_path / "1.tgz").read_bytes() == (tmp_path / "2.tgz").read_bytes()


def test_a_changed_byte_a_new_name_and_a_new_right_each_change_the_digest(tmp_path: Path) -> None:
    root = tree(tmp_path / "code", {"train.py": "x = 1\n"})
    digests = [pack(root, (), tmp_path / "0.tgz")]
    (root / "train.py").write_text("x = 2\n")
    digests.append(pack(root, (), tmp_path / "1.tgz"))
    (root / "train.py").chmod(0o755)
    digests.append(pack(root, (), tmp_path / "2.tgz"))
    (root / "train.py").rename(root / "main.py")
    digests.append(pack(root, (), tmp_path / "3.tgz"))
    assert len(set(digests)) == 4


def test_an_archive_unpacks_to_the_tree_with_no_owner_and_no_time(tmp_path: Path) -> None:
    root = tree(tmp_path / "code", {"train.py": "print()\n", "lib/ünï": "deep"})
    pack(root, (), tmp_path / "code.tgz")
    with tarfile.open(tmp_path / "code.tgz") as tar:
        members = tar.getmembers()
        tar.extractall(tmp_path / "out", filter="data")
    assert {(m.uid, m.gid, m.uname, m.mtime) for m in members} == {(0, 0, "", 0)}
    assert (tmp_path / "out" / "train.py").read_text() == "print()\n"
    assert (tmp_path / "out" / "lib" / "ünï").read_text() == "deep"


def test_a_checkout_leaves_out_what_gitignore_names_and_sends_what_is_not_committed(tmp_path: Path) -> None:
    root = tree(
        tmp_path, {"train.py": "", "big/weights": "", ".gitignore": "big/\n*.log\n", "noise.log": "", "new": ""}
    )
    git(root, "init", "-q")
    git(root, "add", "train.py")
    assert names(root) == [".gitignore", "new", "train.py"]


def test_a_file_deleted_from_a_checkout_is_not_sent(tmp_path: Path) -> None:
    root = tree(tmp_path, {"train.py": "", "old": ""})
    git(root, "init", "-q")
    git(root, "add", ".")
    (root / "old").unlink()
    assert names(root) == ["train.py"]


def test_a_folder_that_the_checkout_around_it_ignores_is_sent_all_the_same(tmp_path: Path) -> None:
    tree(tmp_path, {".gitignore": "scratch/\n", "scratch/train.py": ""})
    git(tmp_path, "init", "-q")
    assert names(tmp_path / "scratch") == ["train.py"]


def test_outside_of_a_checkout_caches_and_environments_are_left_out(tmp_path: Path) -> None:
    root = tree(
        tmp_path, {"train.py": "", "__pycache__/train.pyc": "", ".venv/lib": "", "lib/__pycache__/a": "", "d": ""}
    )
    assert names(root) == ["d", "train.py"]


def test_include_paths_narrow_the_tree_to_files_and_folders(tmp_path: Path) -> None:
    root = tree(tmp_path, {"train.py": "", "lib/a": "", "lib/b": "", "other": ""})
    assert names(root, "train.py", "./lib", "lib/a") == ["lib/a", "lib/b", "train.py"]


def test_an_include_path_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="there is no nowhere"):
        files_of(tree(tmp_path, {"a": ""}), ("nowhere",))


@pytest.mark.parametrize("name", ["ignored", "../outside"])
def test_an_include_path_of_which_nothing_would_be_sent_is_a_problem(tmp_path: Path, name: str) -> None:
    root = tree(tmp_path / "code", {"a": "", "ignored": "", ".gitignore": "ignored\n"})
    tree(tmp_path, {"outside": ""})
    git(root, "init", "-q")
    with pytest.raises(ProblemError, match="is sent"):
        files_of(root, (name,))


def test_a_tree_over_the_limit_is_a_problem_that_names_the_largest_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tree(tmp_path / "code", {"small": "x", "large": "x" * 100})
    monkeypatch.setattr(bundle, "MAX_BYTES", 50)
    with pytest.raises(ProblemError, match="Largest: large") as told:
        pack(root, (), tmp_path / "code.tgz")
    assert told.value.problem.code == "blob_too_large"
    assert "include_paths" in told.value.problem.next_actions[0]


def test_a_root_that_is_missing_or_empty_is_a_problem(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="no directory"):
        pack(tmp_path / "nowhere", (), tmp_path / "code.tgz")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ProblemError, match="holds no files"):
        pack(tmp_path / "empty", (), tmp_path / "code.tgz")
