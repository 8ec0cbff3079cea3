"""All roles of all blocks get to their end, at real sizes: nothing waits in a circle.

The roles are those of `mosaic_gpu`, without numbers: what they wait for and signal.
The interpreter runs the kernel itself, but only for a few blocks and few tiles.
"""

import collections
import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_layer.config import (
    WARPGROUPS,
    Cached,
    DecodeLayerConfig,
    Kept,
    Piece,
    Problem,
    Schedule,
)
from pallas_kernels.decode_layer.shares import Shares, make_plan
from pallas_kernels.decode_layer.specs import SPECS
from pallas_kernels.mosaic import H200
from pallas_kernels.paged_attention.problem import Cut


class Roles:
    """Generators that yield conditions, and what they say, until these hold."""

    def __init__(self, schedule, lengths=()):
        self.schedule, self.stages = schedule, schedule.stages
        self.splits = splits_of(schedule.problem.cached, lengths)
        self.signals = collections.Counter()
        self.filled = collections.Counter()
        self.freed = collections.Counter()
        self.stretches = {
            stage.weight: stretches(stage) for stage in self.stages if stage.kept
        }
        self.slots = {"w": schedule.weight_slots, "x": schedule.activation_slots}

    def pieces(self, stage, worker):
        if stage.kept:
            return self.stretches[stage.weight][worker]
        return [stage.piece(worker, i) for i in range(stage.pieces(worker))]

    def room(self, ring, worker):
        taken = min(self.freed[ring, worker, n] for n in range(WARPGROUPS))
        return self.filled[ring, worker] < taken + self.slots[ring]

    def tile(self, ring, worker, number):
        filled, freed = self.filled, self.freed
        key = ring, worker, number
        return lambda: filled[ring, worker] > freed[key], f"a tile of {ring}"

    def at_least(self, key, count):
        return lambda: self.signals[key] >= count, f"{key} of {count}"

    def of_worker(self, worker):
        """Its splits: row and head, how many these have, and pairs of tiles."""
        return self.splits[worker :: self.schedule.workers]

    def copy_weights(self, worker):
        for _, _, pairs in self.of_worker(worker):
            for _ in range(WARPGROUPS * pairs):
                yield lambda: self.room("w", worker), "room for keys"
                self.filled["w", worker] += 1
        for stage in self.stages:
            for piece in self.pieces(stage, worker):
                for _ in range(piece.count):
                    yield lambda: self.room("w", worker), "room for weights"
                    self.filled["w", worker] += 1

    def copy_activations(self, worker):
        for _ in range(len(self.of_worker(worker)) * (128 // self.schedule.tile_k)):
            yield lambda: self.room("x", worker), "room for queries"
            self.filled["x", worker] += 1
        if self.splits:
            tiles = len({tile for tile, *_ in self.splits})
            yield self.at_least(("attended",), WARPGROUPS * tiles)
        for i, stage in enumerate(self.stages):
            if i:
                yield self.at_least(("ready", i - 1), self.stages[i - 1].finished)
            if stage.norm is not None:
                last = self.schedule.workers - 1
                if last - worker < self.schedule.problem.rows // 8:
                    self.signals["norm", stage.norm] += 1
            for piece in self.pieces(stage, worker):
                for _ in range(piece.count):
                    yield lambda: self.room("x", worker), "room for activations"
                    self.filled["x", worker] += 1

    def attend(self, worker, number):
        queries = 128 // self.schedule.tile_k
        for tile, splits, pairs in self.of_worker(worker):
            filled, freed = self.filled, self.freed

            def there(ring, count, filled=filled, freed=freed):
                here = filled[ring, worker] >= freed[ring, worker, number] + count
                return here, f"{count} tiles of {ring}"

            yield lambda: there("x", queries)[0], "queries"
            for _ in range(pairs):
                for order in (number, 1 - number):
                    yield lambda n=order: there("w", 1 + n)[0], "keys"
                freed["w", worker, number] += WARPGROUPS
            freed["x", worker, number] += queries
            for _ in range(2):
                self.signals["met", worker, number] += 1
                met = self.signals["met", worker, number]
                yield self.at_least(("met", worker, 1 - number), met)
            done = ("attended",) if splits == 1 else ("split", tile, number)
            self.signals[done] += 1
        number_of = {tile: splits for tile, splits, _ in self.splits}
        for tile in range(worker, len(number_of), self.schedule.workers):
            if number_of[tile] > 1:
                yield self.at_least(("split", tile, number), number_of[tile])
                self.signals["attended",] += 1

    def compute(self, worker, number):
        yield from self.attend(worker, number)
        for i, stage in enumerate(self.stages):
            first = stage.units - stage.shared_units
            for piece in self.pieces(stage, worker):
                for tile in range(piece.count):
                    if tile == max(piece.count - 4, 0) and (
                        stage.direct or stage.whole
                    ):
                        yield from self.factors(stage)
                    for ring in "xw":
                        yield self.tile(ring, worker, number)
                    for ring in "xw":
                        self.freed[ring, worker, number] += 1
                if stage.sparse_tiles:
                    continue
                unit = piece.column * WARPGROUPS + number
                if not stage.is_alone(piece):
                    self.signals["unit", i, unit - first] += 1
                    continue
                self.signals["ready", i] += 1
            if stage.sparse_tiles:
                self.signals["parts", i] += 1
            me, step = number * self.schedule.workers + worker, WARPGROUPS
            for index in range(me, stage.items, step * self.schedule.workers):
                unit = stage.item(index)[0]
                yield from self.factors(stage)
                if stage.sparse_tiles:
                    everybody = WARPGROUPS * self.schedule.workers
                    yield self.at_least(("parts", i), everybody)
                else:
                    yield self.at_least(("unit", i, unit), stage.parts)
                self.signals["ready", i] += 1

    def factors(self, stage):
        if stage.norm is not None:
            norm = "norm", stage.norm
            yield self.at_least(norm, self.schedule.problem.rows // 8)

    def run(self):
        """What roles wait for forever, by role."""
        end = None, ""
        waiting = {
            f"{name} of block {worker}": [role, next(role, end)]
            for worker in range(self.schedule.workers)
            for name, role in {
                "weights": self.copy_weights(worker),
                "activations": self.copy_activations(worker),
                "multiply 0": self.compute(worker, 0),
                "multiply 1": self.compute(worker, 1),
            }.items()
        }
        moved = True
        while moved:
            moved = False
            for state in waiting.values():
                while (holds := state[1][0]) is not None and holds():
                    state[1], moved = next(state[0], end), True
        return {name: what for name, (_, (holds, what)) in waiting.items() if holds}


def splits_of(cached, lengths):
    """Of all rows and heads: which one, how many it has, pairs of tiles of 64 keys."""
    found = []
    for row, length in enumerate(lengths):
        first, count, total = cached.cut.splits(
            np.int32(length), np.int32(length >= 0), ops=np
        )
        assert first == 0
        for split, head in itertools.product(range(count), range(cached.kv_heads)):
            size = cached.cut.split
            size = total - split * size if split == count - 1 else size
            tile = row * cached.kv_heads + head
            found.append((tile, int(count), -(-int(size) // (WARPGROUPS * 64))))
    return found


def stretches(stage):
    """The pieces of each block, of tiles that keep from none to all they may."""
    counts = np.random.default_rng(0).integers(0, stage.k + 1, stage.sparse_tiles)
    shares = Shares(stage.sparse_tiles, stage.n, stage.workers, stage.depth)
    after_norm = stage.norm is not None
    plan = make_plan(jnp.asarray(counts), None, shares, after_norm=after_norm)
    pairs = plan[shares.of_pair : shares.of_feature].reshape(-1, 4)
    found = []
    for number, first, *_, begin, end in plan[: shares.of_pair].reshape(-1, 8):
        taken = [
            min(end, after) - max(begin, before)
            for _, _, before, after in pairs[first : first + number]
        ]
        found.append([Piece(None, None, 0, 1, int(count)) for count in taken])
    return found


def problem_of(spec):
    sizes = dataclasses.asdict(spec)
    del sizes["name"]
    keep, _, _ = (sizes.pop(name) for name in ("keep", "uneven", "context"))
    if keep < 1:
        sizes["kept"] = tuple(
            (Kept(n // 128, spec.room(k)),) for k, n in spec.products.values()
        )
    return Problem(features=spec.heads * spec.head_dim, **sizes)


@pytest.mark.parametrize("workers", [132, 114, 78])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_role_ends(spec, workers):
    device = dataclasses.replace(H200, num_sms=workers)
    config = DecodeLayerConfig()
    schedule = Schedule(problem=problem_of(spec), config=config, device=device)
    roles = Roles(schedule)
    assert roles.run() == {}
    for i, stage in enumerate(schedule.stages):
        assert roles.signals["ready", i] == stage.finished


def test_fewest_slots():
    config = DecodeLayerConfig(weight_slots=2, activation_slots=2)
    schedule = Schedule(problem=problem_of(SPECS[0]), config=config, device=H200)
    assert Roles(schedule).run() == {}


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
@pytest.mark.parametrize("slots", [None, 2])
def test_every_role_ends_with_attention(weights, slots):
    """Rows of many splits, of one, and without a request; few rows and many."""
    for m, split in ((1, 256), (32, 1024)):
        lengths = np.random.default_rng(m).integers(-1, 8000, m)
        lengths[-1], lengths[m // 2] = 8000, -1 if m > 1 else 5000
        cut = Cut(split, 1, 8192, None)
        sizes = {"heads": 32, "kv_heads": 8, "head_dim": 128}
        cached = Cached(page=64, width=128, num_pages=1, cut=cut, scale=1, **sizes)
        problem = Problem(
            m=m,
            d_model=4096,
            d_ff=14336,
            features=4096,
            weights=weights,
            cached=cached,
            **sizes,
        )
        config = DecodeLayerConfig(weight_slots=slots, activation_slots=slots)
        schedule = Schedule(problem=problem, config=config, device=H200)
        assert Roles(schedule, lengths).run() == {}
