"""Under pytest, tests and doctests alike, the shapes in curvcert's annotations are checked at run time."""

from jaxtyping import install_import_hook

from tests.shape_checks import check_shapes

install_import_hook("curvcert", f"{check_shapes.__module__}.{check_shapes.__name__}")
