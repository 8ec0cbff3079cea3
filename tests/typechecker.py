"""The run-time type checker that the jaxtyping hook applies to the packages."""

from beartype import BeartypeConf, beartype


# An int is a fine float, as PEP 484 says; beartype refuses it unless told.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))
