"""A device without a model: its tokens depend on every row of the cache they read.

The cache row of a position holds a hash of all tokens up to it, another one where
decoding computed it, as rounding differs. A token is drawn from the sum of all rows of
its request, so that one row that is missing, stale, another request's or computed in
another way changes everything that follows.
"""

import random

from jaxscale.inference.engine.scheduling.batch_rows import (
    NUM_STOPS,
    Column,
    OutFlag,
    RowFlag,
)
from jaxscale.inference.engine.scheduling.scheduler_output import Drawn


VOCAB = 50
_PRIME = 2**61 - 1


def step_hash(before: int, token: int, *, decoded: bool) -> int:
    return (before * 1_000_003 + token + 1 + 7919 * decoded) % _PRIME


def next_token(hashes, seed, barred=()):
    token = (sum(hashes) * 31 + seed % 1009) % _PRIME % VOCAB
    while token in barred:
        token = (token + 1) % VOCAB
    return token


def solo(sequence):
    """What a request draws when it is alone."""
    request, params = sequence.request, sequence.request.params
    hashes, tokens = [], []

    def compute(token):
        decoded = len(hashes) >= sequence.target
        before = hashes[-1] if hashes else 0
        hashes.append(step_hash(before, token, decoded=decoded))

    for token in request.prompt:
        compute(token)
    while len(request.prompt) + len(tokens) < sequence.limit:
        early = len(tokens) < params.min_tokens
        barred = sequence.stops if early else ()
        tokens.append(next_token(hashes, sequence.seed, barred))
        if tokens[-1] in sequence.stops:
            break
        compute(tokens[-1])
    return tokens


