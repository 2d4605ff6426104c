"""Recipes: read from TOML, every field open to change, every bad value refused."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from curvcert.errors import InvalidInput
from curvcert.training import Recipe, load_recipe, recipe_from_dict, recipe_names

PLAIN = Recipe(data="digits", architecture="digits")

CHANGES = {
    "data": ("mnist", "mnist"),
    "architecture": ("6F", "6F"),
    "activation": ("centred_softplus", "centred_softplus"),
    "mean_shift": ("True", True),
    "mirror": ("true", True),
    "loss": ("crm", "crm"),
    "gradients": ("runner-up", "runner-up"),
    "certificate": ("line", "line"),
    "block_bound": ("hadamard", "hadamard"),
    "optimiser": ("muon", "muon"),
    "crop_mode": ("zeros", "zeros"),
    "flip": ("true", True),
    "epsilons": ("36/255, 0.5,1", (36 / 255, 0.5, 1.0)),
}
"""A change of every field that is no plain number; the others are changed to 1/2 or 3."""


@pytest.mark.parametrize("name", [field.name for field in fields(Recipe)])
def test_every_field_can_be_changed(name: str) -> None:
    kind = next(field.type for field in fields(Recipe) if field.name == name)
    text, expected = CHANGES.get(name, ("3", 3) if kind is int else ("1/2", 0.5))
    changed = PLAIN.updated({name: text})
    assert getattr(changed, name) == expected
    assert type(getattr(changed, name)) is type(expected)
    assert replace(changed, **{name: getattr(PLAIN, name)}) == PLAIN


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("epoch", "3", "no field 'epoch'. Its fields are data, architecture"),
        ("epochs", "3.5", "epochs needs a whole number, got '3.5'"),
        ("epochs", "0", "epochs must be positive"),
        ("flip", "yes", "flip is true or false, got 'yes'"),
        ("tau", "warm", "tau needs a number, or a fraction such as 36/255, got 'warm'"),
        ("tau", "1/0", "tau needs a number"),
        ("tau", "nan", "tau must be finite"),
        ("learning_rate", "inf", "learning_rate must be finite"),
        ("learning_rate", "-1", "learning_rate must be positive"),
        ("loss", "hinge", "loss is one of standard, curvature"),
        ("data", "imagenet", "data is one of digits, mnist, cifar10"),
        ("epsilons", "0.1,x", "epsilons needs a number"),
        ("epsilons", "", "epsilons needs a number"),
        ("epsilons", "0.1,-1", "epsilons are positive radii"),
        ("epsilons", "inf", "epsilons are positive radii"),
        ("beta1", "1", r"beta1 lies in \[0, 1\)"),
        ("weight", "-0.1", "weight must be at least 0"),
        ("seed", "-1", "seed is a whole number from 0"),
        ("seed", str(2**64), "seed is a whole number from 0"),
    ],
)
def test_bad_values_are_refused(name: str, text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        PLAIN.updated({name: text})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"architecture": "digits"}, "The recipe lacks 'data'"),
        ({"data": "digits"}, "The recipe lacks 'architecture'"),
        ({"data": "digits", "architecture": "digits", "epoch": 3}, "unknown field 'epoch'"),
        ({"data": "digits", "architecture": "digits", "epochs": "3"}, "epochs needs a whole number, got '3'"),
        ({"data": "digits", "architecture": "digits", "epochs": True}, "epochs needs a whole number, got True"),
        ({"data": "digits", "architecture": "digits", "tau": True}, "tau needs a number, got True"),
        ({"data": "digits", "architecture": "digits", "tau": [1]}, r"tau needs a number, got \[1\]"),
        ({"data": "digits", "architecture": "digits", "flip": 1}, "flip needs true or false, got 1"),
        ({"data": ["digits"], "architecture": "digits"}, "data is one of"),
        ({"data": "digits", "architecture": 6}, "architecture needs a text, got 6"),
        ({"data": "digits", "architecture": "digits", "epsilons": 0.1}, "epsilons is a list of radii"),
        ({"data": "digits", "architecture": "digits", "epsilons": []}, "at least one"),
    ],
)
def test_bad_tables_are_refused(table: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        recipe_from_dict(table)


def test_a_table_may_hold_fractions_and_whole_numbers() -> None:
    table = {"data": "digits", "architecture": "digits", "epsilon": "36/255", "tau": 2, "epsilons": ["1/4", 1]}
    recipe = recipe_from_dict(table)
    assert (recipe.epsilon, recipe.tau, recipe.epsilons) == (36 / 255, 2.0, (0.25, 1.0))


def test_as_dict_and_back() -> None:
    for name in recipe_names():
        recipe = load_recipe(name)
        assert recipe_from_dict(recipe.as_dict()) == recipe


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(AttributeError):
        PLAIN.epochs = 3  # type: ignore[misc]


def test_recipes_from_files(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('data = "digits"\narchitecture = "digits"\nepochs = 7\n')
    assert load_recipe(file) == replace(PLAIN, epochs=7)
    assert load_recipe(str(file)) == replace(PLAIN, epochs=7)


@pytest.mark.parametrize("content", [b"data = digits", b'data = "\xff"', b"\x00", b"[data"])
def test_a_file_that_is_not_toml_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "mine.toml"
    file.write_bytes(content)
    with pytest.raises(InvalidInput, match=r"mine\.toml is not TOML"):
        load_recipe(file)


def test_recipes_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"No recipe is called 'digit'\. There are .*digits"):
        load_recipe("digit")
    with pytest.raises(InvalidInput, match=r"No recipe file .*none\.toml"):
        load_recipe(tmp_path / "none.toml")


def test_the_names_are_those_of_the_files() -> None:
    assert "digits" in recipe_names()
    assert recipe_names() == sorted(recipe_names())


def test_scales_of_curvature_are_told_where_they_count() -> None:
    recipe = Recipe(data="digits", architecture="digits", gradients="runner-up")
    assert not {"global_scale", "local_scale"} & set(recipe.as_dict())
    local = replace(recipe, certificate="quadratic", local_scale=0.2)
    assert recipe_from_dict(local.as_dict()) == local and local.as_dict()["local_scale"] == 0.2
    with pytest.raises(InvalidInput, match='set gradients = "runner-up"'):
        replace(local, gradients="all")
