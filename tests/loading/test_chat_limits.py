"""Template bombs: every one ends in an error, soon and without filling the memory."""

import resource
import time

import pytest

from jaxserve.errors import InvalidRequestError, ModelLoadError
from jaxserve.loading import chat_limits
from jaxserve.loading.chat_template import ChatTemplate

USER = {"role": "user", "content": "hi"}
DOUBLE = 60

BOMBS = {
    "nested loops": "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "two-way recursion": (
        "{% macro m(n) %}{% if n > 0 %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
        "{{ m(60) }}"
    ),
    "endless recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "recursive loop": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "doubling with ~": "{% set x = 'a' %}" + "{% set x = x ~ x %}" * DOUBLE + "{{ x }}",
    "doubling with +": "{% set x = 'a' %}" + "{% set x = x + x %}" * DOUBLE + "{{ x }}",
    "doubling blocks": "{% set x = 'a' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * DOUBLE,
    "doubling lists": "{% set x = [1] %}" + "{% set x = x + x %}" * DOUBLE,
    "towers of lists, shown": "{% set x = [1] %}" + "{% set x = [x, x] %}" * DOUBLE + "{{ x }}",
    "towers of lists, joined": "{% set x = [1] %}"
    + "{% set x = [x, x] %}" * DOUBLE
    + "{{ x ~ 1 }}",
    "towers of lists, JSON": "{% set x = [1] %}"
    + "{% set x = [x, x] %}" * DOUBLE
    + "{{ x|tojson }}",
    "towers of lists, %": "{% set x = [1] %}"
    + "{% set x = [x, x] %}" * DOUBLE
    + "{{ '%s' % (x,) }}",
    "towers of lists, format": (
        "{% set x = [1] %}" + "{% set x = [x, x] %}" * DOUBLE + "{{ '{}'.format(x) }}"
    ),
    "towers of lists, filter": (
        "{% set x = [1] %}" + "{% set x = [x, x] %}" * DOUBLE + "{{ x|string|length }}"
    ),
    "repeated text": "{{ 'a' * 10**10 }}",
    "repeated list": "{{ ([1] * 10**10)|length }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "product": (
        "{% set ns = namespace(x=9) %}{% for i in range(99999) %}{% set ns.x = ns.x * ns.x %}"
        "{% endfor %}"
    ),
    "center": "{{ 'a'|center(10**10) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "many wide fields": "{{ range(99999)|map('center', 100000)|join|length }}",
    "%-width": "{{ '%9999999999d' % 1 }}",
    "%-width given": "{{ '%*d' % (9999999999, 1) }}",
    "format width": "{{ '{:>9999999999}'.format(1) }}",
    "format width given": "{{ '{:{}}'.format(1, '9999999999') }}",
    "format filter": "{{ '%9999999999d'|format(1) }}",
    "replace": "{% set x = 'a' * 10**6 %}{{ x.replace('a', x)|length }}",
    "replace filter": "{% set x = 'a' * 10**6 %}{{ x|replace('a', x)|length }}",
    "join": "{% set x = 'a' * 10**6 %}{{ x.join(range(99999)|map('string'))|length }}",
    "join filter": "{% set x = 'a' * 10**6 %}{{ range(99999)|join(x)|length }}",
    "indent": "{{ ('x\n' * 10**6)|indent(10**6)|length }}",
    "JSON indent": "{{ range(9999)|list|tojson(indent=10**6)|length }}",
    "batch": "{{ [1]|batch(10**10, 'x')|list|length }}",
    "slice": "{{ [1]|slice(10**10)|list|length }}",
    "round": "{{ 3.5|round(10**9) }}",
    "range": "{{ range(10**10) }}",
}


@pytest.mark.parametrize("name", list(BOMBS))
def test_a_template_bomb_ends_in_an_error(name: str) -> None:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with pytest.raises((ModelLoadError, InvalidRequestError)):
        ChatTemplate(BOMBS[name]).render([USER])
    assert time.process_time() - start < 2 * chat_limits.MAX_SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 1 << 20  # KiB


def test_the_limits_leave_room_for_long_conversations() -> None:
    source = (
        "{% set ns = namespace(text='') %}{% for m in messages %}"
        "{% set ns.text = ns.text + m.content|trim ~ '\n' %}{{ m.role }}: {{ m.content }}\n"
        "{% endfor %}{{ ns.text|length }}{{ tools|tojson(indent=2) }}"
    )
    messages = [{"role": "user", "content": "word " * 200}] * 500
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "x": "y" * 500}} for i in range(200)
    ]
    text = ChatTemplate(source).render(messages, tools=tools)
    assert text.count("user: word") == 500
    assert text.count('"function"') == 400


def test_ordinary_filters_and_methods_still_work() -> None:
    source = (
        "{{ 'a,b'.split(',')|join('-') }} {{ 'x'|center(5) }}|{{ 'ab'.replace('a', 'c') }} "
        "{{ 'ab'|replace('b', 'd') }} {{ '%03d' % 7 }} {{ '{:>4}'.format('y') }} "
        "{{ 'l\nm'|indent(2) }} {{ [3, 1]|sort }} {{ 2 ** 10 }} {{ 'ab' * 2 }} "
        "{{ {'a': 1}|items|list }}"
    )
    text = ChatTemplate(source).render([USER])
    assert text == "a-b   x  |cb ad 007    y l\n  m [1, 3] 1024 abab [('a', 1)]"
