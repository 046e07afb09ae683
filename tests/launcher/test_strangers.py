"""Other users of the machine: what a real job opens is what docs/security.md says, and they can do nothing with it."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from inprocess.monitor import pidfile
from inprocess.reports import dump, live_reading
from inprocess.testing import Command
from tests.launcher.harness import CEILING

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user")
ROOT = Path(__file__).parents[2]
SCRIPT, QUICK = (str(Path(__file__).with_name(name)) for name in ("everything_script.py", "restarting_script.py"))
#: another user
STRANGER = 54321
#: rows of the page that this job does not meet (by the beginning of their third column), and who looks at them
ELSEWHERE = {
    "without a launcher": "tests/threads/test_bind.py",
    "`EtcdStore`": "tests/contracts/test_etcd_store.py",
    "`inprocess run` without": "tests/unit/test_run_dir.py",
    "you call it": "the user's own files",
    "`transformers`": "tests/frameworks",
    "`inprocess doctor": "tests/doctor",
    "`inprocess timeline": "tests/unit/test_timeline.py",
}


def anybody_may_write(_: Mapping[str, str]) -> None:
    os.umask(0)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that all users reach, unlike pytest's, with a place for temporary files."""
    made = Path(tempfile.mkdtemp(prefix="place-", dir="/tmp"))
    made.chmod(0o755)
    (made / "tmp").mkdir()
    (made / "tmp").chmod(0o1777)
    (made / "job").mkdir()
    yield made
    shutil.rmtree(made)


@pytest.fixture
def run(place: Path) -> Iterator[Callable[..., Command]]:
    commands: list[Command] = []

    def begin(*arguments: str) -> Command:
        env = {"TMPDIR": str(place / "tmp")}
        arguments = ("--standalone", "--nproc-per-node", "2", "--run-dir", str(place / "run"), *arguments)
        deadline = time.monotonic() + 2 * CEILING
        started = Command(["inprocess", "run", *arguments], deadline, env=env, folder=place, prepare=anybody_may_write)
        commands.append(started)
        return started

    yield begin
    for command in commands:
        command.close()


# --- the page -----------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """Of the table in docs/security.md."""

    where: str
    when: str
    mode: str
    met: set[str] = field(default_factory=set)

    def names(self, path: str) -> bool:
        found = re.findall(r"`([^`]+)`", self.where)
        return any(re.fullmatch(_as_expression(pattern), path) for pattern in found)


def _as_expression(pattern: str) -> str:
    words = {"**": ".*", "*": "[^/]*"}
    return "".join(words.get(part, re.escape(part)) for part in re.split(r"(\*\*|\*)", pattern))


def rows() -> list[Row]:
    table = (ROOT / "docs/security.md").read_text().partition("## What is opened")[2].partition("### Folders")[0]
    cells = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in table.splitlines() if "|" in line]
    return [Row(*row[1:4]) for row in cells[2:]]


# --- what is there ------------------------------------------------------------------------------------------------


