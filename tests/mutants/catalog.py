"""The list: what is broken, and the tests that should notice, the cheapest first. By file, in the order of its code."""

from __future__ import annotations

from functools import cache

from tests.mutants import ROOT, Edit, Mutant, Stale

SIM = "tests/sim/test_seeds.py"


def _in(file: str, *tests: str, seeds: bool = False) -> _File:
    return _File(f"inprocess/{file}", tests, seeds)


class _File:
    """Mutants of one file, or of one room (``call/*.py``), that the same tests should notice."""

    def __init__(self, file: str, tests: tuple[str, ...], seeds: bool) -> None:
        self._file, self._tests, self._seeds = file, tests, seeds

    def __call__(self, name: str, rule: str, old: str, new: str = "", *more: Edit) -> Mutant:
        return Mutant(name, rule, (Edit(_with(self._file, old), old, new), *more), self._tests, self._seeds)


def _with(files: str, snippet: str) -> str:
    """The one of the files that has this snippet; where none has it, the pattern, which `Edit.apply` then refuses."""
    found = [file for file, source in _sources(files) if snippet in source]
    if len(found) > 1:
        raise Stale(f"{', '.join(found)}: this occurs in all of them:\n{snippet}")
    return found[0] if found else files


@cache
def _sources(files: str) -> tuple[tuple[str, str], ...]:
    return tuple((str(path.relative_to(ROOT)), path.read_text()) for path in sorted(ROOT.glob(files)))


rounds = _in("protocol/rounds.py", "tests/unit/test_rounds.py")
membership = _in("protocol/membership.py", "tests/unit/test_membership.py")
book_seeds = _in("protocol/membership.py", SIM, seeds=True)
messages = _in("protocol/*.py", "tests/unit/test_messages.py")
repeats = _in("protocol/repeats.py", "tests/unit/test_repeats.py")
repeats_seeds = _in("protocol/repeats.py", SIM, seeds=True)
phases = _in("protocol/phases.py", "tests/unit/test_phases.py")
PROTOCOL = (
    # rounds: from a complete round to its verdict
    rounds(
        "reserves_wait_with_a_dead_one",
        "all are reserves and wait, with a dead member whose slot is not free",
        "(active > 0 or not gone)",
        "True",
    ),
    rounds(
        "a_death_is_hopeless",
        "a rank that died ends the job, as if the assignment were wrong",
        "arrival.kind in (ArrivalKind.DEAD, ArrivalKind.LEFT)",
        "arrival.kind is ArrivalKind.LEFT",
    ),
    rounds(
        "who_left_stays", "a member that left stays on the roster", "is ArrivalKind.ALIVE}", "is not ArrivalKind.DEAD}"
    ),
    rounds(
        "members_for_ranks",
        "the terminated ranks are taken for the removed members",
        "tuple(sorted(set(range(size)).difference(ranks.values())))",
        "removed",
    ),
    rounds("records_without_end", "a decision carries all records", "tuple(records[:MAX_RECORDS])", "tuple(records)"),
    # hosts: the ranks of one host without holes
    _in("protocol/verbs/hosts.py", "tests/unit/test_local_place.py")(
        "reserves_count_on_a_host",
        "a reserve has a place among the active ranks of its host",
        "[arrival.active_rank for arrival in arrivals if arrival.active_rank is not None]",
        "[arrival.active_rank or 0 for arrival in arrivals]",
    ),
    _in("protocol/verbs/hosts.py", "tests/unit/test_local_place.py")(
        "the_dead_count_on_a_host",
        "a member that is out of the job has a place on its host",
        ".intersection(membership.roster)",
    ),
    _in("call/local_place.py", "tests/ranks/test_local_place.py")(
        "who_joins_is_no_neighbor",
        "a replacement is not looked for on its host",
        "if known != self._asked_with:",
        "if not self._asked_with:",
    ),
    # repeats: the same error again and again
    repeats_seeds(
        "progress_does_not_help",
        "an error counts in an iteration in which a member committed",
        "if progressed or others or not records:",
        "if others or not records:",
    ),
    repeats_seeds(
        "pings_do_not_count",
        "an error at another step is taken for the same",
        "record.where, record.pings)",
        "record.where, 0)",
    ),
    repeats(
        "a_clean_up_ends_a_row",
        "an error whose clean-up waits never counts",
        "and not (explained and record",
        "and not (False and record",
    ),
    repeats(
        "a_death_ends_a_row",
        "a death between two errors sets the count back",
        "if not decision.repeats:\n            return ErrorStreak(self.count, self.errors, progressed)",
        "if not decision.repeats:\n            return ErrorStreak(progressed=progressed)",
    ),
    repeats(
        "hangs_far_apart",
        "hangs count as a row though something else ended an iteration between them",
        "return ErrorStreak(self.count, self.errors, progressed)",
        "return ErrorStreak(self.count, self.errors, progressed, self.hangs, self.hung)",
    ),
    # book: what one member knows
    membership(
        "nobody_is_removed",
        "who is out stays on the roster",
        "for member in self.roster if member not in gone",
        "for member in self.roster",
    ),
    membership(
        "frame_keeps_the_gone",
        "a new frame still names the ranks that were gone in the old one",
        "rank, world_size, frozenset()",
        "rank, world_size, self.terminated",
    ),
    membership(
        "always_included",
        "who was removed believes to be in the job",
        "return self.member in self.roster",
        "return True",
    ),
    book_seeds(
        "terminated_forgets",
        "terminated ranks are those of the last decision only, not all since the frame began",
        "frozenset(decision.terminated)",
        "frozenset(decision.terminated) - self.terminated",
    ),
    # messages: values from the network
    messages(
        "negative_numbers", "a rank below zero is accepted", "and 0 <= value < MAX_RANKS", "and value < MAX_RANKS"
    ),
    messages("truth_is_a_number", "true is accepted as a rank", "type(value) is int and", "isinstance(value, int) and"),
    messages(
        "unknown_fields",
        "a field of another version is accepted",
        "if (check := checks.get(name)) is None:",
        "if (check := checks.get(name, lambda value, *_: value)) is None:",
    ),
    messages(
        "flags_by_truth",
        "anything is accepted as true or false",
        "    if isinstance(value, bool):\n",
        "    if value is not None:\n",
    ),
    # phases: the table
    phases(
        "skip_the_start_round",
        "the function starts without the start round",
        "(P.ASSIGN, E.OK): P.START",
        "(P.ASSIGN, E.OK): P.INITIALIZE",
    ),
    phases(
        "skip_the_outcome",
        "who returned does not wait for the others",
        "(P.RUN, E.OK): P.FINISH",
        "(P.RUN, E.OK): P.COMPLETE",
    ),
    phases(
        "skip_the_abort",
        "a restart does not wait for the abort",
        "(P.RUN, E.INTERRUPTED): P.ABORT",
        "(P.RUN, E.INTERRUPTED): P.FINALIZE",
    ),
    phases(
        "skip_the_health_check",
        "a restart goes without a health check",
        "(P.FINALIZE, E.OK): P.RECHECK",
        "(P.FINALIZE, E.OK): P.END",
    ),
    phases(
        "skip_the_end_round",
        "a restart begins without the end round",
        "(P.RECHECK, E.OK): P.END",
        "(P.RECHECK, E.OK): P.ASSIGN",
    ),
    phases(
        "leave_without_a_word",
        "who leaves does not arrive in the end round",
        "(P.RECHECK, E.QUIT): P.END",
        "(P.RECHECK, E.QUIT): P.LEAVE",
    ),
    phases(
        "cut_off_without_abort",
        "who is cut off leaves while the function's waits go on",
        "(P.RUN, E.CUT_OFF): P.ABORT",
        "(P.RUN, E.CUT_OFF): P.LEAVE",
    ),
)

#: pieces of the coordinator
WAKE = """    text = dump(Start(go=False))
    if (yield Claim(f"{iteration}/start", text)) == text.encode():
        yield Claim(f"{iteration}/rendezvous", "-")
"""
FENCED_FIRST = """    yield from _arrive(iteration, "end", member, dead, roster)
    if interrupted:
        yield from wake(iteration)
"""
#: for what is a plain set there
SETS = Edit(
    "inprocess/protocol/verbs/rounds.py",
    "import Claim, Exist, Read, ReadAll, Verb",
    "import Claim, Exist, Read, ReadAll, Set, Verb",
)
WAKE_SETS = Edit(
    "inprocess/protocol/verbs/shared.py",
    "import Add, Claim, Exist, Read, ReadAll, Verb",
    "import Add, Claim, Exist, Read, ReadAll, Set, Verb",
)
verbs = _in("protocol/verbs/*.py", "tests/unit/test_verbs_over_a_dict.py")
seeds = _in("protocol/verbs/*.py", SIM, seeds=True)
COORDINATOR = (
    # the rounds
    verbs("rank_is_shared", "two processes join with one rank", "found.by != by", "not found.by"),
    verbs(
        "entries_are_overwritten",
        "an entry is set, so a late riser overwrites that it was declared dead",
        "    found = yield Claim(key, text)\n    if found != text.encode():\n        return",
        "    yield Set(key, text)\n    found = text.encode()\n    if found != text.encode():\n        return",
        SETS,
    ),
    seeds(
        "count_before_entry",
        "a member is counted before its entry is written",
        """    found = yield Claim(key, text)
    if found != text.encode():
        return load_arrival(found, key)
    if (yield from count_in(f"{iteration}/{name}#", careful=iteration == JOINING)) >= len(roster):
""",
        """    count = yield from count_in(f"{iteration}/{name}#", careful=iteration == JOINING)
    found = yield Claim(key, text)
    if found != text.encode():
        return load_arrival(found, key)
    if count == len(roster):
""",
    ),
    seeds(
        "end_without_the_last",
        "the end round is decided when one member is still missing",
        '    if (yield from count_in(f"{iteration}/{name}#", careful=iteration == JOINING)) >= len(roster):\n',
        """    count = yield from count_in(f"{iteration}/{name}#", careful=iteration == JOINING)
    if name == "end" and iteration > JOINING and count == len(roster) - 1:
        yield Claim(f"{iteration}/next", dump(Decision()))
    if count >= len(roster):
""",
    ),
    seeds(
        "last_start_wins",
        "the start round's verdict is a plain set",
        'yield Claim(f"{iteration}/start", dump(start))',
        'yield Set(f"{iteration}/start", dump(start))',
        Edit(
            _with("inprocess/protocol/verbs/*.py", WAKE),
            WAKE,
            """    yield Set(f"{iteration}/start", dump(Start(go=False)))
    yield Set(f"{iteration}/rendezvous", "-")
""",
        ),
        SETS,
        WAKE_SETS,
    ),
    verbs(
        "last_decision_wins",
        "the end round's verdict is a plain set",
        'yield Claim(f"{iteration}/next", dump(decision))',
        'yield Set(f"{iteration}/next", dump(decision))',
        SETS,
    ),
    # the outcome
    seeds(
        "last_outcome_wins",
        "the outcome is a plain set instead of a compare-and-set",
        "    found = yield Claim(key, text)\n    outcome = load_outcome",
        "    yield Set(key, text)\n    found = text.encode()\n    outcome = load_outcome",
    ),
    verbs(
        "an_error_is_noted_twice",
        "what the others were told before is another reason",
        "if noted and outcome.cause != record and",
        "if noted and found != text.encode() and",
    ),
    seeds(
        "start_round_sleeps_on",
        "an interruption does not wake who waits in the start round",
        WAKE,
        '    yield Claim(f"{iteration}/rendezvous", "-")\n',
    ),
    seeds(
        "one_short",
        "completed is proposed when one active member has not finished",
        "if count < active_world_size:",
        "if count < max(1, active_world_size - 1):",
    ),
    verbs(
        "completed_overwrites",
        "completed is a plain set",
        'yield Claim(f"{iteration}/outcome", dump(Outcome(completed=True, removed=removed)))',
        'yield Set(f"{iteration}/outcome", dump(Outcome(completed=True, removed=removed)))',
    ),
    verbs(
        "gone_reserves_are_kept",
        "a reserve that was gone at the end belongs to the next call",
        "removed = yield from _gone_reserves(iteration, roster)",
        "removed = ()",
    ),
    # for the dead
    seeds(
        "dead_do_not_interrupt",
        "whoever speaks for a dead member enters the rounds for it, but does not interrupt",
        "        interrupted = yield from propose(iteration, record)\n",
        "        pass\n",
    ),
    verbs(
        "woken_before_it_is_fenced",
        "a member that wakes up late arrives as alive before it is declared dead",
        FENCED_FIRST,
        "    if interrupted:\n        yield from wake(iteration)\n" + FENCED_FIRST.splitlines(True)[0],
    ),
    seeds(
        "reserve_interrupts",
        "the death of a reserve interrupts the others",
        "if not (yield from _stands_aside(iteration, member)):",
        "if (yield from _stands_aside(iteration, member)) is not None:",
    ),
    seeds(
        "dead_counts_as_reserve",
        "the death of an active member is taken for that of a reserve",
        "(ArrivalKind.RANK, ArrivalKind.DISCARDED) and arrival.active_rank is None",
        "(ArrivalKind.RANK, ArrivalKind.DISCARDED)",
    ),
    verbs(
        "discarded_interrupts",
        "the death of a discarded member interrupts the others",
        "arrival.kind in (ArrivalKind.RANK, ArrivalKind.DISCARDED)",
        "arrival.kind is ArrivalKind.RANK",
    ),
    seeds(
        "no_recount",
        "nobody decides a round whose last arriver died before it could",
        "        yield from recount(iteration, recounting)\n",
    ),
    # around the rounds
    verbs(
        "over_too_early",
        "the store's host goes while a member needs it",
        '"gone#", careful=True)) >= members',
        '"gone#", careful=True)) >= members - 1',
    ),
    verbs(
        "forget_verdicts",
        "verdicts are deleted, for which a late riser waits",
        'for name in ("start",',
        'for name in ("outcome", "next", "start",',
    ),
    verbs(
        "roster_goes_back",
        "a member that stood still writes an older roster over a newer one",
        'instead="" if found is None else found.decode()',
        'instead="" if (found := (yield Read(ROSTER_KEY))) is None else found.decode()',
    ),
    verbs(
        "gives_up_in_the_past",
        "who was out of reach tells everybody to leave where nobody reads it",
        "            roster = yield from roster_beyond(iteration)\n",
        "            roster = None\n",
    ),
    verbs("forget_nothing", "a long job fills the store", "    if old < 0:\n", "    if old < iteration:\n"),
)

