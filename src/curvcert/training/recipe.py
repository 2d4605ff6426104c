"""A training run as data: a frozen recipe, read from TOML, checked at birth, every field open to change."""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from curvcert.errors import InvalidInput, meant

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", tuple: "a list of numbers"}
_LARGEST_FILE = 2**13
"""Bytes: 60 KB of dots between names take tomllib 3.4 GB, by the square of their number."""
Loss = Literal["standard", "curvature", "lipschitz-margin", "radius-reward", "crm", "certified-margin"]


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a training run computes; two runs of one recipe agree bit for bit on one machine.

    >>> Recipe(data="digits", architecture="digits").updated({"epochs": "3", "epsilons": "36/255,0.5"}).epsilons
    (0.1411764705882353, 0.5)
    """

    data: Literal["digits", "mnist", "cifar10"]
    architecture: str
    activation: str = "tanh"
    mean_shift: bool = False
    mirror: bool = False

    loss: Loss = "certified-margin"
    tau: float = 1.0
    nu: float = 0.0
    epsilon: float = 0.2
    ramp_share: float = 0.4
    gradients: Literal["all", "runner-up"] = "all"
    certificate: Literal["curvature", "line", "quadratic"] = "curvature"
    global_scale: float = 0.1
    local_scale: float = 0.1
    target_radius: float = 0.5
    sharpness: float = 5.0
    block_bound: Literal["product", "hadamard"] = "product"
    norm_steps: int = 1

    weight: float = 0.01
    weight_min: float = 0.01
    weight_step: float = 0.0
    target_accuracy: float = 0.6
    accuracy_average: float = 0.001

    optimiser: Literal["adam", "muon"] = "adam"
    epochs: int = 30
    batch_size: int = 256
    learning_rate: float = 1e-3
    final_learning_rate: float = 1e-5
    beta1: float = 0.5
    beta2: float = 0.9
    weight_decay: float = 0.0
    clip: float = 0.0
    weight_average: float = 0.0

    crop: int = 0
    crop_mode: Literal["reflect", "zeros"] = "reflect"
    flip: bool = False
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0

    seed: int = 0
    epsilons: tuple[float, ...] = (36 / 255, 72 / 255, 108 / 255)
    evaluate_every: int = 1
    evaluate_samples: int = 1000
    checkpoint_every: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            _require_type(field.name, getattr(self, field.name), field.type)
        for field in fields(self):
            if field.type is float and not math.isfinite(getattr(self, field.name)):
                raise InvalidInput(f"{field.name} must be finite, got {getattr(self, field.name)}.")
        if not 0 <= self.seed < 2**64:
            raise InvalidInput(f"seed is a whole number from 0 to 2**64 - 1, got {self.seed}.")
        positive = ("tau", "epochs", "batch_size", "learning_rate", "evaluate_every", "evaluate_samples")
        for name in (*positive, "checkpoint_every", "norm_steps", "epsilon", "target_radius", "sharpness"):
            if not getattr(self, name) > 0:
                raise InvalidInput(f"{name} must be positive, got {getattr(self, name)}.")
        for name in ("beta1", "beta2", "weight_average"):
            if not 0 <= getattr(self, name) < 1:
                raise InvalidInput(f"{name} lies in [0, 1), got {getattr(self, name)}.")
        at_least_0 = ("nu", "ramp_share", "weight", "weight_min", "weight_decay", "clip", "final_learning_rate")
        for name in (*at_least_0, "global_scale", "local_scale"):
            if not getattr(self, name) >= 0:
                raise InvalidInput(f"{name} must be at least 0, got {getattr(self, name)}.")
        if self.certificate == "quadratic" and self.gradients != "runner-up":
            raise InvalidInput('certificate = "quadratic" looks at one other class: set gradients = "runner-up".')
        if not self.epsilons or not all(_is_radius(eps) for eps in self.epsilons):
            raise InvalidInput(f"epsilons are positive radii, at least one, got {list(self.epsilons)}.")

    def updated(self, changes: Mapping[str, str]) -> "Recipe":
        """Return the recipe with fields replaced by what a person wrote: `epochs=3`, `flip=true`, `epsilons=36/255`.

        Raises:
            InvalidInput: a field that does not exist, or a value of the wrong kind.
        """
        types = {field.name: field.type for field in fields(self)}
        values: dict[str, Any] = {}
        for name, text in changes.items():
            if name not in types:
                raise InvalidInput(
                    f"A recipe has no field {name!r}. Its fields are {', '.join(types)}.{meant(name, types)}"
                )
            values[name] = _parsed(name, text, types[name])
        return replace(self, **values)

    def difference(self, other: "Recipe", besides: Sequence[str] = ()) -> tuple[str, Any, Any] | None:
        """Return the first field in which another recipe differs, with both values; None where they agree.

        >>> recipe = Recipe(data="digits", architecture="digits")
        >>> recipe.difference(replace(recipe, epochs=3, seed=1), besides=["seed"])
        ('epochs', 30, 3)
        """
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name not in besides and mine != theirs:
                return field.name, mine, theirs
        return None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON and TOML hold them.

        Fields that only some recipes need are told in those, so that other models keep the digests they always had.
        """
        table = asdict(self) | {"epsilons": list(self.epsilons)}
        unused = set() if self.mirror else {"mirror"}
        if self.certificate != "quadratic":
            unused |= {"global_scale", "local_scale"}
        return {name: value for name, value in table.items() if name not in unused}