def processes(command: Command) -> Iterator[psutil.Process]:
    """Of the job, that live."""
    launcher = psutil.Process(command.pid)
    for process in (launcher, *launcher.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process


def ports(command: Command) -> dict[str, set[int]]:
    """Who listens: role -> ports."""
    found: dict[str, set[int]] = {}
    for process in processes(command):
        role = "a rank" if SCRIPT in " ".join(process.cmdline()) else "the metrics program"
        role = "a monitor" if pidfile.is_monitor(process.pid) else role
        role = "the launcher" if process.pid == command.pid else role
        listening = [each for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        found.setdefault(role, set()).update(each.laddr.port for each in listening)
    return found


def opened(command: Command) -> set[tuple[int, str]]:
    """(process, descriptor's path) of all that is open, files or memory."""
    found = set()
    for process in processes(command):
        for name in os.listdir(f"/proc/{process.pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                found.add((process.pid, os.readlink(f"/proc/{process.pid}/fd/{name}").removesuffix(" (deleted)")))
    return {each for each in found if each[1].startswith("/") and not each[1].startswith("/dev/")}


def symbolic(path: Path, place: Path) -> str:
    """As the page names it."""
    for text, name in (
        (place / "run", "RUN_DIR"),
        (place / "logs", "LOG_DIR"),
        (place / "job/checkpoints", "FOLDER"),
        (place / "job/flight", "FLIGHT_RECORDS"),
        (place / "tmp", "TMPDIR"),
    ):
        if path.is_relative_to(text):
            return str(name / path.relative_to(text))
    if (found := re.fullmatch(r"\d\.(log|pid)(\.\d+)?", path.name)) and path.parent == place / "job/logs":
        return f"{found[1].upper()}FILE{found[2] or ''}"
    return str(path)


def made(place: Path) -> list[Path]:
    """All that was made there, the script's own signs left out; deepest last."""
    own = {place / "tmp", place / "job", place / "job/logs", place / "job/go"}
    return sorted(path for path in place.rglob("*") if path not in own)


class Seen:
    """What was there at any time, held against the page."""

    def __init__(self, place: Path) -> None:
        self._place, self.rows, self.unknown = place, rows(), set[str]()

    def look(self) -> None:
        for path in made(self._place):
            with contextlib.suppress(FileNotFoundError):
                self._file(path, path.lstat())

    def _file(self, path: Path, found: os.stat_result) -> None:
        mode = f"{stat.S_IMODE(found.st_mode):04o}"
        name = symbolic(path, self._place)
        if stat.S_ISDIR(found.st_mode):
            # torch makes what is in that folder
            if mode != "0700" and not name.startswith("LOG_DIR/"):
                self.unknown.add(f"the folder {name} has mode {mode}")
            return
        name = name.removesuffix(f".{os.getpid()}")
        fitting = [row for row in self.rows if row.names(re.sub(r"(\.(json|html))\.\d+$", r"\1", name))]
        for row in fitting:
            row.met.add(name)
            if row.mode.startswith("0") and mode != row.mode:
                self.unknown.add(f"{name} has mode {mode}, not {row.mode}")
        if not fitting:
            self.unknown.add(f"{name} is not on the page")

    def listens(self, found: Mapping[str, set[int]]) -> None:
        for role, numbers in found.items():
            fitting = [row for row in self.rows if f"a port of {role}" in row.where]
            any_number = [row for row in self.rows if role == "a rank" and "ports of the ranks" in row.where]
            for row in (*fitting, *any_number) if numbers else ():
                row.met.add(role)
            if len(numbers) > len(fitting) and not any_number:
                self.unknown.add(f"{role} listens on {len(numbers)} ports, and the page has {len(fitting)}")

    def has_open(self, found: set[tuple[int, str]]) -> None:
        for _, path in found:
            for row in self.rows:
                if row.names(path):
                    row.met.add(path)
            if path.startswith("/memfd:") and not any(path in row.met for row in self.rows):
                self.unknown.add(f"{path} is not on the page")

    def missing(self) -> list[str]:
        return [row.where for row in self.rows if not row.met and not any(map(row.when.startswith, ELSEWHERE))]


# --- the other user -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stranger() -> Iterator[None]:
    """This process is another user."""
    groups, group = os.getgroups(), os.getegid()
    os.setgroups([])
    os.setegid(STRANGER)
    os.seteuid(STRANGER)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)
        os.setgroups(groups)


def tries(path: Path, is_folder: bool) -> dict[str, Callable[[], object]]:
    other = path.with_name("other")
    found: dict[str, Callable[[], object]] = {
        "remove": path.rmdir if is_folder else path.unlink,
        "rename": lambda: path.rename(other),
        "put a link beside": lambda: other.symlink_to("/"),
        "chmod": lambda: path.chmod(0o777),
    }
    if is_folder:
        return found | {"list": lambda: os.listdir(path), "create": (path / "other").touch}
    return found | {
        "read": lambda: path.open("rb").close(),
        "append": lambda: path.open("ab").close(),
        "connect": lambda: _connect(path),
    }


def _connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(path))


def succeeds(place: Path) -> list[str]:
    """What another user can do with it."""
    found = [(path, path.is_dir()) for path in made(place)]
    tops = {place, place / "tmp"}
    done = []
    with stranger():
        for path, is_folder in found:
            for name, attempt in tries(path, is_folder).items():
                try:
                    attempt()
                except (PermissionError, FileNotFoundError):  # the second: it has ended meanwhile
                    continue
                if not (path.parent in tops and name == "put a link beside"):
                    done.append(f"{name} {path}")
    for path in tops:
        (path / "other").unlink(missing_ok=True)
    return done


def reaches(found: set[tuple[int, str]]) -> list[str]:
    """What another user opens of the processes themselves."""
    paths = [f"/proc/{pid}/{name}" for pid in {pid for pid, _ in found} for name in ("environ", "mem", "fd", "maps")]
    done = []
    with stranger():
        for path in paths:
            try:
                (os.listdir if path.endswith("/fd") else _read)(path)
                done.append(path)
            except (PermissionError, FileNotFoundError, ProcessLookupError):
                continue
    return done


def _read(path: str) -> object:
    with open(path, "rb") as file:
        return file.read(1)


def test_what_a_job_opens_and_what_another_user_can_do_with_it(
    run: Callable[..., Command], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen(place)
    job = run("--tee", "3", "--log-dir", str(place / "logs"), "--metrics", "0", SCRIPT, str(place / "job"), "6")
    job.expect("<standing", "out")
    # rank 0 serves its state now
    seen.listens(ports(job))
    seen.has_open(opened(job))
    answers = dump._answers

    def looked(*given: object) -> object:
        seen.look()
        return answers(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(dump, "_answers", looked)
    ranks, _ = live_reading.read(str(place / "run"))
    dump.ask(str(place / "run"), ranks, CEILING)
    assert succeeds(place) == [] and reaches(opened(job)) == []
    _ask_for_the_state(job)
    (place / "job/go").touch()
    assert job.finish() == 0, job.story()
    seen.look()
    assert succeeds(place) == []
    assert not seen.unknown and seen.missing() == []


def _ask_for_the_state(job: Command) -> None:
    found = re.search(r"<standing (.*)@(.*):(.*)>", job.out)
    assert found is not None
    for token in ("", "x" * len(found[1])):
        connection = http.client.HTTPConnection(found[2], int(found[3]), timeout=CEILING)
        connection.request("GET", "/", headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        assert answer.status == http.client.UNAUTHORIZED and b"weight" not in answer.read()
        connection.close()


@pytest.mark.parametrize("how", ["links", "folders", "the directory itself"])
def test_a_run_directory_that_another_user_has_made(run: Callable[..., Command], place: Path, how: str) -> None:
    """Nothing behind it changes, the job trains on, and says what is wrong."""
    victim = place / "victim"
    names = ("monitor-0-a-1.json", "monitor-1-a-2.json.2", "0001/incident.json.7", "requests/a1", "index.html")
    for name in names:
        (victim / name).parent.mkdir(0o700, parents=True, exist_ok=True)
        (victim / name).write_text("mine")
    for path in victim.rglob("*"):
        os.utime(path, (1, 1))
    before = {path: path.lstat() for path in (victim, *victim.rglob("*"))}
    with _shared(place):
        if how == "the directory itself":
            (place / "run").symlink_to(victim)
        else:
            (place / "run").mkdir()
            (place / "run").chmod(0o777)
            for name in ("events", "live", "incidents"):
                path = place / "run" / name
                if how == "links":
                    path.symlink_to(victim)
                else:
                    path.mkdir()
                    (path / "requests").symlink_to(victim)
    job = run(QUICK)
    assert job.finish() == 0, job.story()
    assert {path: path.lstat() for path in (victim, *victim.rglob("*"))} == before
    assert sum("events are not written: " in line for line in job.err.splitlines()) in (1, 2, 3, 4), job.err
    says = {
        "links": "events is a link: remove it, or choose another directory",
        "folders": f"events belongs to uid {STRANGER}, mode 0755; it has to be yours (uid 0)",
        "the directory itself": f"'run' in {place}/run is a link of uid {STRANGER} in somebody else's folder",
    }
    assert says[how] in job.err


@contextlib.contextmanager
def _shared(place: Path) -> Iterator[None]:
    """As the other user, in a folder where everybody may make something, like /tmp."""
    place.chmod(0o1777)
    with stranger():
        yield