watch = _in("protocol/verbs/*.py", "tests/unit/test_watching.py")
watch_seeds = _in("protocol/verbs/*.py", SIM, seeds=True)
GUARDIAN = (
    watch_seeds(
        "completed_is_ignored",
        "who speaks for the dead waits for a next iteration also after completed",
        "await_outcome(iteration, roster)).completed:",
        "await_outcome(iteration, roster)).completed is None:",
    ),
    watch_seeds(
        "speak_once",
        "the dead are spoken for in one iteration only, not until they are off the roster",
        "        if decision.abort:\n            return",
        "        return",
    ),
    watch(
        "stand_in_after_abort",
        "who speaks for the dead goes on after the job has ended",
        "        if decision.abort:\n            return",
        "        pass",
    ),
    watch_seeds(
        "impatient_ring",
        "a neighbour is declared dead before its own lease has run out",
        "now - known[1] < self.timeout or",
        "now - known[1] < 2.0 or",
    ),
    watch(
        "lease_from_the_answer",
        "the lease counts from the end of a heartbeat, which may have travelled for long",
        "        beaten(now)\n",
        "        beaten((yield Now()))\n",
    ),
)

joins = _in("protocol/verbs/*.py", "tests/unit/test_joining.py")
tickets = _in("protocol/verbs/*.py", "tests/unit/test_joining.py")
seats = _in("protocol/rounds.py", "tests/unit/test_rounds.py", "tests/unit/test_joining.py")
slots = _in("protocol/membership.py", "tests/unit/test_membership.py", "tests/unit/test_joining.py")
meeting = _in("protocol/verbs/*.py", "tests/unit/test_owner.py")
owners = _in("stores/owner.py", "tests/unit/test_owner.py")
JOINERS = (
    joins(
        "joins_for_itself_only",
        "two that would be active only together wait for a restart",
        "assign_slots(membership.taken, waiting)",
        "assign_slots(membership.taken, {membership.member: ticket})",
    ),
    meeting(
        "nobody_begins_unheard",
        "who comes after two jobs have met is told that a job runs",
        "if why := load_decision(begun, JOINED_KEY).abort:",
        "if why := load_decision(begun, JOINED_KEY).abort and None:",
    ),
    owners(
        "other_size_is_ours",
        "a process of a job of another size arrives in this one",
        "(found.name, found.call, found.world_size) == (mine.name, mine.call, mine.world_size)",
        "(found.name, found.call) == (mine.name, mine.call)",
    ),
    owners(
        "drawn_is_not_compared",
        "a job goes on in the store of another one that took its port between two calls",
        "Access.GRANTED if found.drawn == mine.drawn else Access.LATER",
        "Access.GRANTED if found.drawn else Access.LATER",
    ),
    owners(
        "old_server_is_denied",
        "a job that comes after another one on its port does not wait for that server",
        "    if found.over:\n        return Access.LATER\n",
    ),
    joins(
        "speaks_for_another",
        "the monitor of a process that died early speaks for another one with the same rank",
        "if (yield from verbs.arrive_dead(membership, me, by)):",
        "if (yield from verbs.arrive_dead(membership, me, by)) or True:",
    ),
    tickets(
        "one_broken_ticket",
        "a ticket of another version ends the job",
        "    except BadMessage:\n        return CLOSED\n",
        "    except RestartAbort:\n        return CLOSED\n",
    ),
    seats(
        "beyond_its_world",
        "a process gets a slot beyond its own world size",
        "and lowest < ticket.world_size:",
        "and lowest < FIRST_JOINER:",
    ),
    slots(
        "rank_stays_where_somebody_joins",
        "members keep the numbering of before although everybody is back in its slot",
        "            self.rank, self.world_size = self.slot, decision.slots\n",
        "            self.world_size = decision.slots\n",
    ),
    slots(
        "taken_by_members",
        "the slots of those that joined count as free",
        "{self.slot_of(member) for member in self.roster}",
        "set(self.roster)",
    ),
)

policy = _in("monitor/policy.py", "tests/unit/test_policy.py")
timing = _in("protocol/timing.py", "tests/unit/test_policy.py")
POLICY = (
    timing(
        "lease_outlives_the_timeout",
        "a rank runs on after the others have given it up",
        "LEASE_SHARE = 0.9",
        "LEASE_SHARE = 1.1",
    ),
    _in("monitor/watchdog.py", "tests/threads/test_watchdog.py")(
        "a_question_is_not_noted",
        "nobody knows from when on the main thread does not run",
        "                    self._board.ask()  # first: an answer is newer\n",
        "                    pass\n",
    ),
    _in("call/fault.py", "tests/unit/test_fault.py")(
        "any_clock_will_do",
        "a restart is counted by another host's clock",
        "if clock and record.clock == clock and 0.0",
        "if 0.0",
    ),
    _in("call/fault.py", "tests/unit/test_fault.py")(
        "the_pause_counts",
        "a restart that waited on purpose says that it took so long",
        "            self._begin(self.at + seconds, self._last + seconds)\n",
        "            pass\n",
    ),
    policy(
        "soft_after_suspension",
        "a rank is reported that was suspended together with its monitor",
        "return max(asked, seen.ping, view.awake_since)",
        "return max(asked, seen.ping)",
    ),
    policy(
        "atomic_gives_no_time",
        "after atomic() no time is left to answer",
        "view.interrupted_at, view.atomic_at, view.awake_since",
        "view.interrupted_at, view.awake_since",
    ),
    policy(
        "grace_for_the_fenced",
        "who may not run one step further is given a time of grace",
        "view.limits.lease, by), at_once=True)",
        "view.limits.lease, by))",
    ),
    policy(
        "section_keeps_hard",
        "a section's own soft timeout does not move the hard one",
        "view.limits.hard + soft - view.limits.soft",
        "view.limits.hard",
    ),
    policy(
        "old_answers_count",
        "the answer to an older interruption counts",
        "seen.answered >= iteration or",
        "seen.answered >= 0 or",
    ),
)

raised = _in("interrupt/*.py", "tests/threads/test_interrupt.py")
in_flight = _in("interrupt/*.py", "tests/threads/test_in_flight.py")
escaping = _in("interrupt/escaping.py", "tests/unit/test_escaping.py")
closed = _in("interrupt/*.py", "tests/threads/test_interrupt_atomic.py")
parked = _in("interrupt/*.py", "tests/threads/test_parked.py")
forked = _in("interrupt/forks.py", "tests/threads/test_forks.py")
workers = _in("interrupt/loader_workers.py", "tests/threads/test_loader_workers.py")
INTERRUPTION = (
    workers(
        "dead_loader_worker_strikes_anywhere",
        "torch's handler of SIGCHLD raises in the middle of a restart",
        "if _is_in_function(handler):",
        "if True:",
    ),
    workers(
        "dead_loader_worker_in_own_lines",
        "it raises in this library's lines that the function has called",
        "if frame.f_code.co_filename.startswith(PACKAGE):",
        "if False:",
    ),
    workers(
        "dead_loader_worker_is_swallowed",
        "the function never learns that a worker of its DataLoader died",
        "                raise\n",
        "                pass\n",
    ),
    forked(
        "child_returns",
        "a child that returns from the function speaks for its rank",
        "        _end(None)\n",
        "        pass\n",
    ),
    forked("child_raises", "a child's exception restarts everybody", "            _end(error)\n", "            pass\n"),
    forked("child_has_the_board", "a child shows its progress for its rank's", "        detach()\n", "        pass\n"),
    raised(
        "handler_stays",
        "the previous signal handler is not restored",
        "_replace_handler(self.signum, self._previous)",
        "pass",
    ),
    raised(
        "shared_signal_is_swallowed",
        "the program's own handler gets no signals",
        "self._previous(signum, frame)",
        "pass",
    ),
    raised(
        "their_handler_stays",
        "a handler that the program puts in place of ours keeps the interruption away",
        "_in_main_thread(self._reinstall)",
        "pass",
    ),
    raised(
        "no_second_way",
        "a signal that the mask keeps away is all there is",
        "ctypes.pythonapi.PyErr_SetInterruptEx(ctypes.c_int(self.signum))",
        "pass",
    ),
    raised("full_queue", "a signal that the kernel refuses is lost", "os.kill(os.getpid(), self.signum)", "pass"),
    raised(
        "starts_after_the_interruption",
        "the function starts although the iteration was interrupted",
        "if self.interrupting or self.atomic.closed:\n                return",
        "if False:\n                return",
    ),
    raised(
        "interrupt_before_closing",
        "an atomic section may be cut in half",
        "        if not self.atomic.closed:\n            raise",
        "        if False:\n            raise",
    ),
    raised(
        "raised_once_only",
        "who swallows the interruption runs on",
        "            while not self.left.is_set():\n                self._armed",
        "            if not self.left.is_set():\n                self._armed",
    ),
    raised(
        "ctrl_c_is_lost",
        "Ctrl-C during a restart counts as interrupted",
        "asks_for_end(error, (RestartAbort, KeyboardInterrupt)):",
        "asks_for_end(error, (RestartAbort,)):",
    ),
    raised(
        "exit_is_lost",
        "sys.exit() during a restart counts as interrupted",
        "if asks_for_end(counts, (SystemExit,)) and not answers_interruption(counts, outer):",
        "if False:",
    ),
    raised(
        "exit_in_answer_leaves",
        "sys.exit() in answer to the interruption ends the rank",
        " and not answers_interruption(counts, outer):",
        ":",
    ),
    raised(
        "leaving_is_lost",
        "an exit that the interruption hits on its way out is lost",
        "under_way(raised, outer) if isinstance(raised, RankShouldRestart) else raised",
        "raised",
    ),
    raised(
        "exit_after_anothers_failure_leaves",
        "healthy ranks exit since their collectives have ended, and leave",
        "counts = counts_as(error, outer, self.atomic.closed)",
        "counts = error",
    ),
    raised(
        "checks_after_an_abort_count",
        "healthy ranks leave where the abort takes a group away just before they destroy it, and torch's check fails",
        "if isinstance(error, _CHECKS) and not aborted:",
        "if isinstance(error, _CHECKS):",
    ),
    raised(
        "exits_around_the_call_count",
        "an exit that the caller handles takes healthy ranks out",
        "    seen = {id(outer)}\n",
        "    seen = set[int]()\n",
    ),
    in_flight(
        "errors_in_flight_are_lost",
        "an error that the interruption hits on its way out is lost",
        "        if (leaving := found.leaving()) is not None:\n            return counts_as(leaving, outer)\n",
    ),
    in_flight(
        "handlers_are_failures",
        "an error that a handler may swallow counts where somebody else failed",
        "found.failure() if self._stood_still else None",
        "found.failure()",
    ),
    in_flight(
        "destructors_fail",
        "what leaves a destructor counts, which Python drops",
        " or place.code.co_name in _DROPPED",
    ),
    in_flight(
        "a_generator_that_is_closed_fails",
        "a generator that ends, and whose `finally` waits, takes its rank out",
        "if not isinstance(error, _ENDINGS) and self._leaves",
        "if self._leaves",
    ),
    in_flight(
        "missing_attributes_fail",
        "what `hasattr` asks for counts, and Python drops the error",
        "if issubclass(kind, AttributeError) and not",
        "if False and not",
    ),
    in_flight(
        "errors_outside_count",
        "what the caller of the function handles counts",
        "is_inside = frame is not None and any",
        "is_inside = any",
    ),
    escaping(
        "handlers_raise",
        "an `except` block that comes to its end counts as one that raises",
        'if self._at[following[0]].opname != "RERAISE":\n                return None',
        "if False:\n                return None",
    ),
    escaping(
        "types_are_guessed",
        "the error that an `except` block has raised in its place is taken for the first one",
        'kind = None if name == "RAISE_VARARGS" and instruction.arg else step.kind',
        "kind = step.kind",
    ),
    raised(
        "window_is_always_open",
        "the interruption is raised in the library's or the caller's code",
        "            frame = frame.f_back\n        return False\n\n    def _raise_once",
        "            frame = frame.f_back\n        return True\n\n    def _raise_once",
    ),
    raised(
        "any_gate",
        "a function is interrupted by the gate of another iteration",
        "return self._running",
        "return True",
    ),
    raised(
        "atomic_is_torn",
        "the interruption is raised in the lines that take atomic()'s lock",
        "if id(frame.f_code) in WHOLE:",
        "if False:",
    ),
    raised(
        "locks_stay_locked",
        "the interruption is raised in the line that gives back a lock, which stays locked",
        "        if unlocking and asked",
        "        if False and asked",
    ),
    raised(
        "locks_are_taken_for_nobody",
        "the interruption is raised in the line that has just taken a lock",
        "            locking\n            or codes",
        "            codes",
    ),
    raised(
        "logging_is_torn",
        "the interruption is raised in logging, which holds a lock",
        "patience = PATIENCE\n",
        "patience = 0.0\n",
    ),
    raised(
        "import_is_torn",
        "the interruption leaves a module imported by half",
        "asked < IMPORT_PATIENCE and",
        "False and",
    ),
    raised(
        "start_is_torn",
        "the interruption leaves a process that nobody has noted",
        "asked < START_PATIENCE and",
        "False and",
    ),
    raised(
        "one_signal",
        "a signal that comes a moment too early is not sent again",
        "            self._interrupter.send(again=sent)\n",
        "            sent or self._interrupter.send(again=sent)\n",
    ),
    raised(
        "drop_goes_unnoticed",
        "an interruption that Python drops in a destructor is waited for",
        "            self._dropped = True\n",
        "            previous(unraisable)\n",
    ),
    raised(
        "hook_stays",
        "sys.unraisablehook is not put back",
        "            if sys.unraisablehook is hook:\n",
        "            if False:\n",
    ),
    closed(
        "abort_during_atomic",
        "the abort does not wait for atomic()",
        "        self.closed = True\n        begin",
        "        self.closed = True\n        return\n        begin",
    ),
    closed(
        "atomic_after_abort",
        "atomic() begins after the abort",
        "        if self.closed and not self.depth:\n",
        "        if False:\n",
    ),
    closed(
        "no_nesting",
        "atomic() inside atomic() is refused once an abort waits",
        "if self.closed and not self.depth:",
        "if self.closed:",
    ),
    closed(
        "atomic_is_kept",
        "what Ctrl-C leaves locked blocks the abort for ever",
        "        self.atomic.drop()\n",
    ),
    parked(
        "never_parked",
        "the function computes on during the abort",
        "            self._interrupter.send(again=False)\n            yield",
        "            yield",
    ),
    parked(
        "parked_for_ever",
        "an abort that needs a lock of the function never ends",
        "acquire(timeout=PARK)",
        "acquire(timeout=-1)",
    ),
    parked(
        "parked_anywhere",
        "the library's own code is parked",
        "if not self._is_inside(frame) or any(code.co_filename == logging.__file__ for code in inside(frame)):\n"
        "            return\n",
        "if False:\n            return\n",
    ),
)

