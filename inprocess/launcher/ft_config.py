"""How the launcher watches workers: settings from a YAML file and from ``--ft-<name>`` options, checked once.

Each setting has one reader, which takes what YAML gives as well as the text of an option. What nvidia-resiliency-ext's
launcher has beyond them is taken, too: a line says what stands for it here.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from inprocess.exception import OptionError
from inprocess.launcher import ft_launcher
from inprocess.monitor.timeouts import MAX_NAME_LENGTH, Limits
from inprocess.options import MAX_DURATION_S, did_you_mean
from inprocess.system.logs import get_logger

__all__ = ["REPLACED", "Settings", "add_arguments", "load"]

log = get_logger("inprocess.run")

#: options that are taken and do nothing -> what stands for them
REPLACED = {
    **ft_launcher.OPTIONS,
    **{f"ft-{name.replace('_', '-')}": text for name, text in ft_launcher.SETTINGS.items()},
}
#: the part of a YAML file that is read
SECTION = "fault_tolerance"
#: texts that mean no limit, in an option
NONE = frozenset({"none", "null", ""})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Durations in seconds; None: no limit."""

    #: from ``monitored()`` to the first ``ping()`` or section
    initial_rank_heartbeat_timeout: float | None = 3600.0
    #: between two ``ping()``
    rank_heartbeat_timeout: float | None = 2700.0
    #: what a section may take, by its name
    rank_section_timeouts: Mapping[str, float | None] = field(default_factory=dict)
    #: between two sections
    rank_out_of_section_timeout: float | None = None
    #: how often the launcher looks
    workload_check_interval: float = 5.0
    #: learned timeouts are this many times the longest duration that was seen
    safety_factor: float = 5.0
    #: ends a worker that is overdue
    rank_termination_signal: signal.Signals = signal.SIGKILL

    def limits(self) -> Limits:
        """What a worker is told."""
        return Limits(
            first=self.initial_rank_heartbeat_timeout,
            heartbeat=self.rank_heartbeat_timeout,
            out_of_section=self.rank_out_of_section_timeout,
            sections=self.rank_section_timeouts,
            safety_factor=self.safety_factor,
        )


