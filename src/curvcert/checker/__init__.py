"""The independent checker of saved certificates: its own reader, its own arithmetic, its own bounds.

It shares nothing with what makes certificates but the error classes and the file format: an import contract keeps it
so.
"""

from curvcert.checker.activations import Declared
from curvcert.checker.check import check_certificate, evaluate_network
from curvcert.checker.verdict import Verdict

__all__ = ["Declared", "Verdict", "check_certificate", "evaluate_network"]