fenced_call = _in("call_wrapper.py", "tests/unit/test_lease.py")
fence = _in("monitor/lease.py", "tests/unit/test_lease.py")
lease = _in("monitor/*.py", "tests/unit/test_lease.py")
calls = _in("call_wrapper.py", "tests/unit/test_call_wrapper.py")
torn = _in("call_wrapper.py", "tests/threads/test_interrupt_atomic.py")
board = _in("monitor/board.py", "tests/unit/test_board.py", "tests/unit/test_call_wrapper.py")
CALL = (
    calls("atomic_is_not_shown", "the monitor does not know of atomic()", "        slots[ATOMIC] = 1"),
    fenced_call(
        "atomic_after_the_lease",
        "atomic() begins on a rank that the others may have given up",
        "            lease.kill_self()\n",
        "            pass\n",
    ),
    fence("lease_of_who_left", "a rank that has left the call is ended for its lease", "not board.slots[LEFT] and "),
    fence(
        "lease_in_any_phase",
        "a rank is ended for its lease in any phase",
        " and board.snapshot().phase in RUNNING:",
        ":",
    ),
    fence(
        "nobody_looks_at_the_lease",
        "a rank that wakes up with its monitor runs on",
        "        kill_self()\n    return left",
        "        pass\n    return left",
    ),
    lease(
        "lease_is_renewed",
        "a lease that has run out is renewed by the next heartbeat",
        "        if (lease := self.lease_until) is not None and clock.monotonic_ns() >= lease:\n",
        "        if False:\n",
    ),
    fence(
        "process_one_lives_on",
        "process 1 of a container does not end itself",
        "        os._exit(128 + signal.SIGKILL)\n",
        "        pass\n",
    ),
    fence(
        "last_words_before_the_end",
        "a rank that was given up lives on where its standard error cannot be written",
        "    os.kill(os.getpid(), signal.SIGKILL)\n",
        "    os.write(2, b' ')\n    os.kill(os.getpid(), signal.SIGKILL)\n",
    ),
    lease(
        "lease_that_was_ended_begins_again",
        "a heartbeat that is under way renews the lease of a rank that cannot be ended",
        " and not self._lease_is_over",
    ),
    lease("lease_of_one_alone", "who is alone from the start is ended for want of others", "0 if alone else "),
    lease(
        "no_lease_for_the_last",
        "the last of many has no lease, and who waits to join goes on without it",
        "alone = self.membership.known == {self.member}",
        "alone = self.membership.roster == (self.member,)",
    ),
    calls(
        "atomic_stays_on_the_board",
        "the monitor believes that atomic() never ended",
        "call._slots[ATOMIC] = 0 if",
        "_ = 0 if",
    ),
    calls("atomic_without_the_gate", "atomic() keeps nothing away", "        state._lock.acquire()\n"),
    calls(
        "atomic_of_the_call_after_abort",
        "call.atomic() begins after the abort",
        "        if state.closed and not state.depth:\n",
        "        if False:\n",
    ),
    calls(
        "no_nesting_of_the_call",
        "call.atomic() inside call.atomic() is refused once an abort waits",
        "if state.closed and not state.depth:",
        "if state.closed:",
    ),
    calls(
        "atomic_of_another_iteration",
        "a section that the program keeps is that of the iteration that it was made in",
        "        if call._atomic is not self:\n",
        "        if False:\n",
    ),
    torn(
        "atomic_of_the_call_is_torn",
        "the interruption is raised in the lines that take call.atomic()'s lock",
        "leave_alone(_Atomic.__enter__.__code__, _Atomic.__exit__.__code__)\n",
    ),
    board(
        "protection_is_counted_twice_at_once",
        "two threads that leave blocks without hang protection lose one of them",
        "        with self._counting:\n            if self.slots[ITERATION] == iteration:",
        "        if True:\n            if self.slots[ITERATION] == iteration:",
    ),
    calls(
        "protection_stays_off",
        "after disable_hang_protection() nothing is watched",
        "            self._board.protect(iteration)\n",
        "            pass\n",
    ),
    calls(
        "outer_section_is_forgotten",
        "after an inner section the outer one's timeout is lost",
        "self._sections[-1].limit if self._sections else None",
        "self._sections[-1].limit if len(self._sections) > 1 else None",
    ),
    _in("integrations/pacing.py", "tests/unit/test_integrations.py")(
        "callbacks_learn_to_hurry",
        "a callback's section gets less than soft_timeout",
        "max(learned, call.timeouts.soft_timeout)",
        "learned",
    ),
    _in("call/loop.py", "tests/ranks/test_usage.py::test_ranks_agree_on_learned_timeouts")(
        "callbacks_do_not_know_the_timeout",
        "a callback's section gets less than soft_timeout",
        "        participant.call.timeouts.soft_timeout = options.soft_timeout\n",
    ),
    _in("etcd/gateway.py", "tests/unit/test_etcd.py")(
        "refused_renewals_are_final",
        "etcd's error in answer to the renewal of a lease is not known as one that passes",
        'inner.get("grpc_code", inner.get("code")) if isinstance(inner, dict) else answer.get("code")',
        'answer.get("code")',
    ),
    calls(
        "sections_do_not_learn",
        "a section's timeout is not learned",
        "                self._call._timeouts.observed.section(self._name, clock.monotonic() - begun)\n",
        "                pass\n",
    ),
    board(
        "pings_of_the_last_iteration",
        "the pings of the last iteration count in this one",
        "slots[PING] = slots[SOFT]",
        "slots[SOFT]",
    ),
)

stores = _in("stores/*.py", "tests/contracts/test_store.py")
STORES = (
    stores(
        "claim_overwrites",
        "a compare-and-set is a plain set",
        "bytes(store.compare_set(op.key, op.instead, op.value))\n",
        "(store.set(op.key, op.value), op.value.encode())[1]\n",
    ),
    stores(
        "claim_wakes_nobody",
        "without libuv nobody is woken by a claim",
        "if found == op.value.encode() and op.awaited and not op.instead and not uses_libuv(store):",
        "if False:",
    ),
    stores(
        "reading_writes",
        "reading an absent key creates it",
        "store.compare_set(key, ABSENT, ABSENT)",
        'store.compare_set(key, "", ABSENT)',
    ),
    stores(
        "waits_have_no_end",
        "a wait goes on after its timeout",
        "        if remaining <= 0:\n            return None\n",
    ),
    stores(
        "lost_store_is_a_crash",
        "a store that is gone is an error of torch",
        'raise StoreLost(f"the store failed in {op}: {first_line(error)}. {LOST}{hint}") from None',
        "raise",
    ),
    stores(
        "lost_store_is_waited_for",
        "a store that is gone is taken for a wait that ran out",
        "            if not _is_timeout(error) and not (",
        "            if op.timeout is None and not _is_timeout(error) and not (",
    ),
)

ladder = _in("abort.py", "tests/threads/test_abort.py")
tables = _in("collectives/groups.py", "tests/threads/test_abort.py")
record = _in("collectives/nccl.py", "tests/threads/test_abort.py")
frames = _in("system/interpreter.py", "tests/threads/test_nccl.py")
around_nccl = _in("collectives/nccl.py", "tests/threads/test_nccl.py")
memory = _in("collectives/remembered.py", "tests/threads/test_nccl.py")
variables = _in("system/environment.py", "tests/threads/test_nccl.py")
gloo = _in("collectives/gloo.py", "tests/threads/test_abort_gloo.py")
LADDER = (
    ladder(
        "ladder_stops",
        "a step of the abort that fails stops the next",
        "            attempt.act()\n",
        "            attempt.act()\n            self._is_given_up = bool(attempt._error)\n",
    ),
    ladder(
        "steps_without_deadline",
        "a step of the abort that hangs stops the next",
        "self._running.acquire(timeout=max(0.0, until - now))",
        "self._running.acquire()",
    ),
    ladder(
        "ctrl_c_waits_for_a_step",
        "Ctrl-C waits for a step of the abort that hangs",
        "                thread.abandon()\n            raise\n",
        "                thread.end()\n            raise\n",
    ),
    ladder(
        "hung_thread_takes_the_next",
        "the steps after one that hangs wait for it",
        "            threads.remove(taken[place])\n",
        "",
    ),
    ladder(
        "late_thread_goes_on",
        "a step of the abort that was given up goes on with the others, which run twice",
        "                if self._is_given_up:\n",
        "                if False:\n",
    ),
    ladder(
        "nccl_one_by_one",
        "NCCL's groups are aborted one after the other, which deadlocks",
        "            rungs.append(together)\n",
        "            rungs += together\n",
    ),
    _in("call/start.py", "tests/ranks/test_joining.py::test_a_restart_whose_function_was_not_called_is_told_once")(
        "a_restart_is_not_told",
        "the log has no word of a restart before the one with which the first rank has joined",
        "        self._tell_for_the_first(decision)\n",
    ),
    _in("call/thread.py", "tests/ranks/test_exceptions.py")(
        "groups_are_never_freed",
        "groups of earlier iterations, with their threads and sockets, stay until the call ends",
        "            self._after_start()\n",
    ),
    _in("call/user_code.py", "tests/ranks/test_warm_up.py")(
        "a_spare_s_error_restarts_all",
        "an error while a reserve warms up restarts the others",
        "        if self._participant.stands_by:\n            raise error",
        "        if False:\n            raise error",
    ),
    _in("monitor/policy.py", "tests/unit/test_policy.py")(
        "a_spare_that_hangs_restarts_all",
        "a reserve that stands still restarts the others",
        "seen.reserve and seen.phase is Phase.RUN",
        "False",
    ),
    _in("call/thread.py", "tests/ranks/test_entering.py")(
        "ctrl_c_before_the_function",
        "Ctrl-C just before the function is entered leaves a monitor thread that waits until the function is left",
        "            self._given.leave()\n",
        "            pass\n",
    ),
    _in("call/mailbox.py", "tests/threads/test_mailbox.py")(
        "ctrl_c_leaves_a_lock",
        "Ctrl-C on a rank that waits for a round leaves its monitor thread waiting for ever",
        "        self._lock = threading.Lock()\n",
        "        self._lock = threading.Condition()\n",
    ),
    ladder(
        "a_step_owns_a_group",
        "a step of the abort keeps a group, and ends it when it is thrown away",
        "functools.partial(_abort_group, current, place, under_way)",
        "lambda group=group: (group.abort(), under_way.ended())",
    ),
    tables(
        "group_names_go_on",
        "groups are numbered on, so ranks that made fewer never meet the others again",
        "    tables.group_count = 0\n",
    ),
    record(
        "flight_record_follows_a_link",
        "the flight record follows a link",
        "folder.replace(path.name, record)",
        "path.write_bytes(record)",
    ),
    record(
        "flight_record_imports_the_compiler",
        "the flight record imports torch's compiler while the main thread waits",
        'includeStackTraces="torch._inductor.codecache" in sys.modules',
        "includeStackTraces=True",
    ),
    around_nccl(
        "watchdog_of_torchrun",
        "what torchrun sets is taken for the user's wish, and torch's watchdog ends healthy ranks",
        'if environ.get(HANDLING) == "1" and "TORCHELASTIC_RUN_ID" in environ:',
        "if False:",
    ),
    around_nccl(
        "graphs_are_replayed",
        "a graph may be replayed while it is destroyed",
        "            graph.replay = _refuse\n",
        "            pass\n",
    ),
    around_nccl(
        "a_launch_is_not_waited_for",
        "a graph is destroyed under a thread that launches it",
        "            while _is_replaying():\n",
        "            while False:\n",
    ),
    frames(
        "a_parked_launch_is_not_seen",
        "a graph is destroyed under a thread that was parked before its launch",
        "            frame = frame.f_back\n",
        "            frame = None\n",
    ),
    around_nccl(
        "graphs_refuse_for_ever",
        "a graph that captures again cannot be replayed",
        '            vars(graph).pop("replay", None)\n',
        "            pass\n",
    ),
    around_nccl(
        "a_late_reset",
        "a reset that hung takes graphs from the next iteration",
        "                _give_up_after(end)\n                graph.reset()\n",
        "                graph.reset()\n",
    ),
    memory(
        "compiled_graphs_stay",
        "compiled code replays graphs that were reset",
        "        if self._graphs_were_reset and _has_compiled_graphs():\n",
        "        if False:\n",
    ),
    memory(
        "all_is_compiled_again",
        "a restart throws away all compiled code, whether it has graphs or not",
        "        if self._graphs_were_reset and _has_compiled_graphs():\n",
        "        if self._graphs_were_reset:\n",
    ),
    memory(
        "symmetric_memory_stays",
        "symmetric memory of an iteration before is taken for this one's",
        "        if self._aborted:\n",
        "        if False:\n",
    ),
    memory(
        "symmetric_memory_is_taken_away",
        "a call without a restart throws symmetric memory away",
        "        if self._aborted:\n",
        "        if True:\n",
    ),
    variables(
        "settings_stay",
        "what was set for torch stays after the call",
        "for name in (*CHANGED, *self._settings)}",
        "for name in CHANGED}",
    ),
    gloo("gloo_waits", "a pending Gloo collective is not released", "connection.shutdown(socket.SHUT_RD)", "pass"),
)

