"""A checkpoint's chat template, which is a program: it may neither compute without end nor take what memory there is.

What it makes is looked at as it grows. No wall is complete: who runs checkpoints of strangers limits the process, too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from engines.errors import UserError, one_line
from engines.time_limit import time_limit

if TYPE_CHECKING:
    import jinja2

LARGEST = 10_000_000  # bytes of a value, about; and a number, which a text could be made as long as
ITEM = 16  # bytes of a list's item, at least


class Template:
    """Compiled as Hugging Face does it, in a sandbox."""

    def __init__(self, source: str) -> None:
        """Compile it.

        Raises:
            ValueError: it is no template.
        """
        try:
            with time_limit():
                self._template = _compile(source)
        except Exception as error:  # jinja2's, or Python's own, whose compiler follows
            raise ValueError(one_line(error)) from error

    def render(self, **variables: Any) -> str:
        """The text. A program fails in any way; this one also where it takes too long or makes too much."""
        with time_limit():
            return self._template.render(variables)


def _compile(source: str) -> jinja2.Template:
    import jinja2
    from jinja2 import nodes
    from jinja2.compiler import CodeGenerator
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    growing = nodes.BinExpr, nodes.Concat, nodes.Call, nodes.Filter, nodes.List, nodes.Tuple, nodes.Dict

    class Checked(CodeGenerator):
        """Whatever could be larger than what it is made of is looked at before it is used."""

        def visit(self, node: nodes.Node, *args: Any, **options: Any) -> Any:
            made = isinstance(node, growing) and getattr(node, "ctx", "load") == "load"
            self.write("environment.checked(" * made)
            super().visit(node, *args, **options)
            self.write(")" * made)

        def _output_child_to_const(self, node: nodes.Expr, *args: Any) -> str:
            if not isinstance(node, nodes.TemplateData):
                raise nodes.Impossible  # compiling computes nothing
            return super()._output_child_to_const(node, *args)

    class Sandbox(ImmutableSandboxedEnvironment):
        code_generator_class = Checked
        intercepted_binops = frozenset({"*", "**"})  # which are looked at before, as they make the most
        checked = staticmethod(_checked)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _limit(_size(left) * _size(right) if operator == "*" else LARGEST * (_size(right) - 64))
            return super().call_binop(context, operator, left, right)

        @staticmethod
        def concat(parts: Iterable[str]) -> str:
            return "".join(_counted(parts))

    class Generation(Extension):
        """`{% generation %}` marks the assistant's words for training; here it only renders them."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

        def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # jinja's own filter escapes HTML

    environment = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
        optimized=False,
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": time.strftime}
    for constant in environment.parse(source).find_all(nodes.Const):
        _checked(constant.value)
    return environment.from_string(source)


def _limit(size: int) -> None:
    if size > LARGEST:
        raise UserError(f"it makes a text, a list or a number larger than {LARGEST:,}")


def _size(value: Any) -> int:
    return abs(value) if isinstance(value, int) else _weight(value)


def _weight(value: Any) -> int:
    """Bytes of texts and items, those within each other, too; of what is too large, no more than that it is."""
    weight, left = 0, [value]
    while left and weight <= LARGEST:
        value = left.pop()
        if isinstance(value, Mapping):
            left += [*value, *value.values()]
        elif isinstance(value, list | tuple | set):
            left += value
        weight += ITEM + (len(value) if isinstance(value, str | bytes) else 0)
    return weight


def _checked(value: Any) -> Any:
    _limit(_size(value))
    return value


def _counted(parts: Iterable[str]) -> Iterator[str]:
    size = 0
    for part in parts:
        _limit(size := size + len(part))
        yield part
