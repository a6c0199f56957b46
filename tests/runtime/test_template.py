"""A chat template that computes without end, or makes something huge, is told in a line; also in a server's thread."""

from __future__ import annotations

import resource
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from engines.errors import UserError
from engines.time_limit import time_limit
from runtime import template
from runtime.template import LARGEST, Template

LOOP = "{% for i in range(99999) %}"
ENDLESS = {
    "loops": 3 * LOOP + 3 * "{% endfor %}",
    "loops over what is there": "{% set a = range(99999) | list %}" + 3 * "{% for i in a %}" + 3 * "{% endfor %}",
    "macros": "{% macro f(n) %}{{ f(n - 1) or f(n - 1) if n }}{% endmacro %}{{ f(99) }}",
    "filters": LOOP + "{{ range(99999) | map('string') | select('number') | list | length }}{% endfor %}",
}
DOUBLE = "{% set n = namespace(x=SEED) %}" + LOOP + "{% set n.x = STEP %}{% endfor %}{{ n.x | string | length }}"
HUGE = {
    "a range": "{% for i in range(10 ** 12) %}{% endfor %}",
    "output": 2 * LOOP + 999 * "x" + 2 * "{% endfor %}",
    "a product": "{{ ('x' * 10 ** 6) * 10 ** 6 }}",
    "a product of lists": "{{ ([0] * 10 ** 6 * 10 ** 6) | length }}",
    "a power": "{{ 7 ** 7 ** 7 ** 7 }}",
    "a number": "{{ 'x'.ljust(9999999999) | length }}",
    "a number in a filter": "{{ 'x' | center(9999999999) | length }}",
    "a number that is read": "{{ 'x'.ljust('9999999999' | int) | length }}",
    "a sum of texts": DOUBLE.replace("SEED", "'x'").replace("STEP", "n.x + n.x"),
    "texts side by side": DOUBLE.replace("SEED", "'x'").replace("STEP", "n.x ~ n.x"),
    "a block": DOUBLE.replace("SEED", "'x'").replace("= STEP %}", "%}{{ n.x }}{{ n.x }}{% endset %}"),
    "a text in texts": DOUBLE.replace("SEED", "'xx'").replace("STEP", "n.x.replace('x', 'xx')"),
    "lists in lists": DOUBLE.replace("SEED", "[]").replace("STEP", "[n.x, n.x]"),
    "objects in objects": DOUBLE.replace("SEED", "{}").replace("STEP", "{'a': n.x, 'b': n.x}"),
    "a macro": "{% macro f(x) %}{{ f(x ~ x) }}{% endmacro %}{{ f('xx') }}",
    "parentheses": "{{ " + 9999 * "(" + "1" + 9999 * ")" + " }}",
}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "time_limit", partial(time_limit, seconds=0.5))


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_without_end(source: str) -> None:
    with ThreadPoolExecutor() as threads:
        for render in (Template(source).render, threads.submit(Template(source).render).result):
            with pytest.raises(UserError, match=r"the chat template computes for more than 0\.5 s"):
                render()


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("source", HUGE.values(), ids=HUGE)
def test_huge(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(Exception, match=rf"larger than {LARGEST:,}|Range too big|recursion depth|nested|for more than"):
        Template(source).render()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # KiB


def test_what_a_long_chat_needs() -> None:
    """Everything that is looked at is as it would be, of a chat that is larger than any model's prompt."""
    source = """
        {%- macro shown(m) -%}{{ '<' ~ m.role + '>' }}{{ m.content | trim | replace('a', 'bb') }}{%- endmacro -%}
        {%- macro asked(m) %}{{ caller() ~ m.role }}{% endmacro -%}
        {%- for m in messages if m.content is string %}{% set parts = [m.content, 7] + [(1, 2)] -%}
        {{ shown(m) }}{{ parts[1] * 2 ** 3 }}{{ '%s' % m.role }}{{ {'k': m.id} | tojson }}
        {%- call asked(m) %}!{% endcall %}
        {%- for a, b in [(1, 2)] %}{{ a + b }}{% endfor %}{% filter upper %}{{ m.role }}{% endfilter %}
        {%- set block %}{{ m.id }}{% endset %}{{ block }}{% endfor -%}"""
    messages = [{"role": "user", "content": " a" * 500, "id": 123_456_789_012_345} for _ in range(2000)]
    text = "<user>" + ("bb " * 500).strip()
    one = text + '56user{"k": 123456789012345}!user3USER123456789012345'
    assert Template(source).render(messages=messages) == one * 2000