follower = _in("call/*.py", "tests/threads/test_monitor_thread.py")
FOLLOWER = (
    follower(
        "late_entry",
        "the function is entered in an iteration that is over",
        "            if self._over:\n                return None\n",
    ),
    follower(
        "abort_before_atomic_ends",
        "the abort begins inside atomic()",
        "            gate.close_for_abort(_report_atomic)\n            with ",
        "            self._abort(iteration)\n            gate.close_for_abort(_report_atomic)\n            with ",
    ),
    follower(
        "finalize_before_it_is_left",
        "finalize begins while the abort is under way",
        '            emit("aborted")\n',
        '            self.mailbox.put("aborted", iteration, True)\n',
    ),
    follower(
        "cut_off_is_not_interrupted",
        "a rank whose store is gone stays in its function",
        "            self._get_out(self._own.iteration)\n        self.mailbox.fail",
        "            pass\n        self.mailbox.fail",
    ),
)

monitor = _in("monitor/program.py", "tests/threads/test_monitor_process.py")
files = _in("monitor/files.py", "tests/threads/test_monitor_process.py")
link = _in("monitor/*.py", "tests/threads/test_monitor_process.py")
waiting = _in("system/interpreter.py", "tests/threads/test_watchdog.py")
starting = _in("monitor/*.py", "tests/threads/test_watchdog.py")
lines = _in("system/*.py", "tests/threads/test_logs.py")
MONITOR = (
    lines("log_without_end", "a log that blocks fills the memory", "if self._lines.qsize() < MAX_QUEUED:", "if line:"),
    lines(
        "fork_in_a_line",
        "a child that is forked while a line is written finds standard error locked for ever",
        "before=_queue.hold, after_in_parent=_queue.let_go, ",
        "",
    ),
    lines(
        "every_fork_waits",
        "each fork waits for a log that blocks",
        "            self._forked_past = self._written\n",
        "            pass\n",
    ),
    lines(
        "last_line_is_lost",
        "a line that comes as the writer ends stays in the queue",
        "if self._lines.empty() or not self._has_writer.acquire(blocking=False):",
        "if line is None:",
    ),
    lines(
        "starter_is_overlooked",
        "the end does not wait for a writer that is just being started",
        "while self._has_writer.locked():",
        "while self._writer is not None and self._writer.is_alive():",
    ),
    lines(
        "abandoned_and_waited_for",
        "a log that blocks is waited for at the end of each call",
        "return self._abandoned_at != self._written and self.end(FLUSH_LIMIT_S)",
        "return self.end(FLUSH_LIMIT_S)",
    ),
    lines(
        "exit_waits_for_a_handler",
        "a process whose log blocks never ends",
        "            setattr(handler, name, lambda: None)\n",
        "            pass\n",
    ),
    _in("monitor/watchdog.py", "tests/threads/test_watchdog.py")(
        "one_monitor_is_watched",
        "a monitor that replaced another is not watched",
        "        if not replaced:\n",
        "        if True:\n",
    ),
    link(
        "accounted_for_while_dying",
        "a rank is accounted for when its main thread ends: a next function begins beside what is left of its process",
        "                died.wait()\n",
        "                pass\n",
    ),
    link(
        "foretold_for_a_reserve",
        "a reserve that dies interrupts the others",
        "and not seen.reserve and link.inside",
        "and link.inside",
    ),
    starting(
        "closed_while_polled",
        "descriptors are closed while another thread polls them",
        "            self._ends.let_go()\n",
        "            os.close(self._ends.pidfd)\n            self._ends.control.close()\n",
    ),
    waiting(
        "wait_for_a_thread_in_one",
        "who waits for a hook or for contacts does not show that it runs, and is killed",
        "thread.join(min(left, SLICE))",
        "thread.join(left)",
    ),
    starting(
        "wait_for_the_monitor_in_one",
        "who waits for its monitor's store does not show that it runs, and is killed",
        "min(SLICE, deadline - clock.monotonic())",
        "deadline - clock.monotonic()",
    ),
    monitor(
        "death_goes_unnoticed",
        "the monitor does not notice that its rank died",
        "        if self._training in ready:\n",
        "        if False:\n",
    ),
    monitor(
        "stopped_is_not_woken",
        "a stopped rank is not woken up to end in order",
        "        self._signal(signal.SIGCONT)\n",
    ),
    monitor("never_by_force", "a rank that ignores SIGTERM lives on", "        self._end_rank(self._deadly)\n"),
    monitor(
        "dies_with_the_job",
        "a signal to the whole job ends the monitor",
        "signal.signal(signum, signal.SIG_IGN)",
        "pass",
    ),
    monitor(
        "host_goes_first",
        "the store goes while others need it",
        "elif self._link.is_host:",
        "elif False:",
    ),
    monitor(
        "lost_store_is_kept_secret",
        "the monitor's log does not tell that the store is gone",
        '            log.error("store lost: %s", text)\n',
    ),
    files(
        "waits_for_the_disk",
        "a disk that does not answer keeps the monitor from protecting",
        "self._opening.join(PATIENCE)",
        "self._opening.join()",
    ),
    files(
        "log_follows_a_link",
        "the log is written through a link that somebody else made",
        "os.O_APPEND | os.O_NOFOLLOW",
        "os.O_APPEND",
    ),
    files(
        "pidfile_of_another",
        "another job's pid file is replaced",
        "if other is not None and _is_foreign(other, training_pid):",
        "if other is None:",
    ),
    link(
        "late_monitor_waits",
        "a monitor waits for a verdict that is deleted",
        "            execute(verbs.refuse_behind(iteration), connection)\n",
    ),
    link(
        "lease_without_heartbeats",
        "the monitor does not note its heartbeats, so there is no lease",
        "                self._board.slots[LEASE] = 0 if alone else int(self.heartbeat_at * 1e9) + self.limits.lease\n",
    ),
)


def _loop(test: str, name: str, rule: str, old: str, new: str = "", file: str = "call/*.py") -> Mutant:
    return _in(file, f"tests/ranks/{test}.py")(name, rule, old, new)


LOOP = (
    _loop(
        "test_completion",
        "return_before_the_others",
        "who returned does not wait for the outcome",
        "return self._await_outcome(participant.options.completion_timeout)",
        "return Event.COMPLETED",
    ),
    _loop(
        "test_spares",
        "reserves_run",
        "a reserve calls the function",
        "        participant.log_restart()\n        if participant.is_reserve:\n            return self._stand_by()",
        "        participant.log_restart()",
    ),
    _loop(
        "test_exceptions",
        "fault_is_kept_secret",
        "who raised does not tell the others",
        "            return participant.interrupt(record)\n        finally:",
        "            return True\n        finally:",
    ),
    _loop(
        "test_exceptions",
        "traceback_is_kept",
        "an exception keeps tensors alive over restarts",
        "                let_go(error, sys.exc_info()[1])\n",
        "                pass\n",
    ),
    _loop(
        "test_repeats",
        "error_is_kept",
        "the last error is kept while the function runs",
        'or the call is over."""\n        self.error = None',
        'or the call is over."""',
        file="call/failures.py",
    ),
    _loop(
        "test_repeats",
        "cause_of_a_row_only",
        "where another rank ends the job, a rank does not say what it had raised",
        "(decision.repeats and not self.repeats)",
        "not self.repeats",
        file="call/failures.py",
    ),
    _loop(
        "test_repeats",
        "a_standstill_is_progress",
        "a hang before the first ping() never ends a job whose soft timeout is a minute or more",
        "clock.monotonic() - begin >= LONG_INSIDE and not participant.stood_at_once()",
        "clock.monotonic() - begin >= LONG_INSIDE",
        file="call/user_code.py",
    ),
    _loop(
        "test_repeats",
        "pause_is_deaf",
        "a pause ends for no event",
        'start = participant.agents.mailbox.take("start", participant.membership.iteration, seconds)',
        "start = sleep_with_progress(seconds)",
    ),
    _loop(
        "test_usage",
        "store_is_kept",
        "a restart goes on with the store of the last iteration",
        "participant.store = participant.value = None\n        participant.parts",
        "participant.value = None\n        participant.parts",
    ),
    _loop(
        "test_usage",
        "hook_of_torch_is_kept",
        "init_process_group() hooks pile up",
        "        participant.agents.environment.unhook()\n",
    ),
    _loop(
        "test_hooks",
        "abort_hook_stops_the_restart",
        "an abort hook that raises ends the rank",
        "        except BaseException as error:\n            if is_ctrl_c(error):",
        "        except ZeroDivisionError as error:\n            if is_ctrl_c(error):",
    ),
    _loop(
        "test_leaving",
        "leave_without_interruption",
        "who leaves does not interrupt the others",
        "            participant.interrupt(record, abort)\n",
        "            pass\n",
    ),
    _loop(
        "test_preemption",
        "asked_in_vain",
        "a rank that is asked to leave restarts with the others",
        "        if idle or participant.phase is Phase.RECHECK or (",
        "        if idle or (",
        file="call/leaving.py",
    ),
    _loop(
        "test_preemption",
        "leaves_alone",
        "a rank leaves before the others of its host are asked",
        "TOGETHER_S = 1.0",
        "TOGETHER_S = 0.01",
        file="call/leaving.py",
    ),
    _loop(
        "test_preemption",
        "initialize_ends_all",
        "a rank that leaves in initialize takes all others with it",
        "            record = record_of(participant, error)",
        "            record = record_of(participant, error)\n"
        "            abort = participant.who if participant.phase is Phase.INITIALIZE else ''",
    ),
    _loop(
        "test_preemption",
        "no_grace",
        "a rank whose step does not end stays",
        "        return self._is_at_work and not self._is_urgent and clock.monotonic() < until",
        "        return self._is_at_work and not self._is_urgent",
        file="call/leaving.py",
    ),
    _in("live/last.py", "tests/ranks/test_preemption.py")(
        "each_saves_at_once",
        "ranks that all leave save the step they are at, which may differ",
        "self._due = found or 0",
        "self._due = call._commits",
    ),
    _loop(
        "test_exceptions",
        "environment_stays",
        "the environment is not restored",
        "        closing.callback(self.environment.restore)\n",
    ),
    _loop(
        "test_exceptions",
        "monitor_stays",
        "the monitor is not told that the call is over",
        "        closing.callback(lambda: self._monitor.bye(ending().how, why=ending().why))\n",
    ),
    _loop(
        "test_hooks",
        "unfit_for_any_reason",
        "a rank whose health check raises after a fault leaves with that, and not with a HealthCheckError",
        "        except Exception as error:\n            raise HealthCheckError(",
        "        except ZeroDivisionError as error:\n            raise HealthCheckError(",
    ),
)

