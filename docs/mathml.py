"""A MkDocs hook: formulas become MathML while the site is built, so that pages need no script.

It takes both spellings that we use: $...$ and $$...$$ in pages, which arithmatex marks up, and
:math:`...` in docstrings, which reaches the page as a code span.
"""

import html
import re

from latex2mathml.converter import convert

INLINE = re.compile(r'<span class="arithmatex">\\\((.+?)\\\)</span>', re.DOTALL)
DISPLAYED = re.compile(r'<div class="arithmatex">\s*\\\[(.+?)\\\]\s*</div>', re.DOTALL)
ROLE = re.compile(r":math:<code>(.+?)</code>", re.DOTALL)


def on_page_content(content: str, **_: object) -> str:
    """Replace every formula in the HTML of a page."""
    content = DISPLAYED.sub(lambda match: f'<div class="formula">{_mathml(match[1], "block")}</div>', content)
    content = INLINE.sub(lambda match: _mathml(match[1], "inline"), content)
    return ROLE.sub(lambda match: _mathml(match[1], "inline"), content)


def _mathml(tex: str, display: str) -> str:
    return convert(html.unescape(tex), display=display)