#: what each setting is for, as --help shows it
_HELP = {
    "initial_rank_heartbeat_timeout": "seconds from monitored() to the first ping() or section (default: 3600)",
    "rank_heartbeat_timeout": "seconds between two ping() (default: 2700)",
    "rank_section_timeouts": "seconds that sections may take, as NAME:SECONDS,NAME:SECONDS (default: no limits)",
    "rank_out_of_section_timeout": "seconds between two sections (default: no limit)",
    "workload_check_interval": "seconds between two looks at the workers (default: 5)",
    "safety_factor": "learned timeouts are so many times the longest duration seen (default: 5)",
    "rank_termination_signal": "ends a worker that is overdue (default: SIGKILL)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--ft-cfg-path`` and an option for each setting, with dashes or underscores in it.

    Values stay texts until :func:`load` checks them; those that are not given are None. The parser's error about an
    unknown ``--ft-`` option names the nearest known one.
    """
    parser.error = functools.partial(_error, parser.error)  # type: ignore[method-assign]
    group = parser.add_argument_group(
        "watching workers",
        "For workers that call inprocess.monitored(). 'null' in place of seconds: no limit. "
        "Further options of ft_launcher do nothing, and a line says what stands for them.",
    )
    group.add_argument(
        *_spellings("cfg_path"), metavar="FILE", help=f"YAML file with a section {SECTION!r}; options win over it"
    )
    for name, text in _HELP.items():
        group.add_argument(*_spellings(name), metavar=_metavar(name), help=text)
    for option in REPLACED:
        action = "store_true" if option in ft_launcher.FLAGS else "store"
        group.add_argument(*_forms(option), action=action, default=None, dest=option, help=argparse.SUPPRESS)


def _error(report: Callable[[str], NoReturn], message: str) -> NoReturn:
    known = [_spellings(name)[0] for name in ("cfg_path", *_HELP)]
    unknown = [
        word.partition("=")[0].replace("_", "-") for word in message.split() if word.startswith(("--ft-", "--ft_"))
    ]
    near = [each for word in unknown for each in difflib.get_close_matches(word, known, n=1) if word not in known]
    report(f"{message}: did you mean {', '.join(near)}?" if near else message)


def _spellings(name: str) -> list[str]:
    return _forms(f"ft-{name.replace('_', '-')}")


def _forms(option: str) -> list[str]:
    """With dashes, with underscores, and with underscores behind ``ft-``, as ft_launcher has some."""
    start = "ft-" if option.startswith("ft-") else ""
    forms = (option, option.replace("-", "_"), start + option.removeprefix(start).replace("-", "_"))
    return [f"--{form}" for form in dict.fromkeys(forms)]


def _tell(name: str, replacement: str) -> None:
    log.warning("%s does nothing here; in its place: %s", name, replacement)


def _metavar(name: str) -> str:
    return {"rank_section_timeouts": "NAME:SECONDS,...", "rank_termination_signal": "SIGNAL"}.get(name, "NUMBER")


def load(args: argparse.Namespace) -> Settings:
    """The settings from the file of ``--ft-cfg-path`` and the options; an option wins.

    Raises:
        OptionError: a setting is unknown or wrong, or the file cannot be read; the message names the option, its value
            and the remedy.
    """
    found: dict[str, Any] = {}
    path = getattr(args, "ft_cfg_path", None)
    if path is not None:
        found.update(_from_file(path))
    for name in _HELP:
        text = getattr(args, f"ft_{name}", None)
        if text is not None:
            found[name] = _READ[name](_spellings(name)[0], text)
    for option, replacement in REPLACED.items():
        if getattr(args, option, None) is not None:
            _tell(f"--{option}", replacement)
    return Settings(**found)


# --- the file


def _from_file(path: str) -> dict[str, Any]:
    where = f"--ft-cfg-path={path}"
    sections = list(_sections(_parse(path, where), set()))
    if len(sections) != 1:
        count = f"{len(sections)} sections" if sections else "no section"
        raise OptionError(f"{where} has {count} {SECTION!r}: write the settings into exactly one, at any depth")
    section = {} if sections[0] is None else sections[0]
    if not isinstance(section, Mapping):
        raise OptionError(f"{where}: {SECTION}={section!r:.100} must hold settings by name, such as safety_factor: 5")
    found: dict[str, Any] = {}
    for name, value in section.items():
        if name not in ft_launcher.SETTINGS:
            known = _known(name, where)
            found[known] = _READ[known](f"{where}: {known}", value)
        elif value is not None and value is not False:  # what is switched off is missed by nobody
            _tell(f"{where}: {name}", ft_launcher.SETTINGS[name])
    return found


def _known(name: object, where: str) -> str:
    if name in _HELP:
        return str(name)
    hint = did_you_mean(str(name), _HELP) or f": known settings: {', '.join(sorted(_HELP))}"
    raise OptionError(f"{where}: unknown setting {name!r} in {SECTION!r}{hint}")


def _parse(path: str, where: str) -> Any:
    try:
        import yaml  # noqa: PLC0415 - an optional extra
    except ImportError:
        raise OptionError(
            f"{where} needs pyyaml, which is not installed: pip install 'inprocess[launcher]', or give the settings as "
            "--ft-<name> options"
        ) from None
    try:
        with open(path, encoding="utf-8") as file:
            return yaml.safe_load(file)
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{where} cannot be read: {error}: give the path of a YAML file") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise OptionError(f"{where} is no YAML: {error}: correct the file") from None


def _sections(value: Any, visited: set[int]) -> Iterator[Any]:
    """What lies under the section's name, wherever that is; not inside another one.

    Aliases can make a small file endless, so each part of it is looked into once.
    """
    if not isinstance(value, Mapping | list) or id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, Mapping):
        if SECTION in value:
            yield value[SECTION]
        value = [each for name, each in value.items() if name != SECTION]
    for each in value:
        yield from _sections(each, visited)


# --- one setting


def _duration(name: str, value: Any) -> float:
    number = _number(value)
    if number is None or not 0 < number <= MAX_DURATION_S:
        raise OptionError(f"{name}={value!r:.100} is not a duration: give seconds above 0, at most {MAX_DURATION_S:g}")
    return number


def _limit(name: str, value: Any) -> float | None:
    if value is None or (isinstance(value, str) and value.strip().lower() in NONE):
        return None
    number = _number(value)
    if number is None or not 0 < number <= MAX_DURATION_S:
        raise OptionError(
            f"{name}={value!r:.100} is not a duration: give seconds above 0, at most {MAX_DURATION_S:g}, "
            "or null for no limit"
        )
    return number


def _factor(name: str, value: Any) -> float:
    number = _number(value)
    if number is None or not 1 <= number <= MAX_DURATION_S:
        raise OptionError(f"{name}={value!r:.100} must be a number, at least 1: give one such as 5.0")
    return number


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _section_limits(name: str, value: Any) -> dict[str, float | None]:
    given = _pairs(name, value) if isinstance(value, str) else {} if value is None else value
    if not isinstance(given, Mapping):
        raise OptionError(f"{name}={value!r:.100} must hold seconds by the names of sections: write checkpoint: 600")
    for each in given:
        if not isinstance(each, str) or not 0 < len(each) <= MAX_NAME_LENGTH:
            raise OptionError(f"{name}: {each!r:.100} is no name of a section: give 1 to {MAX_NAME_LENGTH} characters")
    return {each: _limit(f"{name}: {each}", limit) for each, limit in given.items()}


def _pairs(name: str, text: str) -> dict[str, str]:
    """``setup:600,step:30``; the last colon counts, so a name may have some. An empty text: none."""
    pairs = [part.rpartition(":") for part in text.split(",") if part.strip()]
    if not all(key.strip() and colon for key, colon, _ in pairs):
        raise OptionError(f"{name}={text!r:.100} is not NAME:SECONDS,NAME:SECONDS: write checkpoint:600,step:30")
    if len(found := {key.strip(): limit.strip() for key, _, limit in pairs}) != len(pairs):
        raise OptionError(f"{name}={text!r:.100} names a section twice: leave one of them out")
    return found


def _signal(name: str, value: Any) -> signal.Signals:
    """By name, with or without SIG, or by number."""
    text = str(value).strip().upper()
    try:
        if isinstance(value, bool):
            raise ValueError
        return signal.Signals(int(text)) if text.isdecimal() else signal.Signals[f"SIG{text.removeprefix('SIG')}"]
    except (ValueError, KeyError):
        raise OptionError(f"{name}={value!r:.100} is no signal: give one such as SIGKILL, SIGTERM or 9") from None


_READ: dict[str, Callable[[str, Any], Any]] = {
    "initial_rank_heartbeat_timeout": _limit,
    "rank_heartbeat_timeout": _limit,
    "rank_section_timeouts": _section_limits,
    "rank_out_of_section_timeout": _limit,
    "workload_check_interval": _duration,
    "safety_factor": _factor,
    "rank_termination_signal": _signal,
}

assert {each.name for each in fields(Settings)} == {*_HELP} == {*_READ}