SIMULATED = (
    Mutant(
        "frame_moves_on_no",
        "a new numbering becomes the frame although its iteration did not start",
        (
            Edit(
                "tests/sim/training.py",
                "        state = self.proposed\n",
                "        state = self.proposed\n        self.membership.started(state.rank, state.world_size)\n",
            ),
        ),
        ("tests/sim/test_found.py",),
    ),
)

limits = _in("monitor/timeouts.py", "tests/unit/test_launcher_timeouts.py", "tests/threads/test_control.py")
shown = _in("heartbeats/board.py", "tests/threads/test_control.py")
watch = _in("heartbeats/*.py", "tests/threads/test_control.py")
control = _in("launcher/*.py", "tests/threads/test_control.py")
WATCHING = (
    limits(
        "pings_end_sections",
        "in a section with a limit pings are asked for, too",
        "    elif seen.ping:",
        "    if seen.ping:",
    ),
    limits(
        "shorter_wins",
        "of two ranks' times of a section the shorter one counts",
        "max(one[1], other[1])",
        "min(one[1], other[1])",
    ),
    shown("boards_without_seals", "memory is read that somebody may cut short", " & fcntl.F_SEAL_SHRINK", " >= 0"),
    watch("forks_ping", "a forked child pings for its parent", "os.register_at_fork(after_in_child=_forked)"),
    watch(
        "first_due_only_inside",
        "the inner section's limit alone counts",
        "each.since + each.limit, default",
        "-each.since, default",
    ),
    watch("outside_inside", "a section counts as time out of sections", "            self._outside_since = 0\n"),
    watch(
        "sections_are_gaps",
        "a long section is learned as a time without pings",
        "                self._slots[PING] = now  #",
        "                self.ping()  #",
    ),
    control("old_keys_stay", "a worker's predecessor can speak for it", "        del self._keys[worker.key]\n"),
    control(
        "the_last_watch_counts",
        "a worker's child takes its place",
        "if worker.watch is not None:\n            _close",
        "if False:\n            _close",
    ),
    control("anybody_may_speak", "another user is listened to", " if uid == os.geteuid() else -1"),
    control(
        "descriptors_pile_up",
        "descriptors are taken without end",
        "if len(connection.fds) > bool(connection.received):",
        "if False:",
    ),
    control(
        "lines_without_end", "a line may be of any length", "if len(connection.received) > MAX_LINE_BYTES:", "if False:"
    ),
    control(
        "last_words_are_lost",
        "what a worker said before it died is not waited for",
        "            self._settle()\n            worker = self._workers.get(global_rank)\n",
        "            worker = self._workers.get(global_rank)\n",
    ),
    control(
        "the_dead_are_watched",
        "a watch goes on when its worker is gone",
        "                if worker.watch is connection:\n",
        "                if False:\n",
    ),
)

spares = _in("launcher/warm.py", "tests/threads/test_warm.py")
ahead = _in("launcher/warm_worker.py", "tests/unit/test_warm.py")
monitor_ahead = _in("monitor/starting.py", "tests/threads/test_monitor_process.py")
WARM = (
    spares("warm_without_an_answer", "a spare that says anything becomes a worker", " == TAKEN and", " and"),
    spares(
        "warm_for_another_job",
        "a spare with other variables becomes a worker",
        "if start != self._start:",
        "if not self._start:",
    ),
    spares(
        "warm_without_end",
        "interpreters are started again and again, though each ends",
        "elif self._failed >= ATTEMPTS:",
        "elif False:",
    ),
    spares(
        "two_run_as_one",
        "a spare that did not answer is left alone while another worker starts",
        "            spare.end()\n        return None\n",
        "        return None\n",
    ),
    spares(
        "warm_whatever_the_memory",
        "a spare that nobody asked for stays where memory is short",
        "        return self._left >= needed\n",
        "        return True\n",
    ),
    spares(
        "warm_by_memory_where_asked",
        "a number of spares that was given depends on memory",
        "_Room() if number is None else None",
        "_Room()",
    ),
    ahead("dies_before_others", "a worker stays the first to go", " or (score is not None and not scored(score))", ""),
    ahead("rank_of_another", "a module keeps the rank that was read as it was imported ahead", ".union(specific)", ""),
    ahead("module_of_another", "a module takes the place of the program's own", "if now != foreign:", "if False:"),
    ahead(
        "half_a_module",
        "a module that failed half way stays",
        "                spoiled.add(name)\n            asked",
        "                pass\n            asked",
    ),
    ahead(
        "loaded_too_early",
        "a library has read a variable before the program set it",
        "    if early := sorted(",
        "    if early := [] and sorted(",
    ),
    monitor_ahead(
        "monitor_of_another_store",
        "a monitor uses another of torch's stores than its rank",
        "fits = plain and same and",
        "fits = plain and",
    ),
)

arbitration = _in("failover/*.py", "tests/unit/test_failover_rules.py")
desk = _in("failover/*.py", "tests/threads/test_arbiter.py")
strange = _in("system/server.py", "tests/threads/test_arbiter.py")
launched = _in("launcher/*.py", "tests/launcher/test_inherited.py")
contained = _in("monitor/*.py", "tests/ranks/test_process_one.py")
INHERITED = (
    launched("exit_codes_are_lost", "SIGCHLD stays ignored", "stack.enter_context(children_are_waited_for())", "pass"),
    launched(
        "ignored_is_handled",
        "a signal that nohup ignores ends the launcher",
        "if signal.getsignal(number) is not signal.SIG_IGN:",
        "if True:",
    ),
    launched("blocked_is_not_heard", "a blocked signal stays so", "unblocked(self._before)", "set()"),
    launched("dies_of_an_announcement", "SIGUSR1 ends the launcher", "for number in PASSED_ON:", "for number in ():"),
    launched(
        "announcement_for_everybody",
        "SIGUSR1 is passed on to workers that die of it",
        "if procfs.caught_signals(self.pid) & 1 << number - 1:",
        "if True:",
    ),
    launched(
        "who_left_as_asked_is_replaced",
        "a worker that leaves of a signal is started again",
        "slot.left = slot.left_as_asked(ended.exitcode)",
        "slot.left = None",
    ),
    _in("interrupt/signals.py", "tests/ranks/test_inherited.py")(
        "interruption_stays_blocked", "a system call is not interrupted", "unblocked([self.signum])", "set()"
    ),
    _in("call/job.py", "tests/ranks/test_inherited.py")(
        "second_job", "a loader's worker joins the job of its rank", '"_inheriting", False)', '"_never", False)'
    ),
    _in("call/agents.py", "tests/ranks/test_process_one.py")(
        "no_signal_is_lent", "process 1 cannot be ended", "self._lent.open(self._interrupter.signum)", "0"
    ),
    contained("unended_has_a_lease", "process 1, given up, begins atomic()", "        self._link.end_lease()\n"),
    _in("monitor/watchdog.py", "tests/threads/test_watchdog.py")(
        "monitor_for_who_is_over",
        "a rank whose lease is over gets a new monitor",
        "        lease.enforce(self._board)  # its last deed may have been to end it\n",
    ),
)

pools = _in("launcher/processes.py", "tests/threads/test_launcher_processes.py")
ENDING = (
    pools(
        "slow_readers_are_left",
        "the launcher ends in the middle of output that somebody reads",
        " and _Counted.taken == before:",
        ":",
    ),
    pools(
        "first_signal_kills",
        "the first signal ends the grace of workers that end for another reason",
        "> max(before, 1):",
        "> before:",
    ),
    _in("launcher/agent.py", "tests/threads/test_launcher_agent.py")(
        "killed_late",
        "a worker is killed as late as the interval",
        "for at in (slot.doomed, slot.others_until)",
        "for at in ()",
    ),
    ahead(
        "preload_in_silence",
        "nobody hears of a module of --preload that cannot be imported",
        "return dict([*failed.items()][:MAX_FAILED])",
        "return {}",
    ),
    _in("launcher/warm.py", "tests/unit/test_warm.py")(
        "kept_by_another_generation",
        "what the launcher gives others counts as changed by the program",
        "if self._changed is None:",
        "if True:",
    ),
)

FAILOVER = (
    arbitration(
        "a_minority_is_heard",
        "a store stays open with less than half",
        "2 * len(live.intersection(heard)) >= len(live)",
        "bool(live.intersection(heard))",
    ),
    arbitration(
        "returns_after_go",
        "a rank returns although the others go on without it",
        "return self.verdict is None or self.verdict.outcome is not FailoverOutcome.GO",
        "return True",
    ),
    desk(
        "strangers_vote",
        "a member of another call is let in",
        ' and hmac.compare_digest(key.encode(errors="replace"), self.key.encode())',
        "",
    ),
    desk(
        "one_connection_is_many",
        "a client says that it is one member after the other",
        ' "n": int(number)} if peer.member is None:',
        ' "n": int(number)}:',
    ),
    desk(
        "a_late_answer_counts",
        "the answer to an earlier question, which came too late, counts for a later one",
        'if answer.pop("n", self._number) == self._number:',
        "if True:",
    ),
    desk(
        "the_host_cannot_be_told",
        "who moves a second time cannot tell the host of the first store",
        "            host.stop = self._stop",
        "            pass",
    ),
    desk(
        "refused_silently",
        "a member that is refused thinks that the arbiter has ended",
        '        send_now(peer.socket, {"ok": False})\n',
    ),
    strange("strangers_are_many", "strangers are not counted", "if len(self._strangers) > STRANGERS:", "if False:"),
    strange(
        "members_are_strangers",
        "members have to make room",
        "        self._strangers.pop(client, None)\n\n    def tell",
        "        pass\n\n    def tell",
    ),
    strange("for_ever", "a stranger may stay", "next(iter(self._strangers)).until <= now", "False"),
    desk(
        "former_standbys_are_not_told",
        "who stood by before does not hear that the job is completed",
        "        for contact in self._before(asked):\n",
        "        for contact in ():\n",
    ),
    desk(
        "nobody_is_turned_away", "the other arbiters are not told of a vote", "            self._turn_away(contact)\n"
    ),
    desk(
        "asks_the_next_too",
        "a rank votes at two arbiters that live",
        "if not contact.ended:  # it may",
        "if False:  # it may",
    ),
    desk(
        "children_keep_contacts",
        "a forked child keeps its parent alive for the arbiters",
        "        contacts._forget()\n",
        "        pass\n",
    ),
    desk(
        "the_dead_vote_on",
        "the end of a voter is not told",
        "                self._left(peer.slot)\n",
        "                pass\n",
    ),
    desk(
        "the_host_is_asked",
        "the host of the lost store is asked where to go on",
        "        found.pop(self._server, None)\n",
    ),
    desk(
        "closed_is_an_end",
        "whoever is sent away counts as ended",
        "self._heard(), ended)",
        "self._heard())",
    ),
    desk(
        "silence_is_an_end",
        "whoever cannot be reached counts as ended",
        "self.ended = error in ENDED",
        "self.ended = True",
    ),
)

