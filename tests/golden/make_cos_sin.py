"""Write cos_sin.json: cosines and sines to 50 digits, from mpmath alone.

    python tests/golden/make_cos_sin.py

An angle is the exact product of a float64 frequency (given in hexadecimal, so that no digit is in
doubt) and a whole position, taken in 100-digit arithmetic; nothing of this package is imported.
"""

import json
from pathlib import Path

import mpmath

DIGITS = 50
INV_FREQ = [
    1.0,
    3.0,  # more than half a turn in two tokens
    10_000.0 ** (-1 / 64),
    500_000.0 ** (-40 / 128),
    10_000.0 ** (-126 / 128),
    1e-12,
]
POWERS = [2**k + step for k in range(1, 40) for step in (-1, 0, 1)]
POSITIONS = sorted({0, 131_071, 10**9, *POWERS, -1, -2, -131_071, -(10**9), -(2**39)})


def main() -> None:
    mpmath.mp.dps = 2 * DIGITS
    angles = [[mpmath.mpf(w) * m for w in INV_FREQ] for m in POSITIONS]
    table = {
        "provenance": f"mpmath {mpmath.__version__}, 100 digits, printed to {DIGITS}; "
        "made by make_cos_sin.py; rows are positions, columns frequencies",
        "inv_freq": [w.hex() for w in INV_FREQ],
        "positions": POSITIONS,
        "cos": [[mpmath.nstr(mpmath.cos(x), DIGITS) for x in row] for row in angles],
        "sin": [[mpmath.nstr(mpmath.sin(x), DIGITS) for x in row] for row in angles],
    }
    Path(__file__).with_name("cos_sin.json").write_text(json.dumps(table, indent=0) + "\n")


if __name__ == "__main__":
    main()
