"""What tests share, and counts of the comparison with transformers at the end of a run."""

from collections import Counter

import pytest


@pytest.fixture
def one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_terminal_summary(terminalreporter):
    counts = Counter()
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name in ("parity", "variants"):
                kind, number = str(value).split()
                counts[name, kind] += int(number)
    if counts["parity", "equal"]:
        terminalreporter.write_line(
            f"parity with transformers: {counts['parity', 'equal']} classes and layer types equal, "
            f"{counts['parity', 'different']} listed in tests/golden/DIFFERENCES.md; "
            f"{counts['variants', 'equal']} more with another rope type, "
            f"{counts['variants', 'refused']} that the config class refuses, "
            f"{counts['variants', 'ours']} that only we refuse"
        )