plan = _in("live/plan.py", "tests/unit/test_live_plan.py", SIM, seeds=True)
spread = _in("live/plan.py", "tests/unit/test_live_plan.py")
copies = _in("live/copies.py", SIM, seeds=True)
disk = _in("live/checkpoints.py", "tests/threads/test_checkpoints.py")
staged = _in("live/checkpoints.py", "tests/threads/test_checkpoint_copies.py")
moved = _in("live/transfer.py", "tests/threads/test_live_state.py")
present = _in("live/present.py", "tests/threads/test_live_state.py")
given = _in("live/*.py", "tests/threads/test_live_parts.py", "tests/threads/test_live_optimizers.py")
own = _in("live/per_rank.py", "tests/threads/test_live_state.py")
shelf = _in("live/shelf.py", "tests/threads/test_checkpoints.py")
stuck = _in("live/patience.py", "tests/threads/test_stuck_disk.py")
loader = _in("live/loader.py", "tests/threads/test_kept_loader.py")
crew = _in("live/workers.py", "tests/threads/test_kept_loader.py")
LIVE = (
    plan("the_oldest_step", "all go on at the oldest step", "sorted(points, reverse=True)", "sorted(points)"),
    _in("live/plan.py", "tests/unit/test_live_plan.py", "tests/sim/test_found.py")(
        "steps_of_two_histories",
        "states of one step are the same, whatever their histories are",
        "            if copy.point == point:\n",
        "            if copy.step == point.step:\n",
    ),
    _in("live/tree.py", "tests/threads/test_live_state.py")(
        "numpy_is_plain",
        "a NumPy number counts as one that can be sent",
        "if kind in _PLAIN or",
        "if isinstance(state, tuple(_PLAIN)) or",
    ),
    _in("live/state.py", "tests/threads/test_live_state.py")(
        "a_history_for_each_recover",
        "recover alone makes a new history of a step that ranks have already",
        "            now = found.point\n",
        "            now = Point(self._history, found.step)\n",
    ),
    _in("live/state.py", "tests/threads/test_live_state.py")(
        "trained_parts_begin",
        "trained parts that are given to recover() again are a beginning",
        "present.began |= before.began and present.shares(before)",
        "pass",
    ),
    present(
        "own_refreshes", "each rank goes on after its own refreshes", "if refreshes >= self.refreshes:", "if True:"
    ),
    plan("some_shards", "all go on where one shard is there", "if all(holders", "if any(holders"),
    spread("one_sends_all", "the first rank sends to everybody", "(sends[source.rank], source.rank)", "source.rank"),
    _in("live/copies.py", "tests/threads/test_live_state.py")(
        "another_future",
        "copies of a future that did not come to be are kept",
        "if not buffer.held.point.is_before(point):",
        "if False:",
    ),
    spread(
        "some_copies_are_whole",
        "copies count as whole where one rank has its own",
        "if all(Copy(have.shard, each.step, each.history) in there for have in haves)",
        "if any(Copy(have.shard, each.step, each.history) in there for have in haves)",
    ),
    _in("live/copies.py", "tests/threads/test_live_state.py")(
        "last_whole_copies_overwritten",
        "the last copies that all ranks have are overwritten first",
        "(buffer.held.point == spared != NOWHERE, buffer.held.point)",
        "buffer.held.point",
    ),
    copies("newest_overwritten", "the newer copy is overwritten", "return min(self.buffers", "return max(self.buffers"),
    disk("no_checksums", "what was written is not compared", "if _sums(stream) != kept[file]:", "if False:"),
    staged(
        "copied_over_what_is_written",
        "a checkpoint is copied over the one that is being written",
        "self._copies if self.writer.ended(0) else {}",
        "self._copies",
    ),
    staged("other_shapes", "a copy has the shape of the one before", "room.shape != tensor.shape or ", ""),
    staged("new_room", "each checkpoint is copied to new memory", "rooms.pop(name, None)", "None"),
    _in("call_wrapper.py", "tests/threads/test_checkpoint_copies.py")(
        "copy_outlives_the_call",
        "the copy of a checkpoint outlives the call",
        "            each.free()\n",
        "            pass\n",
    ),
    present(
        "written_is_changed",
        "what is written between recover and the first commit counts, though no value is another one",
        "        if self._sums is not None and all(map(torch.equal, self._sums, self._checksums())):\n",
        "        if False:\n",
    ),
    present(
        "gradients_stay",
        "gradients of an interrupted step stay",
        "            parameter.grad = None\n",
        "            pass\n",
    ),
    present("scaler_stays", "a scaler stays unscaled", "part._per_optimizer_states.clear()", "pass"),
    given("rates_stay", "a learning rate is not that of the commit", "group.update(_options(options))", "pass"),
    given(
        "other_rows",
        "ranks whose rows are split twice count as replicas",
        "(placement.is_replicate() or placement.is_partial() for",
        "(not placement.is_shard() for",
    ),
    given(
        "rounded",
        "float32 state of bfloat16 parameters is rounded on whoever loads",
        "    _put_back(optimizer.state_dict(), state)\n",
        "",
    ),
    given(
        "half_step",
        "others get buffers of the step that was interrupted",
        "{name: kept[name] for name in now if name in kept}",
        "{}",
    ),
    given(
        "other_kinds",
        "a Counter arrives as a dict",
        "    if isinstance(container, dict | list | UserDict | UserList | deque):\n",
        "    if isinstance(container, list | UserDict | UserList | deque):\n",
    ),
    loader(
        "batches_of_another_world",
        "batches that were loaded for another share are handed out",
        "if task.wanted == wanted.get(step)}",
        "if step in wanted}",
    ),
    loader("no_look_at_workers", "workers are kept though one has died", "why = crew.trouble()", 'why = ""'),
    loader(
        "a_worker_hangs", "workers are kept though one hangs", "if not why and self._waited > SUSPICIOUS:", "if False:"
    ),
    loader(
        "nothing_pushes",
        "nothing pushes a batch that is loaded again",
        "            crew.ask(None)\n",
        "            pass\n",
    ),
    loader(
        "half_taken",
        "what is asked for may be cut in half",
        "leave_alone(*(each.__code__ for each in (KeptLoader._ask, KeptLoader._take)))\n",
    ),
    crew(
        "spoiled",
        "a batch is handed out again as the program left it",
        "task.copy = copied(batch)",
        "task.copy = batch",
    ),
    crew("numbers_of_the_worker", "random numbers depend on who loads", "        randoms.use(seed)\n"),
    crew("loads_in_vain", "workers load what nobody wants", "self._skipped[0] = number", "pass"),
    crew(
        "outlives_its_rank",
        "workers live on after their rank",
        "        if self.rank:\n",
        "        if True:\n            pass\n        elif self.rank:\n",
    ),
    own("others_place", "a part of a rank is given to another one", " or place != self._place", ""),
    own(
        "behind_goes_back",
        "a rank that is behind goes back",
        "is_kept = self._point.step == point.step",
        "is_kept = bool(self._kept)",
    ),
    moved("one_at_a_time", "a sender waits until it is asked for each piece", "if len(under_way) > AHEAD:", "if True:"),
    moved(
        "last_ones_are_missing",
        "pieces that were asked for ahead are not waited for",
        "            while under_way:\n                settle()\n",
        "",
    ),
    moved("strided_is_lost", "a tensor with its channels last does not arrive", "put(tensor, room)", "pass"),
    shelf(
        "nothing_removed",
        "old checkpoints stay",
        "            if name not in kept:\n",
        "            if False:\n",
    ),
    shelf("too_few_kept", "one checkpoint less is kept", "[:keep]", "[: keep - 1]"),
    shelf("by_step", "a later step counts as written later", "branch + (step <= last.step)", "branch"),
    shelf("other_branch", "one of an older branch is loaded", "itertools.takewhile(", "filter("),
    shelf("damaged_count", "a damaged checkpoint keeps its place", "in sorted(there.intersection(names)):", "in ():"),
    shelf("damaged_stay", "what is moved aside stays for ever", "in aside[ASIDE:]:", "in ():"),
    disk("aside_again", "a new one of the same name is moved aside", "        self._damaged -= damaged", "        #"),
    stuck("no_agreement", "a rank saves beside one whose disk hangs", "if doing.state != FREE}", "if False}"),
    stuck("waits_again", "a disk that hangs is waited for at each step", "0 if work.skipped else GRACE", "GRACE"),
    stuck("own_rounds", "the limit of a wait is not kept", "number * SLICE >= limit", "number * SLICE > limit"),
    stuck("two_looks", "a second thread looks while the first one hangs", "if not self._reader.ended(SLICE):", "if 0:"),
)

kept = _in("hardware/leftovers.py", "tests/unit/test_leftovers.py")
named = _in("hardware/leftovers.py", "tests/threads/test_leftovers.py")
left = _in("interrupt/*.py", "tests/ranks/test_leftovers.py")
LEFTOVERS = (
    left(
        "hidden_frames_stay",
        "the frames of what was raised before the last exception keep tensors alive",
        "        waiting += [one for one in found if one is not None]\n",
    ),
    left(
        "grouped_frames_stay",
        "those of a group of exceptions do",
        "*(each.exceptions if isinstance(each, GROUP) else ())",
    ),
    _loop(
        "test_leftovers",
        "garbage_stays",
        "garbage on the GPU waits for the interpreter's next collection",
        "    collect=leftovers.collect,\n",
        file="hardware/leftovers.py",
    ),
    _loop("test_groups", "cycles_stay", "groups in reference cycles outlive a restart", "collect=dead_groups.collect,"),
    _loop(
        "test_leftovers",
        "nothing_is_said",
        "nobody is told who holds on",
        "    iteration_begins=lambda iteration: leftovers.report(iteration.state),\n",
        file="hardware/leftovers.py",
    ),
    _loop(
        "test_leftovers",
        "value_stays",
        "what a call has returned lives until garbage is collected",
        "value, participant.value = participant.value, None",
        "value = participant.value",
    ),
    kept(
        "garbage_on_the_host",
        "garbage is collected at every restart",
        "        if now > self._level + WORTH_COLLECTING:\n",
        "        if True:\n",
    ),
    kept(
        "little_garbage_adds_up",
        "what was not worth a collection counts as used",
        "        self._level = min(self._level, now)\n",
        "        self._level = now\n",
    ),
    kept("said_at_each_restart", "the same warning comes with every restart", "        self._note(now)\n"),
    kept(
        "groups_are_said",
        "what process groups held is taken for the program's",
        "        _collect()  # what process groups and their work held has come free since\n",
    ),
    kept(
        "driver_is_asked",
        "the number of devices is asked from the driver, which may hang",
        "range(len(cuda.default_generators))",
        "range(cuda.device_count())",
    ),
    named(
        "old_tensors_are_named",
        "tensors from before the call are named",
        "        found.pop(address, None)\n",
        "        pass\n",
    ),
    named(
        "live_state_is_said",
        "what a LiveState keeps is taken for a leak",
        "_with_gradients(_tensors(_below(keepers)))",
        "_with_gradients(_tensors(_below([])))",
    ),
    named(
        "tensors_are_asked",
        "a tensor's class answers for it",
        "        storage = torch.Tensor.untyped_storage(tensor)\n",
        "        storage = tensor.untyped_storage()\n",
    ),
    named(
        "search_finds_itself", "the search is taken for a holder", "each is not targets and each is not waiting and "
    ),
    named(
        "search_takes_its_time",
        "a pass begins that will end too late",
        "        if begin + took > until:\n",
        "        if begin > until:\n",
    ),
    named("search_goes_on", "a search takes any number of passes over the heap", "range(PASSES)", "range(100)"),
    named(
        "the_base_is_shown",
        "a tensor that only a view holds is shown, and nobody has it",
        " or torch.Tensor._is_view(tensor)",
        "",
    ),
)

