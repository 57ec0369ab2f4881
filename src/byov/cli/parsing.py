"""Parse arguments into a typed config with tyro; errors become one sentence instead of a box."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import textwrap
import types
import typing
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, TypeVar, Union

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from byov._core.errors import BadInput
from byov.config import near_keys

T = TypeVar("T")
VALUES = ConstructorRegistry()
_NAMES: dict[Any, tuple[str, str]] = {  # of a type: in the help, and in an error
    int: ("INT", "a whole number"),
    float: ("FLOAT", "a number"),
    str: ("STR", "a text"),
}
_UNSET = ("None", "unset")


def parse(kind: type[T], command: str, arguments: list[str], default: T | None = None) -> T:
    """Parse the options of a command into the dataclass `kind`. --help prints and exits."""
    given: dict[str, Any] = {} if default is None else {"default": default}
    arguments = ["--help" if argument == "--help-all" else argument for argument in arguments]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            options, unknown = tyro.cli(
                kind, prog=f"byov {command}", args=arguments, return_unknown_args=True, registry=VALUES, **given
            )
    except SystemExit as stop:
        if stop.code:
            raise BadInput(_sentence(said.getvalue(), command)) from None
        raise
    if unknown:
        raise BadInput(_unknown(kind, command, unknown))
    return typing.cast(T, options)


def print_help(kind: type[T], command: str, default: T, shown: Collection[str] | None, footer: str) -> None:
    """Print the help of a command with these defaults, for all options or only those shown, by their dotted names."""
    if shown is not None:
        default = _narrowed(default, shown)
        kind = type(default)
    with contextlib.suppress(SystemExit):
        tyro.cli(kind, prog=f"byov {command}", args=["--help"], registry=VALUES, default=default)
    print(textwrap.fill(footer, 80))


def completion(commands: Mapping[str, type], arguments: list[str]) -> None:
    """Print or write shell completion for all commands; the arguments are tyro's."""
    named: Any = tuple(Annotated[kind, tyro.conf.subcommand(name)] for name, kind in commands.items())
    with contextlib.suppress(SystemExit):
        tyro.cli(Union[named], prog="byov", args=arguments, registry=VALUES)  # noqa: UP007


def _narrowed(options: Any, shown: Collection[str], prefix: str = "") -> Any:
    """The same options as an instance of a subclass in which tyro hides all fields that are not shown."""
    kind = type(options)
    hints = typing.get_type_hints(kind, include_extras=True)
    hide: Any = tyro.conf.Suppress
    fields: list[tuple[str, Any]] = []
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    for name, value in values.items():
        hint = hints[name]
        if not dataclasses.is_dataclass(value):
            if prefix + name not in shown:
                fields.append((name, hide[hint]))
            continue
        path = prefix if _is_unnamed(hint) else f"{prefix}{name}."
        if any(key.startswith(path) for key in shown):
            values[name] = _narrowed(value, shown, path)
            extras = getattr(hint, "__metadata__", ())
            fields.append((name, Annotated[(type(values[name]), *extras)] if extras else type(values[name])))
        else:
            fields.append((name, hide[hint]))
    return dataclasses.make_dataclass(
        kind.__name__, fields, bases=(kind,), frozen=True, kw_only=True, namespace={"__doc__": kind.__doc__}
    )(**values)


@VALUES.primitive_rule
def _value(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Parse numbers, and `X | None` shown as X: "{None}|INT" is noise in the help. Errors are in words."""
    options = typing.get_args(info.type) if info.type_origin in (typing.Union, types.UnionType) else (info.type,)
    optional = type(None) in options
    kind = next((option for option in options if option is not type(None)), None)
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
    if len(options) - optional != 1 or not (kind in (int, float) or (optional and (kind is str or choices))):
        return None  # tyro's own rule serves
    metavar, name = (f"{{{','.join(choices)}}}", f"one of {', '.join(choices)}") if choices else _NAMES[kind]

    def read(texts: list[str]) -> Any:
        text = texts[0]
        if optional and text in _UNSET:
            return None
        if choices and text in choices:
            return text
        with contextlib.suppress(ValueError):
            if not choices:
                return kind(text)  # type: ignore[misc]
        raise ValueError(f"{text!r} is not {name}")

    def fits(value: Any) -> bool:
        if value is None or choices:
            return (optional and value is None) or value in choices
        return isinstance(value, (int, float) if kind is float else kind)  # type: ignore[arg-type]

    return PrimitiveConstructorSpec(1, metavar, read, fits, lambda value: ["unset" if value is None else str(value)])


def _sentence(box: str, command: str) -> str:
    """The first part of tyro's error, without the box around it."""
    lines = [line.strip("│ ") for line in box.splitlines() if line.startswith("│")] or box.splitlines()
    end = next((i for i, line in enumerate(lines) if line.startswith("──")), len(lines))
    if lines[:1] and lines[0].startswith("Missing from"):  # the argument on a separate line, then its help
        lines[:2] = [f"missing {lines[1]}:"]
        end -= 1
    text = " ".join(line for line in lines[:end] if line).removesuffix(" (required)")
    text = text.removeprefix("Error parsing ").replace(". Expected", "; expected").replace(" 1 values", " one value")
    return f"{text[:1].lower()}{text[1:].rstrip('.')} (see `byov {command} --help`)."


def _unknown(kind: type, command: str, unknown: list[str]) -> str:
    """A sentence on arguments that the command does not have, with similar ones."""
    flags = [argument.split("=")[0] for argument in unknown if argument.startswith("-")]
    if not flags:
        return f"byov {command} does not accept {unknown[0]!r}: leave it out, or see `byov {command} --help`."
    near = near_keys(flags[0].lstrip("-").replace("-", "_"), _flags(kind))
    names = " or ".join(f"--{name.replace('_', '-')}" for name in near)
    hint = f"did you mean {names}?" if near else f"`byov {command} --help` lists them."
    return f"there is no option {flags[0]}; {hint}"


def _flags(kind: type, prefix: str = "") -> list[str]:
    """All flags of a dataclass, dotted."""
    found: list[str] = []
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        section = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint
        if not dataclasses.is_dataclass(section):
            found.append(prefix + name)
        else:
            found += _flags(section, prefix if _is_unnamed(hint) else f"{prefix}{name}.")  # type: ignore[arg-type]
    return found


def _is_unnamed(hint: Any) -> bool:
    """Whether a section adds no name to its flags (`arg(name="")`)."""
    return any(getattr(extra, "name", None) == "" for extra in getattr(hint, "__metadata__", ()))
