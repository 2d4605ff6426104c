"""The subcommands of the command line: named and described at once, loaded when one of them is called for.

So `curvcert --help` answers at once: torch, which takes seconds to import, is loaded with a subcommand alone.
"""

from functools import cached_property
from importlib import import_module
from typing import Any, cast, final

import typer
from typer.core import TyperCommand, TyperGroup

SUBCOMMANDS = {
    "demo": "Certify an embedded MNIST network on embedded test images, and write a report.",
    "bound": "Bound how fast a model (L), and its Jacobian (K), can change: provably.",
    "certify": "Prove how far each input can move before its class changes.",
    "check": "Verify a certificate file with code that shares nothing with the code that made it.",
    "compare": "Put two certificates side by side: what each proves, at the same radii.",
    "verify": "Decide a property of a network: it holds, is violated, or that is unknown.",
    "train": "Train a classifier whose certificates are large, and certify it.",
    "audit": "Attack every bound and certificate on networks aimed at them, then on fresh random ones.",
}
"""The first line of what each says of itself.  The function `NAME_command` is in the module of that name."""


@final
class Subcommand(TyperCommand):
    """A subcommand that is loaded when it is to be run, or asked for its own help."""

    @cached_property
    def loaded(self) -> TyperCommand:
        """The command itself."""
        module = import_module(f"curvcert.cli.{self.name}")
        alone = typer.Typer(add_completion=False)
        alone.command(self.name)(getattr(module, f"{self.name}_command"))
        return cast(TyperCommand, typer.main.get_command(alone))

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Read the arguments as the command itself does, which is also what the context then runs."""
        return self.loaded.make_context(*args, **options)


@final
class Subcommands(TyperGroup):
    """All of them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {name: Subcommand(name, short_help=told) for name, told in SUBCOMMANDS.items()}
