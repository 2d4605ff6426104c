"""The tests that need an accelerator, run on one, and what came of them.

Claim: on CUDA the bounds, the certificates and the training steps are those of the CPU, to float tolerance.
Hardware: one CUDA device; the record says which.
Trials: every test marked gpu, once.

    python -m benchmarks.gpu_tests
"""

from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks.harness import require_known_code, write_record

TESTS = ("tests/certificates/test_gpu.py", "tests/training/test_gpu.py")


class Outcomes:
    """What became of each test."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test's outcome: that of its body, or of its set-up where that did not pass."""
        if report.when == "call" or report.outcome != "passed":
            self.found[report.nodeid] = report.outcome


def main() -> None:
    """Run them and record."""
    if not torch.cuda.is_available():
        raise SystemExit("These tests need a CUDA device, and there is none here.")
    require_known_code()
    outcomes = Outcomes()
    root = Path(__file__).parents[1]
    # The shapes in annotations are checked by the tests on a CPU; what checks them may be missing here.
    arguments = ["--noconftest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *(str(root / path) for path in TESTS)]
    status = pytest.main(arguments, plugins=[outcomes])
    counts = dict(Counter(outcomes.found.values()))
    config = {"device": torch.cuda.get_device_name(), "files": list(TESTS)}
    write_record("gpu_tests", "python -m benchmarks.gpu_tests", 0, config, {"counts": counts, "tests": outcomes.found})
    raise SystemExit(int(status))


if __name__ == "__main__":
    main()
