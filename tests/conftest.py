"""Counts of the comparison with transformers, at the end of a run."""


def pytest_terminal_summary(terminalreporter):
    equal = different = more = refused = 0
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            words = str(value).split()
            if name == "parity" and words[0] == "equal":
                equal += int(words[1])
            elif name == "parity":
                different += 1
            elif name == "variants":
                more, refused = more + int(words[1]), refused + int(words[3])
    if equal:
        terminalreporter.write_line(
            f"parity with transformers: {equal} classes and layer types equal, "
            f"{different} listed in tests/golden/DIFFERENCES.md; "
            f"{more} more with another rope type, {refused} that the config class refuses"
        )
