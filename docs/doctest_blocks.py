"""A Griffe extension: doctests in docstrings become code blocks on the reference pages."""

import re
from typing import Any

from griffe import Extension, Object

# From a line that starts with >>> to the next blank line.
DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class DoctestBlocks(Extension):
    """Fence every doctest, so that Markdown does not read >>> as a quotation."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of one module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
