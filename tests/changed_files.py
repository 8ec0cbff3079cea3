"""Files that have changed: refused, or read as what they were, and nothing else."""

import collections
import random


def flipped(raw, count, seed=0):
    """`raw` with one bit flipped, `count` times."""
    rng = random.Random(seed)
    for _ in range(count):
        at = rng.randrange(len(raw))
        yield raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :]


def outcomes(file, read, count, seed=0):
    """What flips in `file` lead to: how many are refused, harmless or wrong.

    Args:
        file: The file; as it was afterwards.
        read: Reads it; its results are compared.
        count: Number of flips.
        seed: Decides the flips.
    """
    raw, found = file.read_bytes(), collections.Counter()
    wanted = read()
    try:
        for content in flipped(raw, count, seed):
            file.write_bytes(content)
            try:
                found["harmless" if read() == wanted else "wrong"] += 1
            except ValueError as error:
                assert "\n" not in str(error), error
                found["refused"] += 1
    finally:
        file.write_bytes(raw)
    return found


def replaced(value, path, other):
    """The value of a JSON file with another one at a place, a tuple of keys."""
    if not path:
        return other
    value = value.copy()
    value[path[0]] = replaced(value[path[0]], path[1:], other)
    return value
