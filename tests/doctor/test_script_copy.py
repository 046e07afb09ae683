"""What the copy of a working directory has in place of links, and that nothing is written through one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inprocess.doctor import script_copy
from inprocess.doctor.script_copy import WorkingCopies, keep_above_apart, keep_apart


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Path]:
    """The working directory, another folder, and where the copy is to be."""
    monkeypatch.setattr(script_copy, "FILE", 10)
    found = tuple(tmp_path / name for name in ("home", "elsewhere", "copy"))
    for each in found:
        each.mkdir()
    (found[1] / "small").write_text("small")
    (found[1] / "large").write_text("large" * 10)
    return found


def copied(home: Path, target: Path) -> int:
    copies = WorkingCopies(str(home))
    copies.make(target)
    return copies.left_out


def test_a_folder_behind_a_link_is_copied(folders: tuple[Path, Path, Path]) -> None:
    home, elsewhere, target = folders
    (home / "data").symlink_to(elsewhere)
    assert copied(home, target) == 0
    data = target / "data"
    assert not data.is_symlink() and not (data / "small").is_symlink()
    assert os.readlink(data / "large") == str(elsewhere / "large")
    keep_apart(str(data / "large"), str(target))
    keep_above_apart(str(data / "new"), str(target))
    assert not (data / "large").is_symlink() and (data / "large").read_text() == "large" * 10


def test_an_absolute_link_into_the_working_directory_leads_into_the_copy(folders: tuple[Path, Path, Path]) -> None:
    home, _, target = folders
    (home / "steps").mkdir()
    (home / "latest").symlink_to(home / "steps")
    copied(home, target)
    assert os.path.realpath(target / "latest") == str(target / "steps")
    keep_above_apart(str(target / "latest" / "new"), str(target))


def test_a_link_to_what_is_left_out_leads_to_a_copy_of_that(folders: tuple[Path, Path, Path]) -> None:
    home, _, target = folders
    (home / ".cache").mkdir()
    (home / ".cache" / "small").write_text("small")
    (home / "data").symlink_to(home / ".cache")
    copied(home, target)
    assert (target / "data" / "small").read_text() == "small" and not (target / ".cache").exists()
    assert not os.path.realpath(target / "data" / "small").startswith(f"{home}{os.sep}")


@pytest.mark.parametrize("leads", ["to many files", "back", "in a circle"])
def test_nothing_is_written_behind_a_link_that_stays(
    folders: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch, leads: str
) -> None:
    home, elsewhere, target = folders
    (home / "data").symlink_to(elsewhere if leads != "back" else home.parent)
    if leads == "in a circle":
        (elsewhere / "again").symlink_to(elsewhere)
    if leads == "to many files":
        monkeypatch.setattr(script_copy, "FILES", 2)
    copied(home, target)
    link = target / "data" / "again" if leads == "in a circle" else target / "data"
    assert link.is_symlink() and link.is_dir()
    for check in (keep_apart, keep_above_apart):
        with pytest.raises(OSError, match="start it where there is no such link"):
            check(str(link / "small"), str(target))
    keep_above_apart(str(link), str(target))  # the link itself may go


def test_what_is_elsewhere_without_a_link_is_the_scripts_own_affair(folders: tuple[Path, Path, Path]) -> None:
    _, elsewhere, target = folders
    keep_apart(str(elsewhere / "large"), str(target))
    assert (elsewhere / "large").read_text() == "large" * 10


def test_the_folder_of_the_copies_may_be_in_the_working_directory(folders: tuple[Path, Path, Path]) -> None:
    """As where somebody works in /tmp."""
    home, _, _ = folders
    (home / "train.py").touch()
    copies = WorkingCopies(str(home))
    (base := home / "doctor-x").mkdir()
    (home / "back").symlink_to(base)
    for number in (1, 2):
        copies.make(base / str(number))
        assert sorted(path.name for path in (base / str(number)).iterdir()) == ["back", "train.py"]
        assert os.readlink(base / str(number) / "back") == str(base)


def test_a_file_that_goes_while_it_is_copied(folders: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    home, _, target = folders
    (home / "log").touch()

    def gone(path: str) -> int:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os.path, "getsize", gone)
    assert copied(home, target) == 0
    assert (target / "log").is_symlink()
