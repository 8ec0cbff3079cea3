"""Dataclasses as command-line options, by tyro."""

import ast
import dataclasses
import inspect
import itertools
import textwrap
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from jaxscale.cli.errors import UsageError, usage_errors


def parse[C](
    kind: type[C],
    arguments: Sequence[str],
    *,
    prog: str,
    description: str,
    default: C | None = None,
) -> C:
    """Parse `arguments` into a `kind`; ``--help`` ends the process.

    Fields of dataclasses are options, those of nested ones have dotted names. An
    unknown option or a value of the wrong type ends the process with code 2 and says
    what was expected.

    Args:
        kind: A dataclass whose fields have a string under them, which is their help.
        arguments: The words after the name of the command.
        prog: The command, for messages.
        description: A sentence on what the command does.
        default: Values of the options that are not given.

    Raises:
        UsageError: a dataclass refuses its values, or an option has another name here.

    Example:
        >>> from jaxscale.sharding import MeshConfig
        >>> parse(MeshConfig, ["--tensor", "2"], prog="mesh", description="").tensor
        2
    """
    _check_names(kind, arguments)
    registry = ConstructorRegistry()
    registry.struct_rule(_dataclass_fields)
    return tyro.cli(
        kind,
        args=arguments,
        prog=prog,
        description=description,
        default=tyro.MISSING_NONPROP if default is None else default,
        config=(tyro.conf.AvoidSubcommands,),
        registry=registry,
    )


_OTHER_NAMES = {
    "lr": "learning-rate",
    "wd": "weight-decay",
    "max-steps": "steps",
    "num-steps": "steps",
    "bs": "batch-size",
    "per-device-train-batch-size": "batch-size",
    "gradient-accumulation-steps": "microbatches",
    "max-seq-length": "seq-len",
    "max-length": "seq-len",
    "block-size": "seq-len",
    "tp": "tensor",
    "pp": "pipe",
    "max-tokens": "max-new-tokens",
}
"""Last parts of options as other programs have them, and as they are here."""


def _check_names(kind: type[Any], arguments: Sequence[str]) -> None:
    """Raise for an option that is known here by a longer or by another name."""
    known = list(_names(kind))
    for word in arguments:
        name = word.partition("=")[0].replace("_", "-").removeprefix("--")
        if not word.startswith("--") or name in known:
            continue
        last = name.rpartition(".")[2]
        last = _OTHER_NAMES.get(last, last)
        meant = [f"--{x}" for x in known if x.rpartition(".")[2] == last]
        if meant:
            raise UsageError(
                f"--{name} is no option here (did you mean {' or '.join(meant)}?)"
            )


def _names(kind: type[Any], prefix: str = "") -> Iterator[str]:
    """The options of a dataclass, without their dashes."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint, name = hints[field.name], field.name.replace("_", "-")
        for note in getattr(hint, "__metadata__", ()):
            given = getattr(note, "name", None)
            name = name if given is None else given
        inner = typing.get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
        parts = typing.get_args(inner) or (inner,)
        nested = [part for part in parts if dataclasses.is_dataclass(part)]
        yield f"{prefix}{name}"
        for part in nested:
            yield from _names(
                typing.cast(Any, part), f"{prefix}{name}." if name else prefix
            )


def _dataclass_fields(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Tyro's own rule for dataclasses, but help is one paragraph.

    Tyro keeps the line breaks of indented strings, which it then wraps again.
    """
    if not dataclasses.is_dataclass(info.type):
        return None
    hints = typing.get_type_hints(info.type, include_extras=True)
    docs = field_docs(info.type)
    fields = tuple(
        StructFieldSpec(
            name=field.name,
            type=hints[field.name],
            default=_default(field, info.default),
            helptext=docs.get(field.name),
        )
        for field in dataclasses.fields(info.type)
    )

    def make(**values: Any) -> Any:
        # Tyro draws a box around a ValueError, unless it comes from the outermost.
        with usage_errors():
            return info.type(**values)

    return StructConstructorSpec(instantiate=make, fields=fields)


def _default(field: dataclasses.Field[Any], instance: Any) -> Any:
    if dataclasses.is_dataclass(instance):
        return getattr(instance, field.name)
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return tyro.MISSING_NONPROP


def field_docs(kind: type[Any]) -> dict[str, str]:
    """The docstring of each field of a dataclass and its bases, as one paragraph.

    Example:
        >>> from jaxscale.sharding import MeshConfig
        >>> field_docs(MeshConfig)["data"]
        'Data-parallel replicas of the model; -1 for all remaining devices.'
    """
    docs = {}
    bodies = [
        _body(base) for base in reversed(kind.__mro__) if dataclasses.is_dataclass(base)
    ]
    for field, below in itertools.chain(*map(itertools.pairwise, bodies)):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docs[name] = " ".join(text.split())
    return docs


def _body(kind: type[Any]) -> list[ast.stmt]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    return definition.body
