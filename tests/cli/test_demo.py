import torch
from typer.testing import CliRunner

from curvcert.cli import app
from curvcert.cli.demo import linear_layers
from curvcert.data import load_demo_network
from curvcert.operators import norm_upper_bound
from curvcert.operators.estimates import norm_estimate


def test_shows_every_layer_and_what_to_try_next() -> None:
    result = CliRunner().invoke(app, ["demo"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    for text in ("0 Conv2d", "2 Conv2d", "5 Linear", "7 Linear", "certified", "Next:"):
        assert text in result.output


def test_the_layers_are_those_of_the_network() -> None:
    model = load_demo_network().double()
    x = torch.rand(3, 1, 8, 8, dtype=torch.float64)
    maps = dict(linear_layers(model))
    assert list(maps) == ["0 Conv2d", "2 Conv2d", "5 Linear", "7 Linear"]
    hidden = x
    for position, layer in enumerate(model):
        op = maps.get(f"{position} {type(layer).__name__}")
        if op is not None:
            bias = layer.bias if layer.bias.dim() == len(op.out_shape) else layer.bias[:, None, None]
            torch.testing.assert_close(op.apply(hidden) + bias, layer(hidden), rtol=1e-13, atol=1e-13)
        hidden = layer(hidden)


def test_the_columns_keep_their_order() -> None:
    for _, op in linear_layers(load_demo_network().double()):
        exact = float(torch.linalg.matrix_norm(op.as_matrix(), 2))
        assert float(norm_upper_bound(op, p=2)) >= exact * (1 - 1e-14)
        assert float(norm_estimate(op)) <= exact * (1 + 1e-12)
