"""The local shell certificate."""

from curvcert.certificates.shell.layers import Layers, layers_of
from curvcert.certificates.shell.shells import Query, shell_radii

__all__ = ["Layers", "Query", "layers_of", "shell_radii"]
