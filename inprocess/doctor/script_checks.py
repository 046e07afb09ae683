"""What the doctor looks for in a script: the table that ``docs/doctor.md`` lists, and findings made from it."""

from __future__ import annotations

from dataclasses import dataclass

from inprocess.doctor.findings import Finding

__all__ = ["SCRIPT_CHECKS", "ScriptCheck", "found"]


@dataclass(frozen=True)
class ScriptCheck:
    """One thing that can be wrong with a script."""

    #: "script." and a word
    id: str
    #: what is looked at, one line
    about: str
    #: why it matters for a restart, one line
    why: str
    #: what to do, one line
    remedy: str


SCRIPT_CHECKS = (
    ScriptCheck(
        "script.ends",
        "the script runs without any fault: it makes steps, and ends without an error",
        "What fails or hangs without a fault does so after a restart too.",
        "Make it run under `inprocess run` first, with few steps.",
    ),
    ScriptCheck(
        "script.wrapper",
        "a function that inprocess.Wrapper has wrapped is called, and the wrapper is enabled",
        "Only a wrapped function is restarted; without one a fault ends the process as ever.",
        "Decorate the training function with @inprocess.Wrapper() and leave out enabled=False.",
    ),
    ScriptCheck(
        "script.group-outside",
        "no process group is made before the wrapped function is called, at import for example",
        "A restart ends all process groups, and only what the function makes is made again.",
        "Move this call into the wrapped function.",
    ),
    ScriptCheck(
        "script.group-kept",
        "no variable keeps a process group from one run of the function to the next",
        "The restart has ended that group: whoever uses it in the next run gets an error.",
        "Make the group in each run of the function and keep it in a local variable.",
    ),
    ScriptCheck(
        "script.no-group",
        "the function makes a process group",
        "Ranks without a group do not work together: each trains alone.",
        "Call torch.distributed.init_process_group() in the function, in each run.",
    ),
    ScriptCheck(
        "script.pings",
        "the function calls ping() in its loop",
        "Without ping() a loop that runs Python code and gets nowhere is not taken for a hang.",
        "Call call.ping(), or inprocess.current_call().ping(), once in each step.",
    ),
    ScriptCheck(
        "script.timeouts",
        "no step takes longer than half of soft_timeout",
        "A step that is longer than soft_timeout is taken for a hang, and all ranks restart.",
        "Raise soft_timeout (and hard_timeout with it), or put the long part into call.section(name, timeout=...).",
    ),
    ScriptCheck(
        "script.restart",
        "after an exception on one rank the function can be called again on all of them",
        "A function that fails when it is called again ends the job at the first fault.",
        "Make what it needs anew in each run of the function, also what only its first run makes now.",
    ),
    ScriptCheck(
        "script.fewer-ranks",
        "the function goes on with one rank less, after a rank was killed",
        "After the loss of a process the world size is smaller until a replacement comes.",
        "Read rank and world size anew in each run of the function; do not require a fixed world size.",
    ),
    ScriptCheck(
        "script.hang",
        "a rank that hangs is interrupted, and goes on",
        "A rank that cannot be interrupted is killed after hard_timeout, and the others wait until then.",
        "Keep disable_hang_protection() and atomic() short, and let RankShouldRestart pass.",
    ),
    ScriptCheck(
        "script.state",
        "after a restart training goes on from a later step than the first",
        "Without state that survives, each restart costs all steps so far.",
        "Save and load a checkpoint in the function, or keep its state in inprocess.live.LiveState.",
    ),
    ScriptCheck(
        "script.checkpoint",
        "a rank that is killed in the middle of a file leaves nothing that cannot be loaded",
        "A fault strikes at any moment; half a checkpoint over the last whole one loses both.",
        "Write into a new file beside it and os.replace() it, or use LiveState(folder=...).",
    ),
    ScriptCheck(
        "script.threads",
        "no thread outlives each run of the function",
        "Each restart leaves one more thread, which uses objects of an earlier run.",
        "End it in a finally block of the function, or in the finalize hook.",
    ),
    ScriptCheck(
        "script.descriptors",
        "no file stays open after each run of the function",
        "Each restart leaves one more open file, up to the limit of descriptors.",
        "Open it with `with`, or close it in a finally block of the function.",
    ),
    ScriptCheck(
        "script.children",
        "no child process outlives each run of the function",
        "Each restart leaves one more process, with its memory and GPU.",
        "End it in a finally block of the function, or in the finalize hook.",
    ),
    ScriptCheck(
        "script.containers",
        "no list, dict, set, deque or cache of the script's modules grows with each restart",
        "What the registry has of earlier runs is used again, and keeps their tensors in memory.",
        "Empty it at the beginning of the function, or make it there.",
    ),
    ScriptCheck(
        "script.registrations",
        "no hook of a module or of torch, exit function, log handler or importer is added with each restart",
        "It runs once more after each restart, and keeps objects of earlier runs alive.",
        "Remove it in a finally block of the function, or register it once outside of it.",
    ),
    ScriptCheck(
        "script.handlers",
        "the handlers of signals and sys.excepthook are not replaced by other ones in each run",
        "If each handler calls the one before, the chain grows, and keeps objects of earlier runs alive.",
        "Install it once before the call of the function, or restore the previous one in a finally block.",
    ),
    ScriptCheck(
        "script.swallows",
        "neither the interruption of a restart nor an error of a step is caught and dropped",
        "The other ranks wait for a rank that has swallowed it, until it is killed after hard_timeout.",
        "Catch Exception, not BaseException, outside of the loop, and raise it again after cleaning up.",
    ),
    ScriptCheck(
        "script.result",
        "the wrapped function returns the same with and without restarts",
        "A difference shows state that was lost or used twice; where it is meant to vary there is nothing to do.",
        "Save and load everything that a step depends on: random states, data position, optimizer, schedules.",
    ),
    ScriptCheck(
        "script.files",
        "the script writes its files below its working directory",
        "The doctor's runs use a copy of the working directory; elsewhere they meet the files of the run before.",
        "Use a relative path, or another one where the variable INPROCESS_DOCTOR is set.",
    ),
    ScriptCheck(
        "script.schedule",
        "where the faults struck: ranks and steps are drawn by chance, from a seed; told where anything else was found",
        "The same seed draws the same faults, so that a correction can be tried against them.",
        "INPROCESS_DOCTOR_SEED=7 inprocess doctor -- train.py, with the number that is named.",
    ),
)
_BY_ID = {check.id: check for check in SCRIPT_CHECKS}


def found(name: str, what: str, where: str = "", level: str = "problem") -> Finding:
    """A finding of the check ``script.NAME``; ``what`` becomes one line."""
    check = _BY_ID[f"script.{name}"]
    return Finding(check.id, level, " ".join(what.split()), check.why, check.remedy, where)
