"""A user's error in words: hostile ones, where they were raised, and tracebacks without any object of the user's."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import inprocess
from inprocess.interrupt.forks import guarded
from inprocess.system import errors
from inprocess.system.errors import ErrorSnapshot, in_words, inside, shown, where


class Hostile(Exception):
    """Its words raise what it was made with."""

    def __str__(self) -> str:
        raise self.args[0]

    __repr__ = __str__


@pytest.mark.parametrize("inside", [SystemExit(3), GeneratorExit(), BaseException(), ValueError()], ids=repr)
def test_words_that_raise(inside: BaseException) -> None:
    assert shown(Hostile(inside)) == f"an object of type Hostile (its __repr__ raises {type(inside).__name__})"
    assert in_words(Hostile(inside)) == f"Hostile: (its __str__ raises {type(inside).__name__})"


class Noted(Exception):
    """It has what `describe` asks an error for, and that raises what it was made with."""

    def __str__(self) -> str:
        return ""

    @property
    def __notes__(self) -> None:
        raise self.args[0]


@pytest.mark.parametrize("kind", [Hostile, Noted])
@pytest.mark.parametrize("describe", [shown, in_words, ErrorSnapshot])
def test_ctrl_c_is_not_swallowed(describe: Callable[[BaseException], object], kind: type[Exception]) -> None:
    error = kind(KeyboardInterrupt())
    if kind is Hostile or describe is ErrorSnapshot:
        with pytest.raises(KeyboardInterrupt):
            describe(error)
    with ThreadPoolExecutor(1) as other:  # where it cannot come from outside
        other.submit(describe, error).result()


@pytest.mark.parametrize(
    ("error", "words"),
    [(ValueError("a\nb"), "ValueError: a\nb"), (ValueError(), "ValueError"), (KeyError("k"), "KeyError: 'k'")],
)
def test_words(error: Exception, words: str) -> None:
    assert in_words(error) == words


def raised(source: str, file: str) -> Exception:
    names: dict[str, object] = {}
    exec(compile(source, file, "exec"), names)
    try:
        names["fail"]()  # type: ignore[operator]
    except Exception as error:
        return error
    raise AssertionError


@pytest.mark.parametrize("folder", ["/home/me/inprocess", "/home/me/inprocess/examples", "/x/inprocess/inprocess"])
def test_a_folder_of_the_users_with_the_name_of_this_package(folder: str) -> None:
    assert where(raised("def fail():\n    1 / 0\n", f"{folder}/train.py")) == f"{folder}/train.py:2 in fail"


def test_lines_of_this_package_are_no_place() -> None:
    """The innermost line of the user's, where it calls this library."""
    inner = Path(inprocess.__file__).parent / "live/state.py"
    source = f"exec(compile('def inner():\\n    1 / 0\\n', {str(inner)!r}, 'exec'))\ndef fail():\n    inner()\n"
    assert where(raised(source, "/home/me/train.py")) == "/home/me/train.py:3 in fail"


def test_a_traceback_begins_in_the_users_code() -> None:
    """Behind the lines of this library that called it. One that never left them is shown."""
    ours = str(Path(inprocess.__file__).parent / "interrupt/frames.py")
    source = "exec(compile('def inner():\\n    1 / 0\\n', '/home/me/train.py', 'exec'))\ndef fail():\n    inner()\n"
    for code, file in ((source, "/home/me/train.py"), ("def fail():\n    1 / 0\n", ours)):
        error = raised(code, ours)
        assert error.__traceback__ is not None
        text = shown_in_full(ErrorSnapshot(error.with_traceback(error.__traceback__.tb_next)))
        places = [line for line in text.splitlines() if line.startswith("  File ")]
        assert places == [f'  File "{file}", line 2, in {"inner" if file != ours else "fail"}']


def fail(depth: int = 0) -> None:
    if depth:
        fail(depth - 1)
    tensor = Thing()
    assert tensor
    raise ValueError("the words")


class Thing:
    """What a frame holds."""


def shown_in_full(snapshot: ErrorSnapshot) -> str:
    """As the log shows it."""
    return "".join(snapshot.format()).rstrip("\n")


def caught(depth: int = 0) -> ValueError:
    try:
        fail(depth)
    except ValueError as error:
        return error
    raise AssertionError


def test_a_traceback_as_python_prints_it() -> None:
    text = shown_in_full(ErrorSnapshot(caught()))
    assert text.startswith("Traceback (most recent call last):\n")
    assert f'File "{__file__}", line ' in text
    assert '    raise ValueError("the words")\n' in text
    assert text.endswith("ValueError: the words")


def test_causes_come_first() -> None:
    try:
        try:
            fail()
        except ValueError as error:
            raise Hostile(SystemExit()) from error
    except Hostile as error:
        text = shown_in_full(ErrorSnapshot(error))
    assert text.index("ValueError: the words") < text.index("direct cause") < text.index("Hostile: (its __str__")
    try:
        try:
            fail()
        except ValueError:
            raise KeyError("k")  # noqa: B904
    except KeyError as error:
        assert "During handling" in shown_in_full(ErrorSnapshot(error))


def test_an_error_that_is_its_own_cause() -> None:
    error = caught()
    error.__context__ = other = ValueError("other")
    other.__context__ = error
    assert shown_in_full(ErrorSnapshot(error)).count("\nValueError: the words") == 1


def test_a_deep_recursion_is_cut() -> None:
    text = shown_in_full(ErrorSnapshot(caught(500)))
    assert text.count("  File ") == errors.FRAMES
    assert "more frames" in text


def test_nothing_of_the_users_is_kept() -> None:
    error = caught()
    thing = weakref.ref(error.__traceback__.tb_next.tb_frame.f_locals["tensor"])  # type: ignore[union-attr]
    assert thing() is not None
    snapshot = ErrorSnapshot(error)
    del error
    assert thing() is None
    assert "the words" in shown_in_full(snapshot)


def test_a_disk_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback comes without source, once after a moment and from then on at once."""
    answers, asked = threading.Event(), []

    def hang(files: set[str]) -> None:
        asked.append(files)
        answers.wait()

    monkeypatch.setattr(errors, "_read_all", hang)
    monkeypatch.setattr(errors, "READING", 0.01)
    monkeypatch.setattr(errors.linecache, "cache", {})
    texts = [shown_in_full(ErrorSnapshot(caught())) for _ in range(3)]
    answers.set()
    assert errors._reader is not None
    errors._reader.join()
    assert len(asked) == 1
    assert all("in fail\nValueError: the words" in text for text in texts)


def test_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback comes without source, and the next one with it."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(errors.linecache, "cache", {})
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        text = shown_in_full(ErrorSnapshot(caught()))
    assert "in fail\nValueError: the words" in text
    assert "in fail\n    raise ValueError" in shown_in_full(ErrorSnapshot(caught()))


def test_a_traceback_without_the_librarys_frames_around_it() -> None:
    def fails() -> None:
        raise ValueError

    with pytest.raises(ValueError) as caught:
        guarded(fails)
    assert caught.value.__traceback__ is not None
    trace = inside(caught.value.__traceback__.tb_next)
    assert trace is not None and trace.tb_frame.f_code is fails.__code__
    assert inside(None) is None
