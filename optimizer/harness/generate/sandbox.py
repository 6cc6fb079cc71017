"""Jinja's sandbox, in which a template can also not take all memory or run without end.

Jinja's own keeps a template from reaching into Python; `10**(10**8)`, `'x'.center(10**10)` and
loops in loops it lets run. Here everything that a template does costs units, before it is done,
and a rendering has so many of them: a character that is made or compared costs 1; a call, a turn of
a loop and an element of a list cost what as many characters take of time or memory. So both are
bounded whatever the operation, and no template that only lays a conversation out comes near.

    tree = environment.parse(text)      every loop, macro and block counts its turns, every operand
    environment.bounded(tree)           whose cost depends on its size is weighed
"""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any, cast

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

UNITS = 100_000_000  # of one rendering: three seconds, or 400 MB, at most; and
PER_CHARACTER = 1_000  # more for each character of the conversation
CALL = 100  # an operation in Python takes as long as 100 characters are copied
NODE = 20  # a part of an expression
ELEMENT = 64  # of a list or a mapping
SPLIT = 64  # a character that becomes an element of its own takes as many bytes
ESCAPED = 10  # characters at most that one becomes in a repr or with escapes
BITS = 10_000  # of a whole number: more than Python prints
WORK = " work"  # the name of the count in a template's context: none that a template can write


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


FREE_FILTERS = _names("attr count d default first last length")  # that cost the same for any value
FREE_TESTS = _names(
    """boolean callable defined false filter float integer iterable mapping none number sameas
    sequence string test true undefined"""
)
FREE_METHODS = _names("get items keys values")  # of a dict
LAZY = _names("map reject rejectattr select selectattr")  # filters of one element after the other
ESCAPING = _names("e escape forceescape format format_map string tojson urlencode")
SPLITTING = _names(
    """batch dictsort encode groupby list pprint reverse round rsplit slice sort split splitlines
    strftime_now striptags sum title translate unique urlize wordcount wordwrap xmlattr"""
)
INDENTING = _names("expandtabs indent pprint tojson wordwrap")
WIDTH = re.compile(r"[%{][^%}]*?(?:\d{5}|\*|\{)")  # of a field: of five digits, or computed


class TooMuch(SecurityError):
    """A rendering has no units left."""


