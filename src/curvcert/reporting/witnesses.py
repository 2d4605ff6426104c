"""Pictures of witnesses: the input, the misclassified point, and the step between them."""

from pathlib import Path

from matplotlib.figure import Figure
from torch import Tensor

from curvcert.certificates import Certificate
from curvcert.errors import InvalidInput
from curvcert.network import Network
from curvcert.picture_files import write_figure


def draw_witnesses(certificate: Certificate, network: Network, x: Tensor, path: str | Path, most: int = 5) -> None:
    """Draw up to `most` witnesses of grey images, nearest first, into a file; the step is amplified to be seen."""
    found = (certificate.attack_radius.isfinite() & certificate.correct).nonzero().flatten()
    if len(found) == 0:
        raise InvalidInput("This certificate has no witness to draw. Certify more samples.")
    if x.dim() != 4 or x.shape[1] != 1:
        raise InvalidInput(f"Expected grey images of shape (batch, 1, height, width), got {tuple(x.shape)}.")
    shown = found[certificate.attack_radius[found].argsort()][:most]
    points = certificate.witness[shown]
    classes = network(points).flatten(1).argmax(dim=1)
    figure = Figure(figsize=(1.5 * len(shown), 4.6), layout="constrained")
    grid = figure.subplots(3, len(shown), squeeze=False)
    for column, (index, after) in enumerate(zip(shown.tolist(), classes.tolist(), strict=True)):
        image, witness = x[index, 0].cpu(), points[column, 0].cpu()
        step = witness - image
        before, distance = int(certificate.label[index]), float(certificate.attack_radius[index])
        titles = (f"{before}", f"{after}", f"step, l{certificate.p:g} {distance:.3f}")
        for row, picture in enumerate((image, witness, step)):
            size = 1.0 if row < 2 else float(step.abs().max().clamp(min=1e-12))
            axes = grid[row][column]
            low = 0.0 if row < 2 else -size
            axes.imshow(picture.numpy(), cmap="gray" if row < 2 else "PuOr", vmin=low, vmax=size)
            axes.set_title(titles[row], fontsize=9)
            axes.set_xticks([])
            axes.set_yticks([])
    write_figure(figure, path)