waking = _in("collectives/nccl_wake.py", "tests/threads/test_nccl_wake.py")
making = _in("collectives/nccl_bootstrap.py", "tests/threads/test_nccl_bootstrap.py")
ending = _in("collectives/nccl_shutdown.py", "tests/threads/test_nccl_shutdown.py")
batching = _in("collectives/coalescing.py", "tests/threads/test_coalescing.py")
thread_state = _in("interrupt/torch_state.py", "tests/threads/test_torch_state.py")
NCCL = (
    _in("system/procfs.py", "tests/threads/test_connecting.py")(
        "files_are_copied",
        "a descriptor is copied before it is known to be a socket's, and the locks on a file are lost with the copy",
        "    if not _is_socket(descriptor, inode):\n        return None\n",
        "",
    ),
    waking("wakes_anybody", "a thread with few descriptors is spoken to", "len(poll.descriptors) > DESCRIPTORS and "),
    waking("wakes_any_poll", "a thread that waits for another time is spoken to", " and poll.timeout_ms == POLL_MS"),
    waking(
        "wakes_blocking_listeners", "a listener that blocks is connected to", "os.get_blocking(listener.fileno()) or "
    ),
    waking(
        "other_unix_sockets",
        "a UNIX socket that is no datagram socket is spoken to",
        " or copy.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) != socket.SOCK_DGRAM",
        "",
    ),
    waking("other_names", "a datagram socket of another name is spoken to", "if NAME in os.fsencode(name) else ()"),
    waking(
        "names_are_cut",
        "a padded name is spoken to without its padding",
        "return (name,)",
        "return (name.rstrip(b'\\0'),)",
    ),
    making(
        "old_sockets",
        "what was there before the iteration is ended",
        "self._cut.union(self._before or ())",
        "self._cut",
    ),
    making(
        "frozen_sockets",
        "a socket of Python's that a hook has opened is ended: it is frozen, so that no search finds it",
        "        if self._before is not None:\n            self._before = frozenset",
        "        if self._before is None:\n            self._before = frozenset",
    ),
    making("polled_sockets", "what a thread polls is ended", "_polled().union(_watched())", "_watched()"),
    making("watched_sockets", "what an epoll instance watches is ended", "_polled().union(_watched())", "_polled()"),
    making(
        "sockets_of_pythons",
        "what a socket object owns is ended",
        "return _without_pythons(found) if found else found",
        "return found",
    ),
    making(
        "late_senders",
        "a socket without TCP_NODELAY is ended",
        "bool(copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))",
        "True",
    ),
    making(
        "wildcard_listeners", "a listener on all interfaces is ended", "copy.getsockname()[0] not in _WILDCARDS", "True"
    ),
    making(
        "blocking_sockets",
        "a socket that blocks is ended",
        "not os.get_blocking(copy.fileno())\n                and ",
    ),
    making(
        "cut_at_any_time", "connections are ended while nobody makes a communicator", " or not _may_be_inside():", ":"
    ),
    making("cut_in_each_collective", "and in each collective", "_collectives_of(group) <= 1", "True"),
    making("cut_against_the_users_will", "and where the user does not want it", " or not self.allowed", ""),
    making(
        "threads_that_end",
        "a thread of Python's that ends is taken for one that NCCL left",
        "            self._note_threads()  # a thread",
        "            # a thread",
    ),
    ending(
        "abort_after_shutdown",
        "a group that was shut down is aborted",
        "end.by == ABORT or (alone and end.by)",
        "end.by == ABORT",
    ),
    ending(
        "shutdown_after_abort",
        "one that was aborted is shut down",
        "            if not end.by:\n                end.by = SHUTDOWN",
        "            if True:\n                end.by = SHUTDOWN",
    ),
    ending(
        "doomed_is_shut_down",
        "a group is shut down while a restart aborts it",
        "        if end.is_doomed:\n            group.abort()\n            return\n",
        "",
    ),
    _in("collectives/default_group.py", "tests/ranks/test_default_group.py")(
        "ranks_left_out",
        "the ranks of a second default group are left out",
        "options.global_ranks_in_group = list(range(group.size()))",
        "pass",
    ),
    _in("collectives/default_group.py", "tests/ranks/test_default_group.py")(
        "addresses_are_read_again",
        "a second default group of an iteration reads the addresses of the first",
        "        if earlier:\n",
        "        if False:\n",
    ),
    ending("shutdown_waits", "a shutdown waits for an abort", "end.lock.acquire(blocking=False)", "end.lock.acquire()"),
    ending("abort_waits_for_ever", "an abort waits for ever", "acquire(timeout=LIMIT)", "acquire()"),
    ending(
        "shutdown_is_interrupted",
        "the function is interrupted with the lock of a group",
        "leave_alone(Shutdowns._shutdown.__code__)\n",
        "",
    ),
    ending("ends_are_kept", "groups are remembered for ever", "weakref.WeakKeyDictionary()", "{}"),
    ending(
        "methods_are_unwrapped",
        "a method is put back as the class answers it, and not as it has it",
        "            setattr(self._kind, self._name, self._own)\n",
        "            setattr(self._kind, self._name, self._replacement.__wrapped__)\n",
    ),
    batching("contexts_stay", "what an exception leaves open stays", "            _end_group_call(context)\n", ""),
    batching(
        "contexts_begin", "a context begins on a group that was aborted", "if group in self._aborted:", "if False:"
    ),
    batching("contexts_are_begun", "what was queued is begun", "    if nccl is not None:\n", "    if False:\n"),
    batching("torchs_count_stays", "torch counts a group call that is over", "        _recount(nccl, end)\n", ""),
    batching(
        "all_is_ended",
        "a context ends the ones around it, too",
        "            self.close(outside)\n",
        "            self.close()\n",
    ),
    batching(
        "abort_in_a_context",
        "a group is aborted while something is queued for it",
        "not self._counts.get(group), LIMIT",
        "True, LIMIT",
    ),
    _in("exception.py", "tests/unit/test_exception.py")(
        "groups_are_failures",
        "a group that holds an exit is a failure",
        "any(asks_for_end(each, ends) for each in error.exceptions)",
        "False",
    ),
    _in("call/user_code.py", "tests/ranks/test_exceptions.py")(
        "only_exceptions_fail",
        "an error that is no Exception takes its rank out",
        "asks_for_end(error) if self._participant.phase is Phase.RUN else not isinstance(error, Exception)",
        "not isinstance(error, Exception)",
    ),
    _in("call/user_code.py", "tests/ranks/test_batching.py")(
        "contexts_outlive_iterations",
        "a coalescing context is still open in the next iteration",
        "        contexts.close()  # before the others",
        "        # before the others",
    ),
    batching(
        "interrupted_in_between",
        "an interruption comes after a context has begun, and before that is noted",
        "leave_alone(*(each.__code__ for each in _WHOLE))\n",
        "",
    ),
    batching(
        "shutdown_is_queued",
        "a group is destroyed within a group call",
        "        self.close()\n        return original(group)\n",
        "        return original(group)\n",
    ),
    batching(
        "torchs_list_stays",
        "torch's list of what is collected keeps its group",
        "            _forget(group)\n",
        "            pass\n",
    ),
    batching(
        "other_threads_stay",
        "what another thread has begun in an earlier iteration stays",
        "            self.close()  # of an earlier iteration\n",
        "            pass\n",
    ),
    _in("interrupt/whereabouts.py", "tests/threads/test_whereabouts.py")(
        "operators_wait",
        "each operator of torch's is taken for a collective",
        "_operator(frame).startswith(_FUNCTIONAL)",
        'frame.f_code.co_name == "__call__"',
    ),
    _in("interrupt/whereabouts.py", "tests/threads/test_whereabouts.py")(
        "own_memory_is_anothers_failure",
        "a rank without memory exits, and is restarted",
        " or type(error).__name__ in _OWN",
    ),
    _in("interrupt/whereabouts.py", "tests/threads/test_nccl_bootstrap.py")(
        "compiled_code_waits",
        "compiled code in its first collective is not known to wait",
        "    if name == _OPERATORS:\n        return _operator",
        "    if False:\n        return _operator",
    ),
    thread_state(
        "keys_stay", "dispatch keys stay excluded", "self._put_autocast, self._dispatch.put)", "self._put_autocast)"
    ),
    thread_state(
        "autocast_stays", "autocast stays on", "self._put_autocast, self._dispatch.put)", "self._dispatch.put)"
    ),
    thread_state("modes_stay", "a mode stays", "(self._put_modes, ", "("),
    thread_state("hooks_stay", "hooks of saved tensors stay", "self._put_hooks, ", ""),
    thread_state(
        "device_goes", "the default device is forgotten", "            if mode is device:\n", "            if False:\n"
    ),
    _loop(
        "test_leftovers",
        "torchs_state_stays",
        "what an interrupted context manager has set stays",
        "            self._torch_state.restore()\n",
        "            pass\n",
    ),
    _in("collectives/results.py", "tests/ranks/test_groups.py")(
        "pending_collectives_stay",
        "collectives that nobody waited for keep their groups",
        "for tensor in pending:",
        "for tensor in pending[:0]:",
    ),
    _in("collectives/remembered.py", "tests/ranks/test_large_heap.py")(
        "default_arguments_stay",
        "torch's default arguments keep the first iteration's group, and a collection looks for it",
        "        _forget_defaults()\n",
        "",
    ),
    _in("call/parts.py", "tests/ranks/test_groups.py")(
        "nothing_is_frozen",
        "no collection of a restart knows what is old, so groups in cycles stay",
        "function_begins=heap.enter, ",
        "",
    ),
    _in("system/heap.py", "tests/unit/test_heap.py")(
        "what_is_frozen_is_never_looked_at",
        "the program's own full collections leave garbage that is older than the function's entry",
        "            self.thaw()\n",
        "            pass\n",
    ),
    _in("abort.py", "tests/ranks/test_bootstrap.py")(
        "the_bootstrap_goes_on",
        "ranks wait in the bootstrap",
        'rungs.append(("NCCL\'s bootstrap", bootstrap.cut))',
        "pass",
        Edit("inprocess/call/user_code.py", "                self._attempt(release, bootstrap.cut)\n", ""),
    ),
)

hooks = _in("call/*.py", "tests/unit/test_hooks.py")
assignments = _in("call/*.py", "tests/unit/test_rank_assignment.py")
destroyed = _in("collectives/dead_groups.py", "tests/unit/test_held.py")
GROUPS = (
    _in("interrupt/*.py", "tests/threads/test_interrupt.py")(
        "a_descriptor_is_lost",
        "a tensor that is just taken from another process leaves its descriptor open",
        " or codes_there & self._losers",
    ),
    _in("interrupt/*.py", "tests/threads/test_interrupt.py")(
        "a_destructor_is_torn",
        "a destructor is interrupted, which Python drops, so what it had not yet freed stays",
        '            or any(code.co_name == "__del__" for code in stack)\n',
    ),
    _in("interrupt/*.py", "tests/threads/test_interrupt.py")(
        "a_finalizer_is_torn",
        "what runs once when an object is freed is interrupted, which Python drops",
        "frozenset((*LOSING, ",
        "frozenset((",
    ),
    _in("interrupt/*.py", "tests/threads/test_interrupt.py")(
        "a_temporary_file_is_lost",
        "a temporary file is made, and nobody has noted it",
        "    tempfile.__file__,\n",
    ),
    _in("interrupt/*.py", "tests/threads/test_interrupt.py")(
        "a_pool_is_lost",
        "a pool of processes is started, and nobody has noted it",
        '    ("multiprocessing.pool", "Pool.__init__"),\n',
    ),
    _in("interrupt/*.py", "tests/threads/test_interrupt.py")(
        "a_command_is_lost",
        "a command is started, and nobody has noted it",
        '    ("subprocess", "Popen.__init__"),\n',
    ),
    _in("interrupt/*.py", "tests/threads/test_interrupt.py")(
        "a_child_is_lost",
        "the end of a child is noticed, and lost",
        "            or codes_there & self._reapers\n",
    ),
    _in("interrupt/*.py", "tests/threads/test_interrupt.py")(
        "an_operation_is_lost",
        "a functional collective is interrupted before anybody has its result",
        '(*LOSING, getattr(sys.modules.get(FUNCTIONAL), "__file__", None) or "")',
        "LOSING",
    ),
    _in("interrupt/*.py", "tests/threads/test_interrupt.py")(
        "what_comes_late_is_torn",
        "after a long import nothing is left alone any more",
        "self._spared_since.setdefault(patience, now)",
        "self._asked_at",
    ),
    destroyed(
        "a_reducer_is_the_last_owner",
        "a group that the program destroys is not kept",
        "self._destroyed = [*kept, group]",
        "self._destroyed = kept",
    ),
    destroyed(
        "noted_twice_is_shared",
        "a group that is aborted while the program destroys it counts as one that somebody has",
        "        self._destroyed = _without(self._destroyed, self._groups)\n",
        "        pass\n",
    ),
    destroyed(
        "destroyed_groups_pile_up",
        "all groups that the program destroys are kept until the next iteration",
        "            self._drop(alone)\n",
        "            self._destroyed += alone\n",
    ),
    _in("stores/*.py", "tests/threads/test_connecting.py")(
        "a_start_that_is_interrupted",
        "a connection attempt goes on where its start was interrupted",
        "    try:\n        thread.start()  # in here: it waits for the thread to run, and may be interrupted then\n",
        "    thread.start()\n    try:\n",
    ),
    _in("stores/*.py", "tests/threads/test_connecting.py")(
        "all_connections_of_the_process",
        "an attempt to connect that is given up cuts all connections to that server",
        "if descriptor in awaited and peer == (address, port):",
        "if peer == (address, port):",
    ),
    _in("stores/*.py", "tests/unit/test_addresses.py")(
        "the_interface_is_forgotten",
        "a link-local address of the store is one that nobody reaches",
        "if len(where) == 4 and where[3]:",
        "if False:",
    ),
    _in("stores/*.py", "tests/threads/test_bind.py")(
        "a_name_is_looked_up_in_a_restart",
        "a name server that does not answer just when a rank fails ends the job",
        "self._place = self._place or serving.place_of(*self._where)",
        "self._place = serving.place_of(*self._where)",
    ),
)

HOOKS = (
    hooks(
        "an_optional_exception",
        "a hook as in nvidia-resiliency-ext 0.2, whose exception is optional, never sees it",
        "(ex|exc|exception|err|error)$",
        "(exc|exception|err|error)$",
    ),
    hooks(
        "an_abort_that_is_cut_short",
        "a part of an abort's Compose that raises keeps the others from running",
        '_whole_chain(parts) if name == "abort" else _chain(parts)',
        "_chain(parts)",
    ),
    assignments(
        "active_under_the_old_rank",
        "who is renumbered by a part of the user's keeps its active rank",
        "        first_active(state, state.world_size)\n",
        "        pass\n",
    ),
    assignments(
        "what_a_part_says_is_lost",
        "a part of the user's that says who is active is overruled",
        "        and activity(state) == activity(before)\n",
    ),
    _in("finalize.py", "tests/unit/test_health_check.py")(
        "an_exception_beside_the_state",
        "a check that is called in the older form sees no exception",
        "dataclasses.replace(state.freeze(), fn_exception=exception)",
        "state.freeze()",
    ),
)

struck = _in("testing/*.py", "tests/unit/test_testing.py")
grown = _in("testing/growth.py", "tests/unit/test_testing.py")
asked = _in("testing/result.py", "tests/unit/test_testing.py")
planned = _in("testing/schedule.py", "tests/unit/test_testing.py")
TESTING = (
    struck("any_rank_is_struck", "a fault strikes whatever rank comes first", "if point.rank != self.rank or", "if"),
    struck(
        "any_iteration_is_struck",
        "it strikes in any iteration",
        "self.iteration not in (None, point.iteration)",
        "False",
    ),
    struck("any_call_is_struck", "it strikes in any call", "if self.call not in (None, point.call) or", "if"),
    struck("any_label_is_struck", "it strikes at any label", "if point.label != self.label or", "if"),
    struck(
        "any_file_is_struck",
        "it strikes at any file",
        'not fnmatch.fnmatch(os.path.basename(point.file or ""), self.file)',
        "False",
    ),
    struck("a_label_before_its_step", "it strikes at a label before its step", "point.pings >= self.step", "True"),
    grown("grown_once", "what was made once is said to grow", "if all(before < after", "if any(before < after"),
    grown("grown_at_once", "two entries are enough to tell", "ENTRIES = 3", "ENTRIES = 2"),
    grown(
        "no_line_of_an_item",
        "a line that adds to a dict is not found",
        "isinstance(target, ast.Subscript) and",
        "False and",
    ),
    asked(
        "any_step_is_resumed_from",
        "any step is the one it went on from",
        "if steps[0] != step:",
        "if False:",
    ),
    asked(
        "replaced_ones_are_the_same", "replaced processes count as the same", "len(set(ranks)) == len(ranks) and ", ""
    ),
    asked(
        "too_much_is_the_same",
        "what a value has too much is not seen",
        "*(key for key in value if key not in wanted)",
        "",
    ),
    planned(
        "the_dead_are_struck",
        "a schedule has faults for ranks that are gone",
        "            alive.remove(rank)\n",
        "            pass\n",
    ),
    _in("testing/job.py", "tests/testing/test_runs.py::test_a_fault_that_never_struck")(
        "it_never_struck", "a fault that never struck is not noticed", "if repr(at) not in struck:", "if False:"
    ),
    _in("testing/job.py", "tests/testing/test_runs.py::test_groups_that_are_made_outside")(
        "who_ends_unasked",
        "a rank that ends with an error is not noticed",
        "if wrong and rank.rank not in may_end:",
        "if False:",
    ),
    _in("testing/rank.py", "tests/testing/test_runs.py::test_two_faults")(
        "it_strikes_again",
        "a fault strikes again in the next iteration",
        "if at not in self.struck and at.meets(point):",
        "if at.meets(point):",
    ),
)

