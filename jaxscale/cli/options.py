"""Dataclasses as command-line options, by tyro."""

import ast
import dataclasses
import inspect
import itertools
import textwrap
import typing
from collections.abc import Sequence
from typing import Any

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from jaxscale.cli.errors import usage_errors
from jaxscale.cli.option_names import check_names


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
    check_names(kind, arguments)
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
