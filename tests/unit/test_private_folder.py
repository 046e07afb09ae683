"""A folder of this user's own: who may not be in its place, and that nothing else is read, written or removed."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inprocess.launcher import run_dir
from inprocess.live.shelf import Name, Shelf
from inprocess.reports import writer
from inprocess.system import private_folder
from inprocess.system.private_folder import Folder, NotPrivate, look, own

#: another user
STRANGER = 54321
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
ALL = re.compile(".*")


@pytest.fixture(params=[0, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(below: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in below.rglob("*") if path.is_dir()}


@pytest.mark.usefixtures("umask")
def test_all_that_is_made_is_private(tmp_path: Path) -> None:
    with own(str(tmp_path / "a/b"), "live", "requests") as folder:
        folder.replace("one", b"1")
        os.close(folder.append("two"))
        os.close(folder.create("three"))
    assert modes(tmp_path) == {0o700}
    files = list((tmp_path / "a/b/live/requests").iterdir())
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600} and len(files) == 3


def test_what_is_there_already_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir(0o755)
    with own(str(tmp_path), "live") as folder, look(str(tmp_path), "live") as seen:
        folder.replace("x", b"data")
        assert seen.read("x", 3) == b"dat" and seen.names() == ["x"] and seen.names(re.compile("y")) == []
        folder.rename("x", "y")
        folder.remove("x")
        assert seen.names() == ["y"]
    assert modes(tmp_path) == {0o755}
    with pytest.raises(FileNotFoundError):
        look(str(tmp_path), "events")


def foreign(path: Path) -> None:
    path.mkdir(0o755)
    os.chown(path, STRANGER, STRANGER)


def writable(path: Path) -> None:
    path.mkdir()
    path.chmod(0o757)


def linked(path: Path) -> None:
    path.symlink_to(path.parent / "victim")


def a_file(path: Path) -> None:
    path.touch()


def test_a_group_may_write_to_it(tmp_path: Path) -> None:
    """Kubernetes makes that of what lies on a volume, where a pod has ``fsGroup``."""
    (tmp_path / "live").mkdir()
    (tmp_path / "live").chmod(0o2770)
    private_folder.own(str(tmp_path), "live").close()


@pytest.mark.parametrize(
    ("put", "says"),
    [
        pytest.param(foreign, f"belongs to uid {STRANGER}, mode 0755; it has to be yours", marks=root_only),
        (writable, r"mode 0757; .*, and not everybody may write to it: chmod o-w where it is yours"),
        (linked, "is a link: remove it, or choose another directory"),
        (a_file, "is no folder: remove it, or choose another directory"),
    ],
)
def test_nobody_else_is_in_its_place(tmp_path: Path, put: Callable[[Path], None], says: str) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "old").touch()
    put(tmp_path / "live")
    before = sorted(tmp_path.rglob("*"))
    for names in (["live"], ["live", "requests"]):
        with pytest.raises(NotPrivate, match=f"{tmp_path}/live .*{says}" if "mode" not in says else says):
            own(str(tmp_path), *names)
    assert sorted(tmp_path.rglob("*")) == before


@root_only
def test_a_file_system_that_knows_the_user_under_another_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS does with root: what this user makes is not of its own number."""
    monkeypatch.setattr(private_folder, "_mapped", set())
    foreign(tmp_path / "theirs")
    monkeypatch.setattr(private_folder.os, "geteuid", lambda: 777)
    for _ in range(2):
        with own(str(tmp_path), "live") as folder:
            folder.replace("x", b"1")
            assert folder.read("x", 1) == b"1" and folder.names() == ["x"]
        with pytest.raises(NotPrivate, match=f"belongs to uid {STRANGER}"):
            own(str(tmp_path), "theirs")
    assert os.listdir(tmp_path / "theirs") == []


@root_only
def test_root_may_look_but_uses_nothing(tmp_path: Path) -> None:
    """`inprocess report` of another user's job; a job of root's own takes nothing from there."""
    foreign(tmp_path / "events")
    (tmp_path / "events" / "mine").write_text("x")
    (tmp_path / "events" / "theirs").write_text("y")
    os.chown(tmp_path / "events" / "theirs", STRANGER, STRANGER)
    with look(str(tmp_path), "events") as folder:
        assert folder.read("theirs", 9) == b"y"
        with pytest.raises(NotPrivate, match="/events/mine belongs to uid 0"):
            folder.read("mine", 9)
    with pytest.raises(NotPrivate):
        own(str(tmp_path), "events")


@root_only
@pytest.mark.parametrize("where", ["the last part", "on the way"])
def test_links_of_others(tmp_path: Path, where: str) -> None:
    """Whoever may write to the folder above can lead nobody elsewhere; its owner, root and the user can."""
    shared, victim = tmp_path / "shared", tmp_path / "victim"
    for folder in (shared, victim):
        folder.mkdir()
        folder.chmod(0o777)
    link = shared / "run"
    link.symlink_to(victim)
    path = str(link if where == "the last part" else link / "below")
    own(path, "live").close()
    os.lchown(link, STRANGER, STRANGER)
    with pytest.raises(NotPrivate, match=f"'run' in {path} is a link of uid {STRANGER} in somebody else's folder"):
        own(path, "live")
    os.chown(shared, STRANGER, STRANGER)
    own(path, "live").close()


