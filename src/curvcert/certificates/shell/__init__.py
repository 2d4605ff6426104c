"""The local shell certificate."""

from curvcert.certificates.shell.centre import at_centres
from curvcert.certificates.shell.layers import Layers, layers_of
from curvcert.certificates.shell.shells import Query, gradient_growth, numbers_of_sample, shell_radii

__all__ = ["Layers", "Query", "at_centres", "gradient_growth", "layers_of", "numbers_of_sample", "shell_radii"]
