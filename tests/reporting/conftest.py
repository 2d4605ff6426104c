"""A case that several files of this folder read, certified once."""

import pytest

from tests.reporting.cases import Case, certified


@pytest.fixture(scope="session")
def case() -> Case:
    return certified()
