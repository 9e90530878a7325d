"""The runners are for the environments of other programs: no test of ours imports them."""

collect_ignore_glob = ["*.py"]
