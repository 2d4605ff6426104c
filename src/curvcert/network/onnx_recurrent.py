"""ONNX's RNN, GRU and LSTM, step by step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvcert.errors import InvalidInput
from curvcert.network.onnx_arguments import Given

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"Tanh": torch.tanh, "Sigmoid": torch.sigmoid, "Relu": torch.relu}

_LONGEST = 1024
"""The most steps of one layer."""


@dataclass(frozen=True, eq=False)
class _Cell:
    """The weights of one direction: gates of the input, gates of the state, and both offsets."""

    W: Tensor
    R: Tensor
    b_W: Tensor
    b_R: Tensor
    functions: Sequence[Callable[[Tensor], Tensor]]

    def of_input(self, x: Tensor) -> Tensor:
        return x @ self.W.t() + self.b_W

    def of_state(self, h: Tensor | None) -> Tensor:
        return self.b_R if h is None else h @ self.R.t() + self.b_R


_Step = Callable[[_Cell, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor | None]]


def rnn(given: Given) -> Sequence[Tensor]:
    """Return what a plain recurrent network gives: all states, and the last."""

    def step(cell: _Cell, x: Tensor, h: Tensor | None, _: Any) -> tuple[Tensor, None]:
        return cell.functions[0](cell.of_input(x) + cell.of_state(h)), None

    return _unrolled(given, step, 1, ("Tanh",))[:2]


def gru(given: Given) -> Sequence[Tensor]:
    """Return what a GRU gives; its gates are z, r and h."""
    linear_before_reset = given.node.flag("linear_before_reset")

    def step(cell: _Cell, x: Tensor, h: Tensor | None, _: Any) -> tuple[Tensor, None]:
        gate, act = cell.functions
        size = cell.R.shape[1]
        of_x, of_h = cell.of_input(x), cell.of_state(h)
        z, r = (gate(of_x[..., k * size : (k + 1) * size] + of_h[..., k * size : (k + 1) * size]) for k in range(2))
        if linear_before_reset:
            reset = r * of_h[..., 2 * size :]
        else:
            reset = cell.b_R[2 * size :] if h is None else (r * h) @ cell.R[2 * size :].t() + cell.b_R[2 * size :]
        new = act(of_x[..., 2 * size :] + reset)
        return new - z * new if h is None else new + z * (h - new), None

    return _unrolled(given, step, 3, ("Sigmoid", "Tanh"))[:2]


def lstm(given: Given) -> Sequence[Tensor]:
    """Return what an LSTM gives; its gates are i, o, f and c."""
    if given.has(7) or given.node.flag("input_forget"):
        raise given.node.unsupported("an LSTM with peepholes or input_forget", "Export it without.")

    def step(cell: _Cell, x: Tensor, h: Tensor | None, c: Tensor | None) -> tuple[Tensor, Tensor]:
        gate, act, last = cell.functions
        i, o, f, new = (cell.of_input(x) + cell.of_state(h)).chunk(4, -1)
        fresh = gate(i) * act(new)
        c = fresh if c is None else gate(f) * c + fresh
        return gate(o) * last(c), c

    return _unrolled(given, step, 4, ("Sigmoid", "Tanh", "Tanh"))


def _unrolled(given: Given, step: _Step, gates: int, default: tuple[str, ...]) -> Sequence[Tensor]:
    node, x = given.node, given.tensor()
    direction, layout = node.attribute("direction", "forward"), node.flag("layout")
    names = node.attribute("activations", default * (2 if direction == "bidirectional" else 1))
    if "clip" in node.attributes or any(name not in _FUNCTIONS for name in names):
        raise node.unsupported(f"clip, or activations {names}", f"Use {', '.join(_FUNCTIONS)}, without a clip.")
    x = x.transpose(0, 1) if layout else x
    length = x.shape[0]
    if length > _LONGEST:
        raise InvalidInput(f"{node.label}: {length} steps are over the {_LONGEST} that load_onnx unrolls.")
    if given.has(4) and not bool((given.array(4, "a length") == length).all()):
        raise node.unsupported("sequences of several lengths", "Export it for sequences of one length.")
    W, R = given.constant(1, "weights"), given.constant(2, "weights")
    B = (
        given.constant(3, "offsets")
        if given.has(3)
        else torch.zeros(len(W), 2 * W.shape[1], dtype=torch.float64, device=given.device)
    )
    hs, last_h, last_c = [], [], []
    for d in range(len(W)):
        b_W, b_R = B[d].chunk(2)
        each = names[d * len(default) : (d + 1) * len(default)]
        cell = _Cell(W[d], R[d], b_W, b_R, [_FUNCTIONS[name] for name in each])
        h, c = (_initial(given, position, d, layout) for position in (5, 6))
        backwards = direction == "reverse" or d == 1
        found: list[Tensor] = []
        for t in reversed(range(length)) if backwards else range(length):
            h, c = step(cell, x[t], h, c)
            found.append(h)
        hs.append(torch.stack(found[::-1] if backwards else found))
        last_h.append(h)
        last_c.append(c)
    batch = 0 if layout else 1
    Y = torch.stack(hs, 1)
    Y = Y.permute(2, 0, 1, 3) if layout else Y
    ends = [torch.stack(list(part), 1 - batch) for part in (last_h, last_c) if part[0] is not None]  # type: ignore[arg-type]
    return [Y, *ends]


def _initial(given: Given, position: int, direction: int, layout: bool) -> Tensor | None:
    """Return the state that one direction begins with; None where it is zero."""
    if not given.has(position):
        return None
    state = given.tensor(position)
    if not given.moves(position) and not bool(given.array(position, "a state").any()):
        return None
    return state.select(1 if layout else 0, direction)