class Work:
    """The units that are left to one rendering."""

    def __init__(self, units: int) -> None:
        self.left = units

    def spend(self, units: int) -> None:
        """Raises TooMuch when there are not as many left."""
        self.left -= units
        if self.left < 0:
            raise TooMuch("it computes more than laying a conversation out can take")

    def weigh(self, *values: Any) -> int:
        """Spend what values hold, all that is in them included; returns how much."""
        before, waiting = self.left, list(values)
        while waiting:
            value = waiting.pop()
            if _is_text(value):
                self.spend(1 + len(value))
            elif isinstance(value, Mapping | ItemsView):
                self.spend(2 * ELEMENT * (1 + len(value)))
                mapping = value if isinstance(value, Mapping) else dict(value)
                waiting += [*mapping.keys(), *mapping.values()]
            elif isinstance(value, list | tuple | set | frozenset | range | KeysView | ValuesView):
                self.spend(ELEMENT * (1 + len(value)))
                waiting += value if not isinstance(value, range) else ()
            else:
                self.spend(1)
        return before - self.left

    def each(self, values: Iterable[Any]) -> Iterator[Any]:
        """The values, each spent for before the next."""
        for value in values:
            self.spend(ELEMENT)
            yield value

    def drawn(self, value: Any) -> Any:
        """A list of what an iterator yields; any other value as it is."""
        if not isinstance(value, Iterator) or isinstance(value, LoopContext):
            return value
        drawn: list[Any] = []
        for part in self.each(value):
            self.weigh(part)
            drawn.append(part)
        return drawn

    def operation(self, name: str, values: tuple[Any, ...]) -> None:
        """Spend what a filter, a test or a method called `name` may do with values."""
        self.spend(CALL)
        weight = self.weigh(*values)
        numbers = [abs(v) for v in values if isinstance(v, int)]
        factor = SPLIT if name in SPLITTING else ESCAPED if name in ESCAPING else 1
        self.spend((factor - 1) * weight + factor * sum(numbers))
        if name in INDENTING:  # a number of spaces, or a text, before each line
            self.spend(weight * (sum(numbers) + sum(len(v) for v in values[1:] if _is_text(v))))
        text = values[0] if values else ""
        if name in ("format", "format_map"):
            self.fields(str(text), weight)
        elif name == "replace" and isinstance(text, str) and len(values) > 2:
            old, new = str(values[1]), str(values[2])
            self.spend(text.count(old) * len(new))
        elif name == "join":  # of a list with a string between, or the other way round
            lengths = [len(v) for v in values if hasattr(v, "__len__")]
            self.spend(lengths[0] * lengths[1] if len(lengths) > 1 else 0)
        elif name in ("translate", "sum"):
            self.spend(len(text) * weight // SPLIT if hasattr(text, "__len__") else 0)

    def fields(self, text: str, weight: int) -> None:
        """Spend what a text with fields (%s or {}) may become, given values of a weight."""
        if WIDTH.search(text):
            raise TooMuch("a field of a format is wider than 9,999, or its width is computed")
        self.spend((text.count("%") + text.count("{")) * (weight + 10_000 // ESCAPED))


class Sandbox(ImmutableSandboxedEnvironment):
    """Templates of it are made with `bounded` and rendered with the variable WORK: a Work."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, **options: Any) -> None:
        # Jinja works out what is constant when it compiles, 10**(10**8) as well. Three things keep
        # it from that: not optimized; to print a value takes the context; operators are calls.
        super().__init__(optimized=False, finalize=_finalize, **options)
        del self.globals["lipsum"]  # placeholder text
        for table, free in ((self.filters, FREE_FILTERS), (self.tests, FREE_TESTS)):
            for name in set(table) - free:
                table[name] = _counted(name, cast("Callable[..., Any]", table[name]))

    def bounded(self, tree: nodes.Template) -> Any:
        """The template of a tree, whose cost is counted while it is rendered."""
        _count(tree, self)
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """A filter of the caller's, whose cost `name` stands for."""
        self.filters[name] = _counted(name, function)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(__obj, "__self__", None) is __self:  # what `_count` put there
            return __obj(__context, *args)
        work = _work(__context)
        if isinstance(__obj, Macro):
            work.spend(CALL)  # what it does with its arguments is counted there
        else:
            args = tuple(work.drawn(a) for a in args)
            values = (*args, *(v for k, v in kwargs.items() if not k.startswith("_")))
            method = getattr(__obj, "__wrapped__", __obj)  # Jinja's sandbox wraps str.format
            name, owner = getattr(method, "__name__", ""), getattr(method, "__self__", None)
            free = owner is None or (isinstance(owner, dict) and name in FREE_METHODS)
            work.operation(name, values if free else (owner, *values))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        work = _work(context)
        work.spend(CALL)
        if isinstance(left, int) and isinstance(right, int):
            bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * right}
            if bits.get(operator, 0) > BITS:
                raise TooMuch(f"{operator} makes a number of more than {BITS:,} bits")
        elif operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(times, int) and hasattr(sequence, "__len__"):
                    work.spend(_shallow(sequence) * max(times, 0))
        elif operator == "+":
            work.spend(_shallow(left) + _shallow(right))
        elif operator == "%" and isinstance(left, str | bytes):
            text = left if isinstance(left, str) else left.decode("latin-1")
            work.fields(text, ESCAPED * work.weigh(left, right))
        return super().call_binop(context, operator, left, right)

    def turn(self, context: Any, units: int) -> bool:
        """One turn of a loop, or one run of a macro or block. True, to stand in a condition."""
        _work(context).spend(units)
        return True

    def weighed(self, context: Any, value: Any) -> Any:
        """An operand of a comparison, a key: all of it may be read."""
        work = _work(context)
        value = work.drawn(value)
        work.weigh(value)
        return value

    def printed(self, context: Any, value: Any) -> Any:
        """What is joined to a text: where it is none, its repr."""
        work = _work(context)
        weight = work.weigh(value)
        work.spend(0 if _is_text(value) else (ESCAPED - 1) * weight)
        return value

    def sliced(self, context: Any, value: Any) -> Any:
        _work(context).spend(_shallow(value))
        return value


@pass_context
def _finalize(context: Any, value: Any) -> Any:
    return context.environment.printed(context, value)


def _work(context: Any) -> Work:
    work: Work = context.resolve(WORK)
    return work


def _shallow(value: Any) -> int:
    """The units of a copy of a text or of a list, whose elements stay the same."""
    if not hasattr(value, "__len__"):
        return 1
    return len(value) if _is_text(value) else ELEMENT * len(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str | bytes)


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or a test that spends before it runs."""
    passed = getattr(getattr(function, "jinja_pass_arg", None), "name", "")

    @pass_context
    def run(context: Any, *args: Any, **kwargs: Any) -> Any:
        work = _work(context)
        if name in LAZY:
            work.spend(CALL)
            args = (work.each(args[0] or ()), *args[1:]) if args else ()
        else:
            args = tuple(work.drawn(a) for a in args)
            work.operation(name, (*args, *kwargs.values()))
        first = {
            "context": (context,),
            "eval_context": (context.eval_ctx,),
            "environment": (context.environment,),
        }
        return function(*first.get(passed, ()), *args, **kwargs)

    return run


def _count(tree: nodes.Template, environment: Sandbox) -> None:
    """Put the counting into a template's tree."""
    for concat in list(tree.find_all(nodes.Concat)):
        concat.nodes = [_own("printed", n) for n in concat.nodes]
    for item in list(tree.find_all(nodes.Getitem)):
        if isinstance(item.arg, nodes.Slice):
            item.node = _own("sliced", item.node)
        else:
            item.arg = _own("weighed", item.arg)
    operands: list[Any] = [*tree.find_all(nodes.Compare), *tree.find_all(nodes.Operand)]
    for compared in operands:
        compared.expr = _own("weighed", compared.expr)
    for pair in list(tree.find_all(nodes.Pair)):
        pair.key = _own("weighed", pair.key)
    bodies: list[Any] = list(tree.find_all(nodes.For))
    for kind in (nodes.Macro, nodes.Block, nodes.CallBlock):
        bodies += tree.find_all(kind)
    for body in bodies:
        size = sum(_size(child) for child in body.body)
        turn = nodes.ExprStmt(_own("turn", nodes.Const(CALL + size)))
        body.body = [turn.set_lineno(body.lineno), *body.body]
        if isinstance(body, nodes.For) and body.test is not None:
            units = nodes.Const(CALL + _size(body.test))
            body.test = nodes.And(_own("turn", units), body.test)
    tree.set_environment(environment)


def _size(node: nodes.Node) -> int:
    """The units that one run of a node takes, of what it prints and the values it names."""
    data = len(node.data) if isinstance(node, nodes.TemplateData) else 0
    return NODE + data + sum(_size(child) for child in node.iter_child_nodes())


def _own(name: str, expression: nodes.Expr) -> nodes.Expr:
    """A call of the sandbox's own method; a constant is as large as it is written."""
    if isinstance(expression, nodes.Const) and name != "turn":
        return expression
    return nodes.Call(nodes.EnvironmentAttribute(name), [expression], [], None, None)
