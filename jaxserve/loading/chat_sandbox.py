"""A Jinja environment for templates that came with a checkpoint, and so from a stranger.

Jinja's immutable sandbox keeps a template away from Python's internals; it does not keep one from
running for ever or filling the memory. So every loop pass, macro call, function call and filter
counts against a budget, and texts and lists are measured as they are made (`chat_limits`).

The dialect is the one transformers gives chat templates: trimmed blocks, loop controls,
`raise_exception`, `strftime_now`, an unescaped `tojson`, and the `generation` tag. Filters that
format prose for web pages are left out.
"""

import functools
import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from jaxserve.loading import chat_limits
from jaxserve.loading.chat_limits import TemplateLimitError

_NOT_OFFERED = ("urlize", "wordwrap", "xmlattr", "forceescape", "filesizeformat")
# Filters that look at a value's items and never write it out.
_STRUCTURAL = frozenset(
    [
        "attr",
        "batch",
        "count",
        "d",
        "default",
        "dictsort",
        "first",
        "groupby",
        "items",
        "last",
        "length",
        "list",
        "map",
        "max",
        "min",
        "random",
        "reject",
        "rejectattr",
        "reverse",
        "select",
        "selectattr",
        "slice",
        "sort",
        "sum",
        "unique",
    ]
)


class TemplateRaisedError(jinja2.TemplateError):
    """The template itself refused the conversation, with `raise_exception`."""


def compile_template(source: str) -> jinja2.Template:
    """Compile in a sandbox of its own; jinja2.TemplateSyntaxError if it does not parse."""
    environment = _Sandbox()
    tree = _MeteredTree().visit(environment.parse(source))
    code = environment.compile(tree)
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Render within the limits; whatever goes wrong in the template comes out as an exception."""
    token = chat_limits.current_budget.set(chat_limits.Budget())
    try:
        return template.render(variables)
    finally:
        chat_limits.current_budget.reset(token)


class _Metering(Extension):
    """What the metered tree calls while a template runs; also the `generation` tag."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as an instance's set

    def parse(self, parser: Parser) -> nodes.Node:
        """`generation` marks the answer's tokens for training; serving wants only its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)

    @property
    def step(self) -> None:
        """Charges a step when read: an attribute costs a template a tenth of what a call does."""
        chat_limits.spend_step()

    def concat(self, *parts: Any) -> str:
        return chat_limits.bounded_join(parts)


class _MeteredTree(NodeTransformer):
    """Counts every loop pass and macro call, and bounds the `~` operator."""

    def _counted(self, node: Any) -> Any:
        self.generic_visit(node)
        step = nodes.ExtensionAttribute(_Metering.identifier, "step")
        node.body.insert(0, nodes.ExprStmt(step).set_lineno(node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _counted  # noqa: N815 - names Jinja looks up

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        concat = nodes.ExtensionAttribute(_Metering.identifier, "concat")
        return nodes.Call(concat, node.nodes, [], None, None).set_lineno(node.lineno)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    concat = staticmethod(chat_limits.bounded_join)  # of templates, macros and set blocks

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Metering, loopcontrols],
            finalize=chat_limits.check_tree,
        )
        self.filters["tojson"] = _to_json
        self.filters = {
            name: _metered_filter(name, function)
            for name, function in self.filters.items()
            if name not in _NOT_OFFERED
        }
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        del self.globals["lipsum"]

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Called for every call in a template."""
        chat_limits.spend_step()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            chat_limits.check_sizes(args)
            if obj.__name__ == "join":  # the method of the separator
                chat_limits.check_growth("join", args[0] if args else "", (owner,))
            elif obj.__name__ == "replace":
                chat_limits.check_growth("replace", owner, args)
        return chat_limits.checked(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Called for the intercepted operators."""
        chat_limits.check_operator(operator, left, right)
        return chat_limits.checked(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Called when a template takes `format` or `format_map` of a text."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        chat_limits.check_format(value.__self__)

        def bounded(*args: Any, **kwargs: Any) -> str:
            chat_limits.check_tree([*args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return bounded


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter with a step charged, its arguments checked and its result measured."""
    value_at = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        chat_limits.spend_step()
        options = (*args[value_at + 1 :], *kwargs.values())
        if name not in _STRUCTURAL:
            chat_limits.check_tree(list(args[value_at:]))
        if name not in ("default", "d"):  # whose argument is a value, not a length
            chat_limits.check_sizes(options)
        if len(args) > value_at:
            chat_limits.check_growth(name, args[value_at], options)
        return chat_limits.checked(function(*args, **kwargs))

    return metered


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON for a prompt: Jinja's own filter escapes HTML, which a model must not see."""
    if indent is not None and (not isinstance(indent, int) or indent > chat_limits.MAX_INDENT):
        raise TemplateLimitError(f"the chat template indents by over {chat_limits.MAX_INDENT}")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateRaisedError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
