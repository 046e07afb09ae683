"""The sdist has the repository, from which the wheel is built and the tests run, and nothing that lies around."""

from __future__ import annotations

import tarfile

from tests.package.conftest import Built

#: what building adds
MADE = {"PKG-INFO", "setup.cfg"}


def members(built: Built) -> dict[str, tarfile.TarInfo]:
    """Its files by their place in it."""
    with tarfile.open(built.sdist) as archive:
        files = [member for member in archive.getmembers() if not member.isdir()]
    assert {file.name.split("/")[0] for file in files} == {built.sdist.name.removesuffix(".tar.gz")}
    return {file.name.partition("/")[2]: file for file in files}


def test_it_has_what_git_has(built: Built, tracked: list[str]) -> None:
    names = {name for name in members(built) if not name.startswith("inprocess.egg-info/")}
    assert sorted(names - MADE - set(tracked)) == []
    assert sorted(set(tracked) - names) == []


def test_programs_can_be_run(built: Built) -> None:
    assert members(built)[".ci/run"].mode & 0o111