def recipe_from_dict(table: Mapping[str, Any], source: str = "The recipe") -> Recipe:
    """Return a recipe from a table of fields.

    Raises:
        InvalidInput: a field that is missing, unknown or of the wrong kind.
    """
    known = {field.name for field in fields(Recipe)}
    if unknown := sorted(set(table) - known):
        raise InvalidInput(f"{source} has the unknown field {unknown[0]!r}. Known are {', '.join(sorted(known))}.")
    if missing := [name for name in ("data", "architecture") if name not in table]:
        raise InvalidInput(f"{source} lacks {missing[0]!r}.")
    values = dict(table)
    if "epsilons" in values:
        values["epsilons"] = tuple(_number(eps, "epsilons") for eps in _sequence(values["epsilons"]))
    floats = {field.name for field in fields(Recipe) if field.type is float}
    written = {k: v for k, v in values.items() if k in floats and isinstance(v, int | str) and not isinstance(v, bool)}
    values |= {k: _number(v, k) for k, v in written.items()}
    return Recipe(**values)


def load_recipe(name: str | Path) -> Recipe:
    """Return one of curvcert's recipes by name, or one from a TOML file.

    >>> load_recipe("digits").data
    'digits'
    """
    folder = resources.files("curvcert.training") / "recipes"
    path = Path(name)
    if path.suffix == ".toml":
        if not path.is_file():
            raise InvalidInput(f"No recipe file {path}. Curvcert's own are {', '.join(recipe_names())}.")
        if path.stat().st_size > _LARGEST_FILE:
            raise InvalidInput(f"The recipe {name} has {path.stat().st_size} bytes, the limit is {_LARGEST_FILE}.")
        text = path.read_bytes()
    elif str(name) in recipe_names():
        text = (folder / f"{name}.toml").read_bytes()
    else:
        raise InvalidInput(
            f"No recipe is called {str(name)!r}. There are {', '.join(recipe_names())}; or give the path of a "
            f".toml file.{meant(str(name), recipe_names())}"
        )
    try:
        table = tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"The recipe {name} is not TOML: {error}.") from None
    return recipe_from_dict(table, f"The recipe {name}")


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with curvcert.

    >>> "digits" in recipe_names()
    True
    """
    folder = resources.files("curvcert.training") / "recipes"
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def _is_radius(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _sequence(value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise InvalidInput(f"epsilons is a list of radii, got {value!r}.")
    return value


def _number(value: Any, name: str) -> float:
    """Return a number that is written as one, or as a fraction: 36/255."""
    try:
        return float(Fraction(value)) if isinstance(value, str) and "/" in value else float(value)
    except (ValueError, TypeError, ZeroDivisionError, OverflowError):
        raise InvalidInput(f"{name} needs a number, or a fraction such as 36/255, got {value!r}.") from None


def _parsed(name: str, text: str, kind: Any) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise InvalidInput(f"{name} is true or false, got {text!r}.")
        return text.lower() == "true"
    if kind is int:
        try:
            return int(text)
        except ValueError:
            raise InvalidInput(f"{name} needs a whole number, got {text!r}.") from None
    if kind is float:
        return _number(text, name)
    if get_origin(kind) is tuple:
        return tuple(_number(part.strip(), name) for part in text.split(","))
    return text


def _require_type(name: str, value: Any, kind: Any) -> None:
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise InvalidInput(f"{name} is one of {', '.join(get_args(kind))}, got {value!r}.")
        return
    expected = tuple if get_origin(kind) is tuple else kind
    allowed = (int, float) if expected is float else (expected,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and expected is not bool):
        raise InvalidInput(f"{name} needs {_KINDS[expected]}, got {value!r}.")
