from pathlib import Path

import pytest
from matplotlib.figure import Figure

from curvcert.picture_files import write_figure


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_the_same_picture_is_the_same_file_whenever_it_is_written(ending: str, tmp_path: Path) -> None:
    paths = [tmp_path / "new folder" / f"{name}.{ending}" for name in ("first", "second")]
    for path in paths:
        figure = Figure()
        figure.add_subplot().plot([0.0, 1.0], [2.0, 3.0], label="a line that is clipped to its axes")
        write_figure(figure, path)
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    assert len(first) > 1000
