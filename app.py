"""The page as a hosted demo: `python app.py`, on the host and port that the environment names."""

import os

from rotary.explorer import serve

if __name__ == "__main__":
    serve(
        host=os.environ.get("HOST", "127.0.0.1"),
        port=int(os.environ.get("PORT", "7860")),
    )