def test_links_without_an_end(tmp_path: Path) -> None:
    (tmp_path / "round").symlink_to("round")
    (tmp_path / "relative").symlink_to("./x/../y")
    (tmp_path / "x").mkdir()
    with pytest.raises(OSError, match="Too many levels"):
        own(str(tmp_path / "round" / "x"))
    own(str(tmp_path / "relative"), "live").close()
    assert (tmp_path / "y" / "live").is_dir()


@pytest.mark.parametrize("act", [Folder.open, Folder.append, Folder.update, lambda folder, name: folder.read(name, 9)])
def test_names_are_never_followed(tmp_path: Path, act: Callable[[Folder, str], object]) -> None:
    (tmp_path / "victim").write_text("mine")
    with own(str(tmp_path), "live") as folder:
        (tmp_path / "live" / "link").symlink_to(tmp_path / "victim")
        (tmp_path / "live" / "dangling").symlink_to(tmp_path / "new")
        os.mkfifo(tmp_path / "live" / "pipe")
        for name in ("link", "dangling", "pipe"):
            with pytest.raises(OSError):
                act(folder, name)
    assert not (tmp_path / "new").exists() and (tmp_path / "victim").read_text() == "mine"


def test_a_link_in_place_of_a_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    with own(str(tmp_path), "live") as folder:
        for name in ("x", f"x.{os.getpid()}"):
            (tmp_path / "live" / name).symlink_to(tmp_path / "victim")
        folder.replace("x", b"new")
        assert folder.names() == ["x"] and folder.read("x", 9) == b"new"
    assert (tmp_path / "victim").read_text() == "mine"


def test_a_folder_that_is_swapped_while_it_is_open(tmp_path: Path) -> None:
    """Another user's link comes between two operations: all of them are about what was opened."""
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "x").write_text("mine")
    with own(str(tmp_path), "live") as folder:
        folder.replace("x", b"1")
        (tmp_path / "live").rename(tmp_path / "elsewhere")
        (tmp_path / "live").symlink_to(tmp_path / "victim")
        folder.replace("x", b"2")
        folder.remove("x")
        assert folder.names() == []
    assert (tmp_path / "victim" / "x").read_text() == "mine"


def test_only_what_fits_is_removed(tmp_path: Path) -> None:
    with own(str(tmp_path), "live") as folder:
        for name in ("a.json", "notes"):
            with folder.below("dump-1") as below:
                os.close(below.create(name))
        with pytest.raises(OSError):  # it is not empty
            folder.remove_below("dump-1", re.compile(r".*\.json"))
        assert os.listdir(tmp_path / "live" / "dump-1") == ["notes"]
        folder.remove_below("dump-1", ALL)
        folder.remove_below("dump-1", ALL)
        assert folder.names() == []


def victim(tmp_path: Path, *names: str) -> Path:
    """A folder with files that are old, and named as the library names its own."""
    made = tmp_path / "victim"
    for name in names:
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text("mine")
    for path in (*made.rglob("*"), made):
        os.utime(path, (1, 1))
    return made


def there(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_a_tree_is_removed_through_no_link(tmp_path: Path) -> None:
    made = victim(tmp_path, "step_00000001/.metadata")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step_00000001").symlink_to(made / "step_00000001")
    (tmp_path / "run" / "step_00000002").mkdir()
    (tmp_path / "run" / "step_00000002" / "link").symlink_to(made)
    before = there(made)
    with own(str(tmp_path / "run")) as folder:
        folder.remove_tree("step_00000002", first=".metadata")
        with pytest.raises(NotADirectoryError):
            folder.remove_tree("step_00000001", first=".metadata")
        assert folder.names() == ["step_00000001"]
    assert there(made) == before


@root_only
def test_old_checkpoints_behind_another_user_s_link(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    made = victim(tmp_path, *(f"step_0000000{number}/.metadata" for number in range(5)))
    (shared / "run").symlink_to(made)
    os.lchown(shared / "run", STRANGER, STRANGER)
    before = there(made)
    shelf = Shelf(str(shared / "run"))
    for act in (lambda: shelf.tidy(Name(0, 4), 1), lambda: shelf.set_aside([Name(0, 1)])):
        with pytest.raises(NotPrivate):
            act()
    assert there(made) == before


def test_run_directories_behind_a_link(tmp_path: Path) -> None:
    made = victim(tmp_path, *(f"20250101-00000{number}-x/{run_dir.MARK}" for number in range(3)))
    (tmp_path / run_dir.PARENT).symlink_to(made)
    before = there(made)
    run_dir.tidy(str(tmp_path / run_dir.PARENT), kept=0)
    assert there(made) == before
    run_dir.tidy(str(made), kept=0)
    assert there(made) == []


@pytest.mark.parametrize("name", ["events", writer.FOLDER])
def test_reports_behind_a_link(tmp_path: Path, name: str) -> None:
    made = victim(tmp_path, "0001/incident.json.77", "latest.json.3", "rank-0-x-1.jsonl")
    (tmp_path / "run" / "events").mkdir(parents=True, mode=0o700)
    if name == "events":
        (tmp_path / "run" / "events").rmdir()
    (tmp_path / "run" / name).symlink_to(made)
    before = there(made)
    with pytest.raises(NotPrivate, match=f"/run/{name} is a link"):
        writer.write(str(tmp_path / "run"))
    assert there(made) == before