on_disk = _in("events/files.py", "tests/threads/test_events.py")
private = _in("system/private_folder.py", "tests/threads/test_events.py")
folders = _in("system/private_folder.py", "tests/unit/test_private_folder.py")
streamed = _in("events/stream.py", "tests/threads/test_events.py")
EVENTS = (
    _in("events/record.py", "tests/unit/test_events.py::test_what_is_nested_deep_can_be_read_again")(
        "an_event_too_deep_to_read",
        "an event is written that `parse` refuses",
        "MAX_DEPTH = strict_json.MAX_DEPTH - 1",
        "MAX_DEPTH = strict_json.MAX_DEPTH",
    ),
    on_disk(
        "warned_each_time", "each event that is not written is a warning", "if reason not in self._told:", "if True:"
    ),
    on_disk(
        "a_file_without_an_end",
        "a file of events is never set aside",
        "elif self._size > MAX_FILE_BYTES:",
        "elif False:",
    ),
    private(
        "a_link_is_followed",
        "events are written through a link",
        "os.O_RDWR | os.O_CREAT | os.O_APPEND | _FILE | os.O_NOFOLLOW",
        "os.O_RDWR | os.O_CREAT | os.O_APPEND | _FILE",
    ),
    folders(
        "a_folder_of_anybody",
        "another user's folder is used",
        "or not (self._looks or _is_own(fd, found))",
        "",
    ),
    folders("a_folder_that_others_write_to", "others may write to the folder", "found.st_mode & stat.S_IWOTH or ", ""),
    folders(
        "a_link_of_anybody",
        "another user's link on the way is followed",
        "if found.st_uid not in (0, os.geteuid(), os.fstat(fd).st_uid):",
        "if False:",
    ),
    folders(
        "folders_above_by_umask",
        "the umask says who may use folders",
        "os.mkdir(name, mode, dir_fd",
        "os.mkdir(name, dir_fd",
    ),
    folders(
        "through_the_path",
        "a folder that is swapped meanwhile is written to",
        "os.replace(old, new, src_dir_fd=self._fd, dst_dir_fd=self._fd)",
        "os.replace(os.path.join(self.path, old), os.path.join(self.path, new))",
    ),
    folders(
        "files_of_anybody",
        "root reads files that its own folder does not vouch for",
        " and found.st_uid == self._owner:",
        ":",
    ),
    private("others_read_events", "everybody can read the events", "name, flags, 0o600", "name, flags, 0o644"),
    on_disk(
        "a_file_goes_on_in_half_a_line",
        "a file that ends in half a line, of a process that died, is gone on with in it",
        "self._is_torn = self._size > 0",
        "self._is_torn = False",
    ),
    on_disk(
        "no_header_after_the_first_file",
        "the file that follows one that was set aside has no header",
        "            self._append(to_line(self._header))\n",
        '            os.path.exists(f"{self.path}.1") or self._append(to_line(self._header))\n',
    ),
    on_disk(
        "events_before_the_header",
        "where the disk was full at first, events have no header",
        "            self.close()  # no event comes before the header\n",
        "",
    ),
    _in("system/writing.py", "tests/threads/test_events.py")(
        "a_queue_without_an_end",
        "a sink that blocks keeps all events in memory",
        "if self._lines.qsize() < MAX_QUEUED:",
        "if True:",
    ),
    streamed(
        "dropped_and_forgotten", "what was dropped last is not told", "self._tell_dropped()  # before", "pass  # before"
    ),
    streamed(
        "one_method_is_another",
        "a method that has subscribed cannot unsubscribe",
        "sink.of == callback:",
        "sink.of is callback:",
    ),
    streamed(
        "closed_by_the_main_thread",
        "the end of a call waits until the disk has closed the file",
        "            sink.end_file()\n",
        "            sink._close()\n",
    ),
    streamed(
        "a_child_writes_as_its_parent",
        "a process that was forked writes into its parent's file",
        "    _sinks, _changing = (), threading.Lock()\n",
        "    _changing = threading.Lock()\n",
    ),
)

reports = _in("reports/*.py", "tests/unit/test_reports.py")
incidents = _in("reports/*.py", "tests/unit/test_incident_files.py")
accounts = _in("reports/accounting.py", "tests/unit/test_accounting.py")
writers = _in("events/incidents.py", "tests/unit/test_incident_files.py")
REPORTS = (
    reports(
        "stopped_is_a_gil_hang",
        "a stopped process is taken for one that holds the interpreter lock",
        '    if state in ("T", "t"):\n',
        '    if state == "?":\n',
    ),
    reports(
        "echo_is_a_culprit",
        "a rank that saw another one's connection close is named",
        "[record for record in found if not is_echo(record)] or found",
        "found",
    ),
    reports(
        "oom_of_a_segfault",
        "a crash beside a process that was ended for its memory counts as one",
        ' and died.get("signal") in (signal.SIGKILL, None)',
        "",
    ),
    reports(
        "loader_is_a_hang",
        "a rank that waits for its loader hangs like any other",
        'return "input" if _is_in_data(',
        'return "hang" if _is_in_data(',
    ),
    reports(
        "saved_steps_are_lost",
        "steps that a LiveState kept count as lost",
        "if kept is None else max(0, start + pings - kept)",
        "if True else 0",
    ),
    reports(
        "since_it_was_noticed",
        "a hang begins when it is noticed",
        "begun = min((at - silent for at, silent in [*moments, *told]), default=noticed)",
        "begun = noticed",
    ),
    reports(
        "half_a_line_ends_it",
        "a line that cannot be read ends the file",
        "                bad += 1\n",
        "                return\n",
    ),
    reports("jobs_are_mixed", "two jobs in one directory are one", "setdefault(header.job,", 'setdefault("",'),
    reports(
        "a_host_has_one_clock",
        "events of a pod that came back on another machine are placed by the first one's clock",
        "if abs(each - offset) <= SAME_CLOCK_S",
        "if True",
    ),
    reports(
        "records_are_of_this_version",
        "a record to which a newer version has added something is left out",
        "for name in _FIELDS if name in record}",
        "for name in record}",
    ),
    _in("reports/launches.py", "tests/unit/test_launches.py")(
        "one_launch",
        "a job that was started anew hides how all of its ranks died",
        "        if entry.rank in ranks:\n",
        "        if False:\n",
    ),
    accounts(
        "a_late_rank_ends_a_hang",
        "a hang lasts until another rank has entered the same iteration",
        "if where != interrupted",
        "if where",
    ),
    accounts(
        "the_summary_forgets",
        "incidents whose events are gone are forgotten",
        "        if not is_there or loss.number not in latest:\n",
        "        if False:\n",
    ),
    incidents(
        "page_with_markup",
        "a text in a page is not escaped",
        "return html.escape(one_line(text, limit))",
        "return one_line(text, limit)",
    ),
    incidents(
        "page_with_scripts",
        "a page may load and run what it likes",
        "default-src 'none'; style-src 'unsafe-inline'",
        "",
    ),
    incidents(
        "chance_is_deterministic",
        "errors at changing moments count as one that repeats itself",
        "(error, incident.failed_after)",
        "(error, 0)",
    ),
    incidents(
        "incidents_for_ever",
        "old incidents are never removed",
        "int(name) <= latest - MAX_INCIDENTS",
        "int(name) < 0",
    ),
    incidents(
        "written_once",
        "an incident without its first step stays so",
        "return self.decision.startswith(ENDED) or all(",
        "return True or all(",
    ),
    incidents(
        "host_of_nobody",
        "a host that is lost with the store is not named",
        'told = (str(lost[0].of("store_lost").get("text", "")), "the others',
        'return []\n    told = (str(lost[0].of("store_lost").get("text", "")), "the others',
    ),
    writers(
        "two_writers",
        "a second program is started beside one that waits for a disk",
        "        if self._running() is not None:\n            return RETRY_S\n",
        "",
    ),
    writers(
        "the_last_one_is_not_alone",
        "a program that still writes the reports outlives the monitor that ends",
        "before=pid, last",
        "before=None, last",
    ),
    writers(
        "an_incident_beside_a_timer_is_missed",
        "what happens while the reports are to be written already is not written",
        "        self._following = self._following if seconds is None else seconds\n",
        "",
    ),
    _in("monitor/program.py", "tests/ranks/test_incidents.py")(
        "writers_are_orphans",
        "the last program that writes reports outlives all monitors",
        "                become(command)\n",
        "                monitor._incidents.start(command)\n",
    ),
    writers(
        "all_write",
        "each monitor has the reports written",
        "seconds = FIRST_S + turn * NEXT_S if turn < WRITERS else None",
        "seconds = FIRST_S",
    ),
)

alias = _in("compat/alias.py", "tests/unit/test_compat.py")
default_group = _in("collectives/default_group.py", "tests/unit/test_default_group.py")
debug_server = _in("kept/debug_server.py", "tests/unit/test_kept.py")
compiled = _in("kept/dynamo.py", "tests/threads/test_compiled_code.py")
ft_config = _in("launcher/ft_config.py", "tests/unit/test_ft_config.py")
NEIGHBOURS = (
    # what torch.compile takes for constants
    compiled(
        "places_are_not_looked_for",
        "code that asks for its place is kept",
        'if "distributed" in kind or "distributed" in source or int(number or 0) in known:',
        "if False:",
    ),
    compiled(
        "places_by_name_alone",
        "a function that a helper has imported under its own name is not seen",
        "or int(number or 0) in known:",
        "or False:",
    ),
    compiled(
        "kept_unasked", "compiled code is kept though nobody said that it may be", "    if _keeps:\n", "    if True:\n"
    ),
    compiled(
        "unreadable_is_fine",
        "code is kept whose guards cannot be read",
        '        return f"its guards cannot be read with torch {torch.__version__} ({in_words(error)})"\n',
        "        return f\"{'' and in_words(error)}\"\n",
    ),
    # the other library's name
    alias(
        "what_their_launcher_needs_is_missing",
        "a module of the installed library that other parts of it import is not found",
        "if fullname in self._theirs:",
        "if False:",
    ),
    alias(
        "ours_hide_what_is_installed",
        "modules beside the package are ours although the other library is installed",
        " or _installed(fullname, path)):",
        "):",
    ),
    alias(
        "the_installed_parent_is_hidden",
        "where the other library is an ordinary package its other modules are lost",
        "_installed(fullname, path) or ModuleSpec(fullname, None, is_package=True)",
        "ModuleSpec(fullname, None, is_package=True)",
    ),
    # torch's
    default_group(
        "all_ranks_meet_at_a_tcp_address",
        "a group of all ranks meets where torch 2.14 and later is no client",
        '(original("env://", *place, **kwargs))',
        "(original(url, *place, **kwargs))",
    ),
    default_group(
        "nobody_serves_elsewhere",
        "before torch 2.14 no rank serves where a group of the program's own meets",
        "        put_back({AGENT_STORE: self._agent_store})\n",
        "",
    ),
    default_group(
        "groups_beside_are_taken_for_it",
        "a framework's own group beside the default one is sent to the iteration's store",
        " or dist.is_initialized()",
        "",
    ),
    _in("hardware/gpu.py", "tests/unit/test_local_place.py")(
        "no_word_of_another_gpu",
        "without LOCAL_RANK a process whose rank has changed may use another GPU, and nobody says so",
        "rank is not None and rank != self._first_rank",
        "rank is not None and rank == self._first_rank",
    ),
    debug_server(
        "a_debug_server_of_before_is_stopped",
        "one that was started before the function ends with its first restart",
        "if module._WORKER_SERVER is _before:",
        "if module._WORKER_SERVER is None:",
    ),
    ft_config(
        "what_is_switched_off_is_told_of",
        "a file that switches off what is not here causes lines about it",
        "elif value is not None and value is not False:",
        "else:",
    ),
)

MUTANTS: tuple[Mutant, ...] = (
    *PROTOCOL,
    *COORDINATOR,
    *GUARDIAN,
    *JOINERS,
    *POLICY,
    *INTERRUPTION,
    *CALL,
    *STORES,
    *LADDER,
    *FOLLOWER,
    *MONITOR,
    *LOOP,
    *SIMULATED,
    *INHERITED,
    *ENDING,
    *FAILOVER,
    *LIVE,
    *WATCHING,
    *WARM,
    *LEFTOVERS,
    *NCCL,
    *HOOKS,
    *GROUPS,
    *TESTING,
    *EVENTS,
    *REPORTS,
    *NEIGHBOURS,
)
