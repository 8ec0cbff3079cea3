"""Made-up runs: event files, and where their time went by construction."""

import dataclasses
import json
import random
from pathlib import Path


@dataclasses.dataclass
class History:
    """Writes what a run of several ranks would, and keeps the account."""

    out: Path
    ranks: int = 2
    now: float = 1000.0
    cycle: int = 0
    step: int = 0
    computed: list = dataclasses.field(default_factory=list)
    """Steps that are done, with their seconds, since the newest checkpoint."""
    seconds: dict = dataclasses.field(default_factory=dict)
    dead: bool = False

    def __post_init__(self):
        (self.out / "supervisor").mkdir(parents=True)
        self.saved = 0
        self.ran = False

    def write(self, name, t0=None, *, rank=None, kind="host", at=None, **args):
        ranks = range(self.ranks) if rank is None else [rank]
        at = self.now if at is None else at
        event = {"t0": at if t0 is None else t0, "t1": at, "cycle": self.cycle}
        event |= {"step": self.step, "kind": kind, "name": name, "args": args}
        for number in ranks:
            with (self.out / f"events-{number}.jsonl").open("a") as file:
                file.write(json.dumps(event) + "\n")

    def take(self, part, seconds):
        part = "restart" if self.dead else part
        self.now += seconds
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    def launch(self, rng):
        self.cycle += 1
        self.ran = False
        self.write("start")
        self.take("start", rng.random())
        self.write("layout")
        self.write("restore")
        self.take("start", rng.random())
        self.write("compile", kind="compile")
        self.step = self.saved
        self.compute(rng)

    def compute(self, rng):
        """A step; one of the ranks waits longest for its data."""
        self.step += 1
        slowest = rng.randrange(self.ranks)
        idle, data, work = (rng.random() * x for x in (0.1, 0.1, 1.0))
        for rank in range(self.ranks):
            # A rank that is early begins before the step before is done.
            t0 = self.now + (idle if rank == slowest else -0.01)
            t1 = t0 + (data if rank == slowest else 0.005)
            self.write("begin", rank=rank, at=t0)
            self.write("data", t0, rank=rank, at=t1)
            self.write("dispatched", t1, rank=rank, at=t1 + 0.001)
        if not self.ran:
            self.take("compile", idle + data + work)
        else:
            self.take("idle", idle)
            self.take("data_wait", data)
            self.take("productive", work)
            self.computed.append((self.step, work))
        self.write("done", kind="device", loss=2.0)
        self.ran, self.dead = True, False

    def save(self, rng):
        t0 = self.now
        self.write("save")
        self.take("checkpoint", rng.random())
        self.write("saved", t0)
        self.saved, self.computed = self.step, []

    def evaluate(self, rng):
        t0 = self.now
        self.write("eval")
        self.take("evaluation", rng.random())
        self.write("evaluated", t0)

    def die(self, rng):
        """In the midst of a step, which is not done any more."""
        self.dead = True
        for step, work in self.computed:
            if step > self.saved:
                self.seconds["productive"] -= work
                self.seconds["lost"] = self.seconds.get("lost", 0.0) + work
        self.computed = []
        self.step += 1
        self.write("begin", at=self.now + 0.01)
        self.step -= 1
        self.take("restart", rng.random() * 5)
        fault = {"t0": self.now, "t1": self.now, "cycle": self.cycle, "kind": "fault"}
        fault |= {"step": self.step, "name": "exit", "args": {"reason": "a test"}}
        with (self.out / "supervisor" / "events-driver.jsonl").open("a") as file:
            file.write(json.dumps(fault) + "\n")
        self.take("restart", rng.random() * 5)
        self.launch(rng)

    def leave(self, rng):
        """End as meant, and start again later."""
        self.save(rng)
        self.write("finish")
        self.take("checkpoint", rng.random())
        self.write("bye")
        self.take("idle", rng.random() * 3)
        self.launch(rng)


def history(out, seed, actions, ranks=2):
    """A run of random length that does `actions`, by name."""
    rng = random.Random(seed)
    made = History(out, ranks=ranks)
    made.launch(rng)
    for action in actions:
        getattr(made, action)(rng)
    made.save(rng)
    return made
