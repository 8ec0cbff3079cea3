"""Names of the events of a process, their order, and their meaning.

The supervisor and the pages of a run both use these; a new phase is added only here.
"""

START, MEET, JOINED, LAYOUT, RESTORE = "start", "meet", "joined", "layout", "restore"
STARTING = (START, MEET, JOINED, LAYOUT, RESTORE)
COMPILE = "compile"
STEP = BEGIN, DATA, DISPATCHED = "begin", "data", "dispatched"
"""Parts of a step, on the host."""
SAVE, SAVED = "save", "saved"
EVAL, EVALUATED = "eval", "evaluated"
STOPPED = "stopped"
"""A signal ends the run."""
ENDING = FINISH, BYE = "finish", "bye"

# The end of a step is reported from another thread, at any time, and is not a phase of
# the process.
DONE = "done"
ERROR, NOT_FINITE, WRONG_VALUES = "error", "not_finite", "wrong_values"
PACE, PROFILE, MEMORY, COMPILED = "pace", "profile", "memory", "compiled"
MEASUREMENTS = (PACE, PROFILE, MEMORY, COMPILED)

SPANS = {SAVE: SAVED, EVAL: EVALUATED}
"""Events that begin an interval, and those that end it."""
PHASES = (
    *STARTING,
    COMPILE,
    *STEP,
    *(name for span in SPANS.items() for name in span),
    STOPPED,
    *ENDING,
)
"""What a process does at one step, in this order."""
ORDER = {name: i for i, name in enumerate(PHASES)}

DEADLINES = {
    **dict.fromkeys([START, MEET], "start"),
    **dict.fromkeys([JOINED, LAYOUT, RESTORE, COMPILE], "compile"),
    **dict.fromkeys([SAVE, STOPPED, *ENDING], "save"),
    EVAL: "evaluate",
}
"""The field of `Deadlines` for a phase; for other phases it is ``step``."""
PAUSES = {
    **dict.fromkeys([SAVE, STOPPED, FINISH], "checkpoint"),
    EVAL: "evaluation",
}
"""The part of a run's time that a phase belongs to, if it is not a step."""