class FakeDevice:
    def __init__(self, scheduler, seed=0):
        self.scheduler = scheduler
        config = self.config = scheduler.config
        width = Column.TABLE + config.table_width
        self.rows = [[0] * width for _ in range(config.num_slots)]
        self.cache = {}
        self.random = random.Random(seed)
        self.dispatched = []

    def dispatch(self, plan):
        """Carry out a plan; the results are those of `Scheduler.update`."""
        config = self.config
        if plan.source is not None:
            assert len(plan.source) == config.num_slots
            self.rows = [list(self.rows[old]) for old in plan.source]
        cells = [(row, column) for row, column, _ in plan.changes]
        assert len(set(cells)) == len(cells)
        for row, column, value in plan.changes:
            assert -(2**31) <= value < 2**31
            self.rows[row][column] = value
        prefill = self._prefill(plan.prefill) if plan.prefill else None
        # In a mixed batch rows that have just begun are not decoded.
        new = [chunk.slot for chunk in plan.prefill if chunk.sampled]
        new = new if plan.decode and plan.decode.mixed else []
        flags = [self.rows[slot][Column.FLAGS] for slot in new]
        for slot in new:
            self.rows[slot][Column.FLAGS] = 0
        decode = self._decode(plan.decode) if plan.decode else None
        for slot, flag in zip(new, flags, strict=True):
            self.rows[slot][Column.FLAGS] = flag
        self.dispatched.append((prefill is not None, decode is not None))
        return prefill, decode

    def _prefill(self, chunks):
        config = self.config
        assert sum(len(c.tokens) for c in chunks) <= config.prefill_tokens
        assert len(chunks) <= config.prefill_requests
        keys = sum(-(-c.end // config.page_size) * config.page_size for c in chunks)
        assert keys <= config.keys_budget
        tokens, flags = [], []
        for chunk in chunks:
            ends = chunk.end == chunk.sequence.target
            assert chunk.tokens and (ends or chunk.end % config.split == 0)
            size = config.page_size
            rows = [page * size + i for page in chunk.pages for i in range(size)]
            rows = rows[: chunk.end]
            assert rows[chunk.start :] == chunk.write_rows(config.page_size)
            hashes = [self.cache[row] for row in rows[: chunk.start]]
            for row, token in zip(rows[chunk.start :], chunk.tokens, strict=True):
                self._alone(row)
                before = hashes[-1] if hashes else 0
                hashes.append(step_hash(before, token, decoded=False))
                self.cache[row] = hashes[-1]
            token, flag = -1, 0
            if chunk.sampled:
                row = self.rows[chunk.slot]
                assert not row[Column.FLAGS] and row[Column.LENGTH] == chunk.end
                token = next_token(hashes, _seed(row))
                flag = self._drawn(row, token)
                row[Column.FLAGS] = 0 if flag else RowFlag.LIVE
            tokens.append([token])
            flags.append([flag])
        return Drawn(tokens=[tokens], flags=[flags])

    def _decode(self, decode):
        assert len(decode.rows) == decode.bucket
        one = decode.steps == 1 and not decode.drafts
        assert one or not (decode.full or decode.replayed or decode.mixed)
        assert not (decode.full and decode.mixed)
        assert one or decode.drafts == self.config.drafts_of(decode.bucket)
        for i, row in enumerate(self.rows):
            if row[Column.FLAGS]:
                assert i < decode.bucket, "a live row behind the bucket"
                assert decode.rows[i] is not None, "a live row that nobody has"
        width = 1 + decode.drafts
        none = [
            [[-1] * width for _ in range(decode.bucket)] for _ in range(decode.steps)
        ]
        tokens = none
        flags = [
            [[0] * width for _ in range(decode.bucket)] for _ in range(decode.steps)
        ]
        for step in range(decode.steps):
            for i, row in enumerate(self.rows[: decode.bucket]):
                if not row[Column.FLAGS]:
                    continue
                early = row[Column.LENGTH] + 1 < row[Column.MIN_LENGTH]
                chosen = i in decode.full or i in decode.replayed
                assert chosen or not early or row[Column.STOPS] < 0
                accepted = self.random.randint(1, width)
                for r in range(accepted):
                    if not row[Column.FLAGS]:
                        break
                    hashes = self._append(row)
                    barred = decode.rows[i].stops if early else ()
                    token = next_token(hashes, _seed(row), barred)
                    row[Column.LENGTH] += 1
                    flag = self._drawn(row, token)
                    if flag:
                        row[Column.FLAGS] = 0
                    tokens[step][i][r], flags[step][i][r] = token, flag
                for r in range(1, width):
                    flags[step][i][r] |= OutFlag.DRAFTED
                self._spoil(row, row[Column.LENGTH], width - accepted)
        return Drawn(tokens=tokens, flags=flags)

    def _append(self, row):
        """Write the newest token; what the row reads then."""
        length = row[Column.LENGTH]
        assert length < row[Column.LIMIT] - 1
        places = [self._place(row, p) for p in range(length + 1)]
        hashes = [self.cache[place] for place in places[:length]]
        before = hashes[-1] if hashes else 0
        hashes.append(step_hash(before, row[Column.TOKEN], decoded=True))
        self._alone(places[length])
        self.cache[places[length]] = hashes[-1]
        return hashes

    def _spoil(self, row, start, count):
        """Drafts that were refused leave something behind."""
        for position in range(start, start + count):
            if row[Column.FLAGS] and position < row[Column.LIMIT] - 1:
                place = self._place(row, position)
                self._alone(place)
                self.cache[place] = -1

    def _place(self, row, position):
        page = row[Column.TABLE + position // self.config.page_size]
        return page * self.config.page_size + position % self.config.page_size

    def _alone(self, place):
        holders = self.scheduler.pool.holders(place // self.config.page_size)
        assert holders == 1, f"written with {holders} holders"

    def _drawn(self, row, token):
        row[Column.TOKEN] = token
        length = row[Column.LENGTH] + 1
        if token in _stops(row) and length > row[Column.MIN_LENGTH]:
            return OutFlag.ENDED | OutFlag.STOPPED
        return OutFlag.ENDED if length >= row[Column.LIMIT] else 0


def _filled(value, shape):
    steps, rows, width = shape
    return [[[value] * width for _ in range(rows)] for _ in range(steps)]


def _stops(row):
    return [s for s in row[Column.STOPS : Column.STOPS + NUM_STOPS] if s >= 0]


def _seed(row):
    low, high = (value % 2**32 for value in row[Column.SEED : Column.SEED + 2])
    return high << 32 | low
